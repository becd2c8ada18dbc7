"""The spans of an iteration: who did what, on one clock, put together from data that the ledger has anyway.

    generate, score   a group's durations, laid backwards from the moment of its acceptance: the id of its entry
    environment       the times in which all of a group's episodes waited for their environment
    pull, load        a rollout's durations, backwards from the event that it serves the version
    the trainer       its own spans, stored with the commit; "wait" is the time between them

The timeline of the dashboard shows them by process, a trace as a tree. All moments are by the Redis clock.
"""

import json
from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import pairwise
from statistics import fmean

from onbeat.contracts.records import Event, Record, Span
from onbeat.streams.codec import RolloutGroup, decode_group, given_rewards
from onbeat.streams.inspection import stored_groups
from onbeat.streams.ledger import Ledger
from onbeat.streams.ledger.rollout_side import MAX_INTERVALS, failure_text
from onbeat.streams.records import Fields
from onbeat.streams.signal import Signal
from onbeat.streams.stream_ids import id_before, order, time_of

TRAINER = "trainer"
MIN_WAIT_S = 0.005  # shorter waits are the loop's own time between two steps
MAX_GROUPS = 1000  # per iteration: those accepted first

Held = Mapping[tuple[int, str], float]  # (policy version, rollout) -> seconds from its pull to the engine's start on it


class AcceptedGroup(Record):
    """A group without its texts."""

    iteration: int
    group_id: str
    policy_version: int
    num_responses: int
    reward_mean: float | None  # None: without responses
    worker_id: str
    accepted_at: float
    generate_s: float
    score_s: float
    in_engine: tuple[tuple[float, float], ...]  # episodes: when a call was in the engine, seconds since the start
    failure: str  # '' if it did not fail
    prompt_tokens: int
    response_tokens: int
    has_signal: bool  # if not, dynamic sampling replaces it
    source: str = ""  # '' in a job of one source
    is_supervised: bool = False  # a row of examples: nothing generated or scored it


async def read_groups(
    ledger: Ledger, job_id: str, iteration: int, known: Container[str] = ()
) -> dict[str, AcceptedGroup | None]:
    """Read the first MAX_GROUPS groups of an iteration by their entries, without those in `known`.

    None stands for a group that is no longer kept.
    """
    accepted = (await ledger.iterations.accepted_entries(job_id, iteration))[:MAX_GROUPS]
    groups: dict[str, AcceptedGroup | None] = {entry: None for entry in accepted if entry not in known}
    if groups:
        first, last = next(iter(groups)), next(reversed(groups))
        signal = Signal.of_record(json.loads((await ledger.jobs.fields(job_id))["config"]))
        async for entry, payload in stored_groups(ledger, job_id, id_before(first)):
            if entry in groups:
                groups[entry] = accepted_group(entry, decode_group(payload), signal)
            if order(entry) >= order(last):
                break
    return groups


def accepted_group(entry: str, group: RolloutGroup, signal: Signal) -> AcceptedGroup:
    rewards = given_rewards(group)
    return AcceptedGroup(
        iteration=group.iteration,
        group_id=group.group_id,
        policy_version=group.policy_version,
        num_responses=len(group.responses),
        reward_mean=fmean(rewards) if rewards else None,
        worker_id=group.worker_id,
        accepted_at=time_of(entry),
        generate_s=group.timings.generate_s,
        score_s=group.timings.score_s,
        in_engine=tuple((interval.start_s, interval.end_s) for interval in group.timings.in_engine[:MAX_INTERVALS]),
        failure=failure_text(group),
        prompt_tokens=len(group.prompt_token_ids),
        response_tokens=sum(len(response.token_ids) for response in group.responses),
        has_signal=signal.is_in(group),
        source=group.source,
        is_supervised=group.is_supervised,
    )


def group_spans(group: AcceptedGroup, opened_at: float) -> list[Span]:
    """Return the spans of a group, none before the opening of its iteration. A group that failed may have none, and a
    row of examples has none."""
    if group.is_supervised:
        return []
    generated_at = group.accepted_at - group.score_s
    began_at = generated_at - group.generate_s
    parts = [("generate", began_at, generated_at), ("score", generated_at, group.accepted_at)]
    if group.in_engine:
        parts = list(episode_parts(group, began_at))
    about = {"lane": group.worker_id, "iteration": group.iteration, "group_id": group.group_id}
    moments = [(kind, max(opened_at, start), max(opened_at, end)) for kind, start, end in parts]
    return [
        Span(kind=kind, start=start, end=max(start, end), **about)
        for kind, start, end in moments
        if end > start or not (group.failure or group.in_engine)
    ]


def episode_parts(group: AcceptedGroup, began_at: float) -> Iterator[tuple[str, float, float]]:
    """Yield kind, start and end of the parts of a group of episodes: with calls in the engine, and without."""
    until = began_at
    for interval in group.in_engine:
        start, end = (min(began_at + seconds, group.accepted_at) for seconds in interval)
        yield "environment", until, start
        yield "generate", start, end
        until = end
    yield "environment", until, group.accepted_at


async def read_held(ledger: Ledger, job_id: str, versions: Iterable[int]) -> Held:
    """Read how long these versions lay in each rollout before its engine served them, where rollouts reported it."""
    held: dict[tuple[int, str], float] = {}
    for version in versions:
        if (record := await ledger.versions.weights(job_id, version)) is not None:
            held |= {
                (version, name): update.held_s for name, update in record.rollouts.items() if update.held_s is not None
            }
    return held


def weight_spans(updates: Iterable[Event], held: Held) -> list[Span]:
    """Return the load spans of all updates ("worker.updated"), and the pull spans of those in `held`."""
    spans = []
    for event in updates:
        worker, version = str(event.data["worker_id"]), int(event.data["policy_version"])
        load_s, pull_s = float(event.data["load_s"]), float(event.data["pull_s"])
        spans.append(Span(lane=worker, kind="load", start=event.time - load_s, end=event.time, iteration=version))
        if (held_s := held.get((version, worker))) is not None:
            pulled_at = event.time - held_s
            spans.append(Span(lane=worker, kind="pull", start=pulled_at - pull_s, end=pulled_at, iteration=version))
    return spans


def commit_before(fields: Fields) -> float:
    return float(fields.get("previous_commit_at") or fields["opened_at"])


def trainer_spans(iteration: int, fields: Fields) -> list[Span]:
    """Return the trainer's spans from the previous commit to this one; [] before this commit or if it reports none."""
    recorded = json.loads(fields.get("metrics", "{}")).get("spans", [])
    work = [
        Span(lane=TRAINER, kind=kind, start=start, end=start + took_s, iteration=iteration)
        for kind, start, took_s in recorded
    ]
    if not work:
        return []
    moments = [commit_before(fields), *(moment for span in work for moment in (span.start, span.end))]
    waits = [
        Span(lane=TRAINER, kind="wait", start=since, end=until, iteration=iteration)
        for since, until in list(pairwise(moments))[::2]
        if until - since >= MIN_WAIT_S
    ]
    return [*work, *waits]
