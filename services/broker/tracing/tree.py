"""The trace of a committed iteration, from its prompts to its gradient, put together from the ledger afterwards.

    iteration
      pull, load              of the weights that generated it, by rollout
      group                   from the opening, when its prompt was there to be claimed, to the step that used it
        wait_for_rollout, generate, score, wait_for_trainer, micro_batch
      checkpoint, optimizer, publish

Ids are hashes of job, iteration and the span's path: they can be computed from these, and a span that is exported again
is the same span. All moments are by the Redis clock.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

from onbeat.streams.inspection import EVENTS_AT_ONCE, iteration_hashes
from onbeat.streams.ledger import Ledger
from onbeat.streams.records import Fields, first_iteration, read_iterations
from onbeat.types import Event, IterationRecord, Span
from services.broker.tracing.steps import Steps, TrainedGroup, find_steps
from services.broker.views.spans import (
    TRAINER,
    AcceptedGroup,
    Held,
    group_spans,
    read_groups,
    read_held,
    trainer_spans,
    weight_spans,
)

MAX_MESSAGE = 200  # characters of a failure
OF_RECORD = (
    *("policy_version", "num_groups", "num_failed_groups", "num_responses", "prompt_tokens", "response_tokens"),
    *("reward_mean", "reward_std", "staleness_max", "mismatch_mean", "wall_s", "generate_s", "train_s"),
    *("weight_sync_s", "rollout_idle_frac", "trainer_idle_frac", "tpspd"),
)
OF_GROUP = (
    *("group_id", "worker_id", "policy_version", "num_responses"),
    *("prompt_tokens", "response_tokens", "reward_mean"),
)

Attributes = Mapping[str, str | int | float]


def trace_id(job_id: str, iteration: int) -> str:
    """Return 32 hex digits: the first ones of the SHA-256 of `JOB/ITERATION`."""
    return sha256(f"{job_id}/{iteration}".encode()).hexdigest()[:32]


def span_id(job_id: str, iteration: int, path: str) -> str:
    """Return 16 hex digits: the first ones of the SHA-256 of `JOB/ITERATION/PATH`."""
    return sha256(f"{job_id}/{iteration}/{path}".encode()).hexdigest()[:16]


@dataclass(frozen=True)
class TraceSpan:
    path: str  # unique in its trace; its end distinguishes it from others of its name
    name: str
    parent: str  # path; '' of the root
    start: float  # Unix seconds
    end: float
    service: str  # broker | rollout | trainer
    instance: str = ""  # worker id; '' if the ledger does not have it
    attributes: Attributes | None = None
    link: tuple[int, str] | None = None  # iteration and path of a span that belongs to it, perhaps of another trace
    error: str = ""


@dataclass(frozen=True)
class JobHistory:
    """The data that the traces of several iterations of a job are made from."""

    job_id: str
    fields: Fields
    events: list[Event]  # they begin before the first of these iterations, oldest first

    @property
    def num_updates(self) -> int:
        return int(json.loads(self.fields["config"]).get("training", {}).get("num_updates_per_iteration", 1))

    def trainer_at(self, time: float) -> str:
        """Return the trainer's id; '' if it is unknown because another trainer has taken over since."""
        takeovers = [(event.time, str(event.data["owner"])) for event in self.events if event.kind == "job.taken_over"]
        known = [owner for at, owner in takeovers if at <= time]
        if known:
            return known[-1]
        return "" if takeovers else self.fields.get("owner", "")


# ---- reading ---------------------------------------------------------------------------------------------------------


async def read_history(ledger: Ledger, job_id: str, first_iteration: int) -> JobHistory:
    """Read the history for the traces from `first_iteration` on. Raises JobNotFound."""
    fields = await ledger.jobs.fields(job_id)
    version = int((await ledger.iterations.fields(job_id, first_iteration)).get("policy_version", "0"))
    since = float(fields["created_at"])
    if version > 0:  # the iteration before made it, and it was pulled as soon as it was announced
        since = float((await ledger.iterations.fields(job_id, version - 1)).get("opened_at", since))
    events: list[Event] = []
    cursor = f"{int(since * 1000) - 1}-0"
    while page := await ledger.event_log.read(job_id, cursor, count=EVENTS_AT_ONCE):
        events += page
        cursor = page[-1].id
    return JobHistory(job_id, fields, events)


async def read_trace(ledger: Ledger, job: JobHistory, iteration: int) -> list[TraceSpan] | None:
    """Return the trace of a committed iteration, the root first; None when its groups are no longer kept.

    Raises JobNotFound, and ValueError for data that another trainer implementation may have written.
    """
    (record,) = await read_iterations(ledger, job.job_id, iteration - 1, 1)
    numbers = range(max(first_iteration(job.fields), iteration - 1), iteration + 1)
    *earlier, own = [each.fields for each in await iteration_hashes(ledger, job.job_id, numbers)]
    groups = list((await read_groups(ledger, job.job_id, iteration)).values())
    if None in groups or record.committed_at is None:
        return None
    trained = [span for span in trainer_spans(iteration, own) if span.kind != "wait"]
    recorded = await ledger.iterations.micro_batches(job.job_id, iteration)
    num_replicas = int(json.loads(own.get("metrics", "{}")).get("num_training_devices", 1))
    steps = find_steps(trained, recorded, job.num_updates, record.num_groups, num_replicas, record.committed_at)
    trainer = job.trainer_at(record.committed_at)
    held = await read_held(ledger, job.job_id, [record.policy_version])
    spans = [
        *hand_over_spans(updates_for(job.events, record, earlier), held),
        *(span for group in groups if group for span in group_tree(group, record, steps, trainer)),
        *step_spans(trained, trainer),
    ]
    return [root_span(job, record, spans), *spans]


