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

from onbeat.streams.codec import RolloutGroup, decode_group
from onbeat.streams.inspection import EVENTS_AT_ONCE, iteration_hashes
from onbeat.streams.ledger import Ledger
from onbeat.streams.records import Fields, first_iteration, read_iterations
from onbeat.types import Event, IterationRecord, Span
from services.broker.timeline import TRAINER, before, order, trainer_spans, weight_spans
from services.broker.trace_steps import Step, Steps, find_steps

MAX_GROUPS = 1000  # per iteration: those accepted first
MAX_MESSAGE = 200  # characters of a failure
OF_RECORD = (
    *("policy_version", "num_groups", "num_failed_groups", "num_responses", "prompt_tokens", "response_tokens"),
    *("reward_mean", "reward_std", "staleness_max", "mismatch_mean", "wall_s", "generate_s", "train_s"),
    *("weight_sync_s", "rollout_idle_frac", "trainer_idle_frac", "tpspd"),
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
class TracedGroup:
    """The data of a group that a trace contains: no text."""

    group_id: str
    worker_id: str
    accepted_at: float
    generate_s: float
    score_s: float
    failure: str
    attributes: Attributes


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
    groups = await read_groups(ledger, job.job_id, iteration)
    if groups is None or record.committed_at is None:
        return None
    told = [span for span in trainer_spans(iteration, own) if span.kind != "wait"]
    recorded = await ledger.iterations.micro_batches(job.job_id, iteration)
    num_replicas = int(json.loads(own.get("metrics", "{}")).get("num_training_devices", 1))
    steps = find_steps(told, recorded, job.num_updates, record.num_groups, num_replicas, record.committed_at)
    trainer = job.trainer_at(record.committed_at)
    weights = await ledger.versions.weights(job.job_id, record.policy_version)
    held = {name: update.held_s for name, update in weights.rollouts.items()} if weights else {}
    spans = [
        *hand_over_spans(updates_for(job.events, record, earlier), held),
        *(span for group in groups for span in group_spans(group, record, steps, trainer)),
        *step_spans(told, iteration, trainer),
    ]
    return [root_span(job, record, spans), *spans]


async def read_groups(ledger: Ledger, job_id: str, iteration: int) -> list[TracedGroup] | None:
    """Read the first MAX_GROUPS that were accepted; None when they are no longer kept."""
    states = (await ledger.iterations.groups(job_id, iteration)).values()
    accepted = sorted((state.removeprefix("accepted:") for state in states if state.startswith("accepted:")), key=order)
    wanted, groups = set(accepted[:MAX_GROUPS]), list[TracedGroup]()
    cursor = before(accepted[0]) if accepted else "-"
    while wanted and order(cursor) < order(accepted[-1]):
        page = await ledger.audit_log.rollouts(job_id, cursor)
        if not page:
            break
        groups += [traced_group(entry, decode_group(payload)) for entry, payload in page if entry in wanted]
        wanted -= {entry for entry, _ in page}
        cursor = page[-1][0]
    return None if wanted else groups


def traced_group(entry: str, group: RolloutGroup) -> TracedGroup:
    responses = group.responses
    attributes: dict[str, str | int | float] = {
        "onbeat.group_id": group.group_id,
        "onbeat.worker_id": group.worker_id,
        "onbeat.policy_version": group.policy_version,
        "onbeat.num_responses": len(responses),
        "onbeat.prompt_tokens": len(group.prompt_token_ids),
        "onbeat.response_tokens": sum(len(response.token_ids) for response in responses),
    }
    if responses:
        attributes["onbeat.reward_mean"] = sum(response.reward for response in responses) / len(responses)
    return TracedGroup(
        group_id=group.group_id,
        worker_id=group.worker_id,
        accepted_at=order(entry)[0] / 1000,
        generate_s=group.timings.generate_s,
        score_s=group.timings.score_s,
        failure=f"{group.failure.kind}: {group.failure.message}" if group.HasField("failure") else "",
        attributes=attributes,
    )


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
    known = ((name, getattr(record, name)) for name in OF_RECORD)
    attributes |= {f"onbeat.{name}": value for name, value in known if value is not None}
    return TraceSpan(
        path="iteration",
        name="iteration",
        parent="",
        start=min([record.opened_at, *(span.start for span in spans)]),
        end=max([record.committed_at or record.opened_at, *(span.end for span in spans)]),
        service="broker",
        attributes=attributes,
    )


def hand_over_spans(events: Iterable[Event], held: Mapping[str, float | None]) -> Iterator[TraceSpan]:
    """Yield pull and load spans. `held`: rollout -> how long its weights lay there before the engine served them."""
    for event in events:
        worker, version = str(event.data["worker_id"]), int(event.data["policy_version"])
        held_s = held.get(worker)
        for span in weight_spans([event], {} if held_s is None else {(version, worker): held_s}):
            yield TraceSpan(
                path=f"{span.kind}/{worker}/{event.id}",
                name=span.kind,
                parent="iteration",
                start=span.start,
                end=span.end,
                service="rollout",
                instance=worker,
                attributes={"onbeat.policy_version": version},
                link=(version - 1, "publish") if version else None,
            )


def group_spans(group: TracedGroup, record: IterationRecord, steps: Steps, trainer: str) -> Iterator[TraceSpan]:
    """Yield a group's spans. Durations measured by a rollout are laid backwards from the moment of acceptance."""
    step = steps.of(group.group_id, group.accepted_at)
    opened_at, accepted_at = record.opened_at, group.accepted_at
    generated_at = max(opened_at, accepted_at - group.score_s)
    began_at = max(opened_at, generated_at - group.generate_s)
    whole = TraceSpan(
        path=f"group/{group.group_id}",
        name="group",
        parent="iteration",
        start=opened_at,
        end=max(step.end, step.used_at),
        service="broker",
        attributes=group.attributes,
        error=group.failure[:MAX_MESSAGE],
    )
    yield whole

    def child(name: str, start: float, end: float, service: str, instance: str = "") -> TraceSpan:
        return TraceSpan(f"{whole.path}/{name}", name, whole.path, start, max(start, end), service, instance)

    yield child("wait_for_rollout", opened_at, began_at, "broker")
    if generated_at > began_at or not group.failure:
        yield child("generate", began_at, generated_at, "rollout", group.worker_id)
    if accepted_at > generated_at or not group.failure:
        yield child("score", generated_at, accepted_at, "rollout", group.worker_id)
    yield child("wait_for_trainer", accepted_at, step.start, "broker")
    yield replace(
        child("micro_batch", step.start, step.end, "trainer", trainer),
        attributes=step_attributes(step),
        link=(record.iteration, f"optimizer/{step.update}") if steps.updates else None,
    )


def step_attributes(step: Step) -> Attributes:
    attributes: dict[str, str | int | float] = {"onbeat.update": step.update}
    if step.index is not None:
        attributes |= {"onbeat.micro_batch": step.index, "onbeat.trainer_rank": step.rank}
    if not step.is_timed:
        attributes["onbeat.is_timed"] = False
    return attributes


def step_spans(told: Sequence[Span], iteration: int, trainer: str) -> Iterator[TraceSpan]:
    """Yield the trainer's spans for the iteration as a whole. Its snapshot and its announcement are one `publish`."""

    def span(path: str, kind: str, start: float, end: float) -> TraceSpan:
        return TraceSpan(path, kind, "iteration", start, end, TRAINER, trainer)

    for index, each in enumerate(each for each in told if each.kind == "optimizer"):
        yield span(f"optimizer/{index}", "optimizer", each.start, each.end)
    for kind in ("publish", "checkpoint"):
        if same := [each for each in told if each.kind == kind]:
            yield span(kind, kind, min(each.start for each in same), max(each.end for each in same))
