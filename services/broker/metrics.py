"""The broker's Prometheus metrics. Job metrics are read from the ledger at each scrape: all brokers report the same."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import prometheus_client
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from onbeat.contracts.records import WeightsRecord
from onbeat.contracts.states import JobState
from onbeat.streams.inspection import existing_jobs
from onbeat.streams.ledger import Ledger

REPLACED = "replaced"  # these are counted by an outcome, too
OUTCOMES = {
    "accepted": "num_accepted",
    "failed": "num_failed_groups",
    "stale": "num_stale",
    "duplicate": "num_duplicate",
}
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
LATENCY_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)


class JobGauges(Collector):
    """The gauges of jobs, filled from the ledger once for one rendering."""

    def __init__(self) -> None:
        self.jobs = GaugeMetricFamily("onbeat_jobs", "Jobs by state.", labels=["state"])
        self.iterations = CounterMetricFamily("onbeat_iterations_committed", "Committed iterations.", labels=["job_id"])
        self.versions = GaugeMetricFamily(
            "onbeat_policy_version", "Newest published policy version.", labels=["job_id"]
        )
        self.groups = CounterMetricFamily("onbeat_groups", "Submitted groups by outcome.", labels=["job_id", "outcome"])
        self.replaced = CounterMetricFamily(
            "onbeat_replaced_groups", "Accepted or failed groups that another prompt replaced.", labels=["job_id"]
        )
        self.handed_back = CounterMetricFamily(
            "onbeat_handed_back_groups", "Times that a rollout handed a group back.", labels=["job_id"]
        )
        self.discarded_tokens = CounterMetricFamily(
            "onbeat_discarded_tokens", "Tokens sampled for groups that came to nothing.", labels=["job_id"]
        )
        self.unreadable = GaugeMetricFamily(
            "onbeat_unreadable_records", "Jobs and heartbeats that cannot be read and are left out.", labels=["kind"]
        )
        # These are of the newest policy version that a rollout has served.
        self.open_s = GaugeMetricFamily(
            "onbeat_weight_open_seconds",
            "From the optimizer step's begin to the engine open on its version, at the slowest rollout.",
            labels=["job_id"],
        )
        self.full_bytes = GaugeMetricFamily("onbeat_weight_full_bytes", "Size of the version.", labels=["job_id"])
        self.received_bytes = GaugeMetricFamily(
            "onbeat_weight_received_bytes", "What its rollouts received, together.", labels=["job_id"]
        )

    def collect(self) -> list[Metric]:
        return list(vars(self).values())  # the order in which they are rendered

    def add_weights(self, job_id: str, record: WeightsRecord) -> None:
        updates = record.rollouts.values()
        open_s = [update.open_s for update in updates if update.open_s is not None]
        if open_s:
            self.open_s.add_metric([job_id], max(open_s))
        if record.full_bytes is not None:
            self.full_bytes.add_metric([job_id], record.full_bytes)
        self.received_bytes.add_metric([job_id], sum(update.received_bytes for update in updates))


@dataclass
class JobTotals:
    """The group counts of a job over its iterations; those that can no longer change are read once."""

    settled: Counter[str] = field(default_factory=Counter)
    num_settled: int = 0


def known_method(method: str) -> str:
    """Return the method, or `other` if it is unknown: a client may send any word, but a label needs few values."""
    return method if method in METHODS else "other"


class Meters:
    """All metrics of this broker: its own in a registry, those of jobs read at each scrape."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        prometheus_client.ProcessCollector(registry=registry)
        self._latency = Histogram(
            "onbeat_http_request_seconds",
            "Time to answer a request, streams to their end.",
            ["method", "route", "status"],
            registry=registry,
            buckets=LATENCY_BUCKETS_S,
        )
        self.traces = prometheus_client.Counter(
            "onbeat_traces", "Iterations by what became of their trace.", ["outcome"], registry=registry
        )
        self.trace_failures = prometheus_client.Counter(
            "onbeat_trace_failures", "Tries in which the collector, or Redis, was away.", registry=registry
        )
        self._totals: dict[str, JobTotals] = {}
        self._reading = asyncio.Lock()  # two at once would count an iteration twice

    def observe_request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count an answered request. `method`: the word that the client sent."""
        self._latency.labels(known_method(method), route, str(status)).observe(seconds)

    async def render(self, ledger: Ledger) -> tuple[bytes, str]:
        async with self._reading:
            of_jobs = await self._read_jobs(ledger)
        return generate_latest(self._registry) + generate_latest(of_jobs), CONTENT_TYPE_LATEST

    async def _read_jobs(self, ledger: Ledger) -> JobGauges:
        gauges, counts = JobGauges(), Counter(await ledger.lists.counts())
        started = await ledger.lists.started()
        existing = await existing_jobs(ledger, list(dict.fromkeys([*started, *self._totals])))
        self._totals = {job_id: self._totals.get(job_id, JobTotals()) for job_id in existing}
        num_unreadable: Counter[str] = Counter(job=0, heartbeat=0)
        for job_id, fields in existing.items():
            try:
                state = await self._add_job(ledger, job_id, fields, gauges)
            except (ValueError, LookupError):
                num_unreadable["job"] += 1
                continue
            if state.is_final:
                del self._totals[job_id]  # these were its last values
            elif state is not JobState.PENDING:
                counts[state] += 1
        for pool in {"default", *(fields.get("pool", "default") for fields in existing.values())}:
            for processes in (ledger.trainers, ledger.workers):
                num_unreadable["heartbeat"] += len((await processes.heartbeats(pool)).unreadable)
        for state in JobState:
            gauges.jobs.add_metric([state.value], counts[state])
        for kind, number in num_unreadable.items():
            gauges.unreadable.add_metric([kind], number)
        return gauges

    async def _add_job(self, ledger: Ledger, job_id: str, fields: dict[str, str], gauges: JobGauges) -> JobState:
        """Add a job's values. Raises ValueError or LookupError when the record of the job cannot be read."""
        state, version = JobState(fields["state"]), int(fields.get("policy_version", "-1"))
        next_iteration, num_opened = int(fields["next_iteration"]), int(fields["num_opened"])
        counts = await self._count_groups(ledger, job_id, next_iteration, num_opened)
        weights = await newest_served(ledger, job_id, version)
        gauges.iterations.add_metric([job_id], next_iteration)
        gauges.versions.add_metric([job_id], version)
        if weights is not None:
            gauges.add_weights(job_id, weights)
        gauges.replaced.add_metric([job_id], counts.pop(REPLACED))
        gauges.handed_back.add_metric([job_id], int(fields.get("num_handed_back", "0")))
        gauges.discarded_tokens.add_metric([job_id], int(fields.get("num_discarded_tokens", "0")))
        for outcome, number in counts.items():
            gauges.groups.add_metric([job_id, outcome], number)
        return state

    async def _count_groups(self, ledger: Ledger, job_id: str, next_iteration: int, num_opened: int) -> Counter[str]:
        totals = self._totals[job_id]
        while totals.num_settled < next_iteration - 1:  # late duplicates of the last one may still come
            totals.settled += await read_outcomes(ledger, job_id, totals.num_settled)
            totals.num_settled += 1
        counts = Counter(dict.fromkeys([*OUTCOMES, REPLACED], 0))
        counts.update(totals.settled)
        for iteration in range(totals.num_settled, num_opened):
            counts.update(await read_outcomes(ledger, job_id, iteration))
        return counts


async def read_outcomes(ledger: Ledger, job_id: str, iteration: int) -> Counter[str]:
    """Count an iteration's groups by outcome, and those that were replaced. A failed group is accepted as one without
    training data: here it counts as failed, not as accepted."""
    fields = await ledger.iterations.fields(job_id, iteration)
    counts = Counter({outcome: int(fields.get(name, "0")) for outcome, name in OUTCOMES.items()})
    counts["accepted"] -= counts["failed"]
    counts[REPLACED] = int(fields.get("num_replaced", "0"))
    return counts


async def newest_served(ledger: Ledger, job_id: str, version: int) -> WeightsRecord | None:
    """Return the record of the newest served version up to the published one; not every number is published."""
    served = [candidate for candidate in await ledger.versions.ready_times(job_id) if candidate <= version]
    return await ledger.versions.weights(job_id, max(served)) if served else None
