"""The trace of a committed iteration, from its prompts to its gradient, put together from the ledger afterwards.

    iteration
      pull, load              of the weights that generated it, by rollout
      group                   from when its prompt was there to be claimed to the step that used it
        wait_for_rollout, generate, score (none of them of a row of examples), wait_for_trainer, micro_batch
      checkpoint, optimizer, publish

Ids are hashes of job, iteration and the span's path: they can be computed from these, and a span that is exported again
is the same span. All moments are by the Redis clock.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, Status, StatusCode, TraceFlags

from onbeat import __version__
from onbeat.contracts.records import Event, IterationRecord, Span
from onbeat.streams.ledger import Ledger
from onbeat.streams.records import Fields, read_iterations
from services.broker.views.spans import (
    TRAINER,
    AcceptedGroup,
    group_spans,
    read_groups,
    read_held,
    trainer_spans,
    weight_spans,
)

BROKER = "broker"  # the lane of spans in which a group waits
MAX_MESSAGE = 200  # characters of a failure
OF_RECORD = (
    *("policy_version", "num_groups", "num_replaced", "num_failed_groups", "num_responses", "prompt_tokens"),
    *("response_tokens", "reward_mean", "reward_std", "staleness_max", "mismatch_mean", "wall_s", "generate_s"),
    *("train_s", "weight_sync_s", "rollout_idle_frac", "trainer_idle_frac", "tpspd", "iteration"),
)
OF_GROUP = (
    *("group_id", "worker_id", "policy_version", "num_responses"),
    *("prompt_tokens", "response_tokens", "reward_mean"),
)
SCOPE = InstrumentationScope("onbeat", __version__)
SAMPLED = TraceFlags(TraceFlags.SAMPLED)


# ---- the terms of OpenTelemetry --------------------------------------------------------------------------------------


def trace_id(job_id: str, iteration: int) -> str:
    """Return 32 hex digits: the first ones of the SHA-256 of `JOB/ITERATION`."""
    return sha256(f"{job_id}/{iteration}".encode()).hexdigest()[:32]


def span_id(job_id: str, iteration: int, path: str) -> str:
    """Return 16 hex digits: the first ones of the SHA-256 of `JOB/ITERATION/PATH`."""
    return sha256(f"{job_id}/{iteration}/{path}".encode()).hexdigest()[:16]


def context_of(job_id: str, iteration: int, path: str) -> SpanContext:
    trace, span = trace_id(job_id, iteration), span_id(job_id, iteration, path)
    return SpanContext(int(trace, 16), int(span, 16), is_remote=False, trace_flags=SAMPLED)


@cache
def resource_of(service: str, instance: str) -> Resource:
    attributes = {"service.name": f"onbeat-{service}", "service.version": __version__}
    return Resource(attributes | ({"service.instance.id": instance} if instance else {}))


def to_nanoseconds(time_s: float) -> int:
    """Convert seconds to nanoseconds, in whole microseconds: a float does not hold more. Raises OverflowError."""
    time_ns = round(time_s * 1e6) * 1000
    if not 0 <= time_ns < 2**63:
        raise OverflowError(f"{time_s:g} s is no time of a span")
    return time_ns


def known_attributes(source: object, names: Iterable[str]) -> dict[str, Any]:
    known = ((name, getattr(source, name)) for name in names)
    return {f"onbeat.{name}": value for name, value in known if value is not None}


class Trace:
    """The spans of one iteration. `trainer`: the id of the trainer; '' if it is unknown."""

    def __init__(self, job_id: str, iteration: int, trainer: str) -> None:
        self.job_id, self.iteration, self.trainer = job_id, iteration, trainer
        self.spans: list[ReadableSpan] = []

    def span(self, kind: str, lane: str, start: float, end: float) -> Span:
        return Span(lane=lane, kind=kind, start=start, end=max(start, end), iteration=self.iteration)

    def add(
        self,
        span: Span,
        path: str,
        parent: str = "iteration",
        *,
        attributes: dict[str, Any] | None = None,
        link: tuple[int, str] | None = None,
        error: str = "",
    ) -> None:
        """Add a span under the path of another one; '' for the root. `link`: iteration and path of a related span."""
        service, instance = {BROKER: (BROKER, ""), TRAINER: (TRAINER, self.trainer)}.get(
            span.lane, ("rollout", span.lane)
        )
        self.spans.append(
            ReadableSpan(
                name=span.kind,
                context=context_of(self.job_id, self.iteration, path),
                parent=context_of(self.job_id, self.iteration, parent) if parent else None,
                resource=resource_of(service, instance),
                attributes=attributes,
                links=[Link(context_of(self.job_id, *link))] if link else [],
                status=Status(StatusCode.ERROR, error) if error else Status(),
                start_time=to_nanoseconds(span.start),
                end_time=to_nanoseconds(span.end),
                instrumentation_scope=SCOPE,
            )
        )


# ---- reading ---------------------------------------------------------------------------------------------------------


async def read_trace(ledger: Ledger, job: Fields, events: Sequence[Event], iteration: int) -> list[ReadableSpan] | None:
    """Return the trace of a committed iteration, the root last; None when its groups are no longer kept.

    Raises JobNotFound, and ValueError for data that another trainer implementation may have written.
    """
    job_id = job["id"]
    records = {past.iteration: past for past in await read_iterations(ledger, job_id, iteration - 2, 2)}
    record, previous = records[iteration], records.get(iteration - 1)
    accepted = (await read_groups(ledger, job_id, iteration)).values()
    groups = [group for group in accepted if group is not None]
    if len(groups) < len(accepted) or record.committed_at is None:
        return None
    has_changed = any(event.kind == "job.taken_over" and event.time > record.committed_at for event in events)
    trace = Trace(job_id, iteration, "" if has_changed else job.get("owner", ""))
    held = await read_held(ledger, job_id, [record.policy_version])
    for event in updates_for(events, record, previous):
        for span in weight_spans([event], held):
            version = span.iteration
            link = (version - 1, "publish") if version else None
            path = f"{span.kind}/{span.lane}/{event.id}"
            trace.add(span, path, attributes={"onbeat.policy_version": version}, link=link)
    fields = await ledger.iterations.fields(job_id, iteration)
    trained = [span for span in trainer_spans(iteration, fields) if span.kind != "wait"]
    num_updates = int(json.loads(job["config"]).get("training", {}).get("num_updates_per_iteration", 1))
    num_updates = 1 if record.is_supervised else num_updates
    recorded = await ledger.iterations.micro_batches(job_id, iteration)
    num_replicas = int(json.loads(fields.get("metrics", "{}")).get("num_training_devices", 1))
    steps = find_steps(trained, recorded, num_updates, record.num_groups, num_replicas)
    replaced_at = replacement_times(groups, record)
    for group in groups:
        number = update_of(group.group_id, num_updates, record.num_groups)
        step = steps.get(group.group_id, Step(number, None))
        add_group(trace, group, record, replaced_at.get(group.group_id, record.opened_at), step)
    add_steps(trace, trained)
    add_root(trace, job, record)
    return trace.spans


def updates_for(events: Iterable[Event], record: IterationRecord, previous: IterationRecord | None) -> Iterator[Event]:
    """Yield the events of rollouts that began to serve the iteration's weights. In `bounded` several iterations may
    have the same version: each event belongs to the first of them that was committed after it, and so to one trace."""
    version, until = record.policy_version, record.committed_at or 0.0
    since = (previous.committed_at or 0.0) if previous and previous.policy_version == version else 0.0
    for event in events:
        is_update = event.kind == "worker.updated" and event.data["policy_version"] == version
        if is_update and since < event.time <= until:
            yield event


def replacement_times(groups: Sequence[AcceptedGroup], record: IterationRecord) -> dict[str, float]:
    """Return when the prompt of each group that replaced another was dispatched: when the other one was accepted.

    `groups`: in the order of their acceptance, in which spare prompts of a source are taken.
    """
    first = record.num_groups - record.num_replaced
    ids = [f"{record.iteration}-{index}" for index in range(first, record.num_groups)]
    source_of = {group.group_id: group.source for group in groups}
    times: dict[str, float] = {}
    for source in dict.fromkeys(source_of.values()):
        moments = [group.accepted_at for group in groups if group.source == source and not group.has_signal]
        replacing = [group_id for group_id in ids if source_of.get(group_id, source) == source]
        times |= dict(zip(replacing, moments, strict=False))
    return times


# ---- spans -----------------------------------------------------------------------------------------------------------


def add_root(trace: Trace, job: Fields, record: IterationRecord) -> None:
    """Add a span around all others: pulling the weights may begin before the opening, and a clock may be off."""
    start, end = record.opened_at, record.committed_at or record.opened_at
    for span in trace.spans:
        start, end = min(start, (span.start_time or 0) / 1e9), max(end, (span.end_time or 0) / 1e9)
    attributes = {"onbeat.job_id": job["id"], "onbeat.job_name": job.get("name", "")}
    attributes |= known_attributes(record, OF_RECORD)
    trace.add(trace.span("iteration", BROKER, start, end), "iteration", parent="", attributes=attributes)


def add_group(trace: Trace, group: AcceptedGroup, record: IterationRecord, dispatched_at: float, step: "Step") -> None:
    """Add a group's span and those inside it."""
    whole, measured = f"group/{group.group_id}", group_spans(group, dispatched_at)
    began_at = measured[0].start if measured else group.accepted_at
    begun_at = used_at = record.committed_at or group.accepted_at
    if step.optimizer:
        begun_at, used_at = step.optimizer.start, step.optimizer.end
    start, end = group.accepted_at, max(group.accepted_at, begun_at)
    if step.micro_batch:
        start, end = step.micro_batch.start, step.micro_batch.end
    attributes, error = known_attributes(group, OF_GROUP), group.failure[:MAX_MESSAGE]
    group_span = trace.span("group", BROKER, dispatched_at, max(end, used_at))
    trace.add(group_span, whole, attributes=attributes, error=error)

    def add_child(span: Span, number: str = "", **more: Any) -> None:
        trace.add(span, f"{whole}/{span.kind}{number}", whole, **more)

    if not group.is_supervised:
        add_child(trace.span("wait_for_rollout", BROKER, dispatched_at, began_at))
    for index, span in enumerate(measured):  # the spans of episodes come several times
        add_child(span, f"-{index}" if group.in_engine else "")
    add_child(trace.span("wait_for_trainer", BROKER, group.accepted_at, start))
    link = (record.iteration, f"optimizer/{step.update}") if step.optimizer else None
    add_child(trace.span("micro_batch", TRAINER, start, end), attributes=step.attributes(), link=link)


