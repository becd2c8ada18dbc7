"""Prometheus metrics. What happened to jobs is read from the ledger at every scrape: any broker tells the same."""

from collections import Counter
from dataclasses import dataclass, field

import prometheus_client
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from onbeat.errors import JobNotFound
from onbeat.streams.ledger import Ledger
from onbeat.types import JobState, WeightsRecord

OUTCOMES = {
    "accepted": "num_accepted",
    "failed": "num_failed_groups",
    "stale": "num_stale",
    "duplicate": "num_duplicate",
}
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
LATENCY_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)


class WeightGauges:
    """Of the newest policy version of each job that a rollout has served."""

    def __init__(self) -> None:
        self._open_s = GaugeMetricFamily(
            "onbeat_weight_open_seconds",
            "From the optimizer step's begin to the engine open on its version, at the slowest rollout.",
            labels=["job_id"],
        )
        self._full_bytes = GaugeMetricFamily("onbeat_weight_full_bytes", "Size of the version.", labels=["job_id"])
        self._received_bytes = GaugeMetricFamily(
            "onbeat_weight_received_bytes", "What its rollouts received, together.", labels=["job_id"]
        )
        self.families: list[Metric] = [self._open_s, self._full_bytes, self._received_bytes]

    def add(self, job_id: str, record: WeightsRecord | None) -> None:
        if record is None:
            return
        updates = record.rollouts.values()
        open_s = [update.open_s for update in updates if update.open_s is not None]
        if open_s:
            self._open_s.add_metric([job_id], max(open_s))
        if record.full_bytes is not None:
            self._full_bytes.add_metric([job_id], record.full_bytes)
        self._received_bytes.add_metric([job_id], sum(update.received_bytes for update in updates))


@dataclass
class JobTotals:
    """Group counts of a job over its iterations; those that can no longer change are read once."""

    settled: Counter[str] = field(default_factory=Counter)
    num_settled: int = 0
    state: JobState = JobState.PENDING


class Snapshot(Collector):
    """Families computed just now, for one rendering."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def known_method(method: str) -> str:
    """Few values, where a client may choose any word."""
    return method if method in METHODS else "other"


class TraceMeters:
    """Of this broker."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.traces = prometheus_client.Counter(
            "onbeat_traces", "Iterations by what became of their trace.", ["outcome"], registry=registry
        )
        self.failures = prometheus_client.Counter(
            "onbeat_trace_failures", "Tries in which the collector was away.", registry=registry
        )


class Meters:
    def __init__(self) -> None:
        self._requests = CollectorRegistry()
        self._latency = Histogram(
            "onbeat_http_request_seconds",
            "Time to answer a request, long polls included.",
            ["method", "route", "status"],
            registry=self._requests,
            buckets=LATENCY_BUCKETS_S,
        )
        self.traces = TraceMeters(self._requests)
        self._totals: dict[str, JobTotals] = {}

    def observe_request(self, method: str, route: str, status: int, seconds: float) -> None:
        """`method`: whatever a client sent."""
        self._latency.labels(known_method(method), route, str(status)).observe(seconds)

    async def render(self, ledger: Ledger) -> tuple[bytes, str]:
        registry = CollectorRegistry()
        registry.register(Snapshot(await self._read_jobs(ledger)))
        return generate_latest(self._requests) + generate_latest(registry), CONTENT_TYPE_LATEST

    async def _read_jobs(self, ledger: Ledger) -> list[Metric]:
        jobs = GaugeMetricFamily("onbeat_jobs", "Jobs by state.", labels=["state"])
        iterations = CounterMetricFamily("onbeat_iterations_committed", "Committed iterations.", labels=["job_id"])
        versions = GaugeMetricFamily("onbeat_policy_version", "Newest published policy version.", labels=["job_id"])
        groups = CounterMetricFamily("onbeat_groups", "Submitted groups by outcome.", labels=["job_id", "outcome"])
        weights = WeightGauges()
        for job_id in await ledger.job_ids():
            totals = self._totals.setdefault(job_id, JobTotals())
            if totals.state.is_final:
                continue  # counted below, gone from the series
            try:
                fields = await ledger.job_fields(job_id)
            except JobNotFound:
                del self._totals[job_id]
                continue
            totals.state = JobState(fields["state"])
            next_iteration = int(fields["next_iteration"])
            iterations.add_metric([job_id], next_iteration)
            versions.add_metric([job_id], float(fields.get("policy_version", "-1")))
            weights.add(job_id, await newest_served(ledger, job_id, int(fields.get("policy_version", "-1"))))
            num_opened = int(fields["num_opened"])
            for outcome, count in (await self._count_groups(ledger, job_id, next_iteration, num_opened)).items():
                groups.add_metric([job_id, outcome], count)
        states = Counter(totals.state for totals in self._totals.values())
        for state in JobState:
            jobs.add_metric([state.value], states[state])
        return [jobs, iterations, versions, groups, *weights.families]

    async def _count_groups(self, ledger: Ledger, job_id: str, next_iteration: int, num_opened: int) -> Counter[str]:
        totals = self._totals[job_id]
        while totals.num_settled < next_iteration - 1:  # late duplicates of the last one may still come
            totals.settled += await read_outcomes(ledger, job_id, totals.num_settled)
            totals.num_settled += 1
        counts = Counter(dict.fromkeys(OUTCOMES, 0))
        counts.update(totals.settled)
        for iteration in range(totals.num_settled, num_opened):
            counts.update(await read_outcomes(ledger, job_id, iteration))
        return counts


async def read_outcomes(ledger: Ledger, job_id: str, iteration: int) -> Counter[str]:
    """A failed group is accepted as one without training data: it counts as failed here, not as accepted."""
    fields = await ledger.iteration_fields(job_id, iteration)
    counts = Counter({outcome: int(fields.get(name, "0")) for outcome, name in OUTCOMES.items()})
    counts["accepted"] -= counts["failed"]
    return counts


async def newest_served(ledger: Ledger, job_id: str, version: int) -> WeightsRecord | None:
    """Of the versions up to the published one the newest that a rollout serves; not every number is published."""
    served = [candidate for candidate in await ledger.ready_times(job_id) if candidate <= version]
    return await ledger.weights(job_id, max(served)) if served else None