def updates_for(events: Iterable[Event], record: IterationRecord, earlier: Sequence[Fields]) -> list[Event]:
    """Return the events of rollouts that began to serve the iteration's weights. In `bounded` several iterations may
    have the same version: each event belongs to the first of them that was committed after it, and so to one trace."""
    since = 0.0
    for fields in earlier:
        if int(fields["policy_version"]) == record.policy_version:
            since = float(fields.get("committed_at", "0"))
    until = record.committed_at or 0.0
    return [
        event
        for event in events
        if event.kind == "worker.updated"
        and event.data["policy_version"] == record.policy_version
        and since < event.time <= until
    ]


# ---- spans -----------------------------------------------------------------------------------------------------------


def root_span(job: JobHistory, record: IterationRecord, spans: Sequence[TraceSpan]) -> TraceSpan:
    """Return a span around all others: pulling the weights may begin before the opening, and a clock may be off."""
    attributes: dict[str, str | int | float] = {
        "onbeat.job_id": job.job_id,
        "onbeat.job_name": job.fields.get("name", ""),
        "onbeat.iteration": record.iteration,
    }
    return TraceSpan(
        path="iteration",
        name="iteration",
        parent="",
        start=min([record.opened_at, *(span.start for span in spans)]),
        end=max([record.committed_at or record.opened_at, *(span.end for span in spans)]),
        service="broker",
        attributes=attributes | known_attributes(record, OF_RECORD),
    )


def known_attributes(source: object, names: Iterable[str]) -> dict[str, str | int | float]:
    known = ((name, getattr(source, name)) for name in names)
    return {f"onbeat.{name}": value for name, value in known if value is not None}


def hand_over_spans(events: Iterable[Event], held: Held) -> Iterator[TraceSpan]:
    """Yield pull and load spans."""
    for event in events:
        for span in weight_spans([event], held):
            yield TraceSpan(
                path=f"{span.kind}/{span.lane}/{event.id}",
                name=span.kind,
                parent="iteration",
                start=span.start,
                end=span.end,
                service="rollout",
                instance=span.lane,
                attributes={"onbeat.policy_version": span.iteration},
                link=(span.iteration - 1, "publish") if span.iteration else None,
            )


def group_tree(group: AcceptedGroup, record: IterationRecord, steps: Steps, trainer: str) -> Iterator[TraceSpan]:
    """Yield a group's span and those inside it."""
    step = steps.of(group.group_id, group.accepted_at)
    measured = group_spans(group, record.opened_at)
    whole = TraceSpan(
        path=f"group/{group.group_id}",
        name="group",
        parent="iteration",
        start=record.opened_at,
        end=max(step.end, step.used_at),
        service="broker",
        attributes=known_attributes(group, OF_GROUP),
        error=group.failure[:MAX_MESSAGE],
    )
    yield whole

    def child(name: str, start: float, end: float, service: str, instance: str = "", number: str = "") -> TraceSpan:
        path = f"{whole.path}/{name}{number}"
        return TraceSpan(path, name, whole.path, start, max(start, end), service, instance)

    began_at = measured[0].start if measured else group.accepted_at
    yield child("wait_for_rollout", record.opened_at, began_at, "broker")
    for index, span in enumerate(measured):  # the spans of episodes come several times
        number = f"-{index}" if group.in_engine else ""
        yield child(span.kind, span.start, span.end, "rollout", span.lane, number)
    yield child("wait_for_trainer", group.accepted_at, step.start, "broker")
    yield replace(
        child("micro_batch", step.start, step.end, "trainer", trainer),
        attributes=step_attributes(step),
        link=(record.iteration, f"optimizer/{step.update}") if steps.updates else None,
    )


def step_attributes(step: TrainedGroup) -> Attributes:
    attributes: dict[str, str | int | float] = {"onbeat.update": step.update}
    if step.index is not None:
        attributes |= {"onbeat.micro_batch": step.index, "onbeat.trainer_rank": step.rank}
    if not step.is_timed:
        attributes["onbeat.is_timed"] = False
    return attributes


def step_spans(trained: Sequence[Span], trainer: str) -> Iterator[TraceSpan]:
    """Yield the trainer's spans for the iteration as a whole. Its snapshot and its announcement are one `publish`."""

    def span(path: str, kind: str, start: float, end: float) -> TraceSpan:
        return TraceSpan(path, kind, "iteration", start, end, TRAINER, trainer)

    for index, each in enumerate(each for each in trained if each.kind == "optimizer"):
        yield span(f"optimizer/{index}", "optimizer", each.start, each.end)
    for kind in ("publish", "checkpoint"):
        if same := [each for each in trained if each.kind == kind]:
            yield span(kind, kind, min(each.start for each in same), max(each.end for each in same))