def add_steps(trace: Trace, trained: Sequence[Span]) -> None:
    """Add the trainer's spans for the iteration as a whole. Its snapshot and its announcement are one `publish`."""
    for index, span in enumerate(span for span in trained if span.kind == "optimizer"):
        trace.add(span, f"optimizer/{index}")
    for kind in ("publish", "checkpoint"):
        if same := [span for span in trained if span.kind == kind]:
            start, end = min(span.start for span in same), max(span.end for span in same)
            trace.add(trace.span(kind, TRAINER, start, end), kind)


# ---- which span of the trainer belongs to a group --------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """The training of a group."""

    update: int  # number of the optimizer step in the iteration
    optimizer: Span | None  # None: the trainer reported none, or an unexpected number
    micro_batch: Span | None = None  # None: it was at an unknown time between acceptance and optimizer step
    index: int | None = None  # number of the micro-batch, in the order of recording; None: not recorded
    rank: int = 0  # rank of the trainer's replica

    def attributes(self) -> dict[str, Any]:
        attributes: dict[str, Any] = {"onbeat.update": self.update}
        if self.index is not None:
            attributes |= {"onbeat.micro_batch": self.index, "onbeat.trainer_rank": self.rank}
        return attributes if self.micro_batch else attributes | {"onbeat.is_timed": False}


def find_steps(
    trained: Sequence[Span],
    recorded: Sequence[tuple[int, list[str]]],
    num_updates: int,
    num_groups: int,
    num_replicas: int,
) -> dict[str, Step]:
    """Match groups with the trainer's spans, which are those of its first rank, in order and without names.

    recorded: (rank, group ids) of each micro-batch, in order; rank 0 also has those of replicas that are gone.
    """
    optimizers = [span for span in trained if span.kind == "optimizer"]
    is_known = len(optimizers) == num_updates
    steps: dict[str, Step] = {}
    for number in range(num_updates):
        optimizer = optimizers[number] if is_known else None
        # Starts are compared: an end is the sum of two rounded numbers, and may lie behind the next start.
        since = optimizers[number - 1].start if is_known and number else 0.0
        until = optimizer.start if optimizer else 0.0
        spans = [span for span in trained if span.kind == "micro_batch" and since <= span.start < until]
        batches = [
            (index, rank, ids)
            for index, (rank, ids) in enumerate(recorded)
            if update_of(ids[0], num_updates, num_groups) == number
        ]
        # One span more is the last, the row without gradient of an update without signal.
        is_clear = len(spans) - sum(rank % num_replicas == 0 for _, rank, _ in batches) in (0, 1)
        in_order = iter(spans if is_clear else ())
        for index, rank, ids in batches:
            span = next(in_order, None) if rank % num_replicas == 0 else None
            steps |= dict.fromkeys(ids, Step(number, optimizer, span, index, rank))
    return steps


def update_of(group_id: str, num_updates: int, num_groups: int) -> int:
    """Return the number of the update that trains a group, by its place in the iteration, as in the trainer.

    >>> [update_of(f"7-{index}", num_updates=2, num_groups=5) for index in range(5)]
    [0, 0, 0, 1, 1]
    """
    return int(group_id.rpartition("-")[2]) * num_updates // num_groups
