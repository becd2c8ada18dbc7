"""Jobs, weights and samples as REST shows them, built from the ledger's fields. Nothing here writes.

Iterations and evaluations: onbeat/streams/records.py.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from types import MappingProxyType
from typing import Any

from pydantic_core import from_json

from onbeat.contracts.records import EpisodeTurn, JobRecord, Sample, WeightsRecord
from onbeat.contracts.states import JobState
from onbeat.streams.codec import Response, RolloutGroup, Turn
from onbeat.streams.ledger import Ledger
from onbeat.streams.records import Fields, first_iteration

Advantages = Mapping[str, Sequence[float | None]]  # group id -> that of each response


def job_record(fields: Fields) -> JobRecord:
    """Return the job, or as much of it as can be read: one odd job must not take a whole list with it."""
    known = {name: fields[name] for name in JobRecord.model_fields if name in fields}
    try:
        config = from_json(fields["config"])  # it refuses depths and half characters that could not be written again
        return JobRecord.model_validate(known | {"config": config})
    except (ValueError, KeyError) as error:
        return unreadable_record(fields, error)


async def place_in_queue(ledger: Ledger, records: Sequence[JobRecord]) -> None:
    """Note on pending jobs how many go first."""
    pending = [record for record in records if record.state is JobState.PENDING]
    for pool in {record.pool for record in pending}:
        queued = [record for record in pending if record.pool == pool]
        places = await ledger.lists.places(pool, [record.id for record in queued])
        for record, place in zip(queued, places, strict=True):
            record.queue_position = None if place is None else place + 1  # None: its trainer has just come


def unreadable_record(fields: Fields, error: Exception) -> JobRecord:
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    remedy = "cancel it, and let an admin delete it"
    return JobRecord(
        id=fields.get("id", ""),
        name=fields.get("name", ""),
        pool=fields.get("pool", ""),
        state=fields["state"] if fields["state"] in set(JobState) else JobState.FAILED,
        error=f"this broker cannot read the record of the job ({reason}); {remedy}",
        created_at=0.0,
        num_iterations=0,
        config={},
    )


async def read_weights(ledger: Ledger, job_id: str, after: int, limit: int) -> list[WeightsRecord]:
    """Read the published versions above `after`, in order. Raises JobNotFound."""
    job = await ledger.jobs.fields(job_id)
    newest, after = int(job.get("policy_version", "-1")), max(after, first_iteration(job) - 1)
    records: list[WeightsRecord] = []
    for version in range(after + 1, newest + 1):
        if len(records) == limit:
            break
        if (record := await ledger.versions.weights(job_id, version)) is not None:
            records.append(record)
    return records


@dataclass(frozen=True)
class RewardRange:
    """A range of rewards that includes both ends."""

    least: float = -math.inf
    most: float = math.inf

    def __contains__(self, reward: float) -> bool:
        return self.least <= reward <= self.most


ANY_REWARD = RewardRange()


async def read_samples(
    ledger: Ledger, job_id: str, iteration: int | None, limit: int, offset: int = 0, rewards: RewardRange = ANY_REWARD
) -> list[Sample]:
    """Read responses of an iteration (None: the newest with an accepted group). Raises JobNotFound, GroupsTrimmed."""
    job = await ledger.jobs.fields(job_id)
    if iteration is None:
        start = first_iteration(job)
        iteration = max(start, int(job["num_opened"]) - 1)
        while iteration > start and not await has_accepted(ledger, job_id, iteration):
            iteration -= 1
    groups = await ledger.iterations.accepted_groups(job_id, iteration)
    advantages = await ledger.iterations.advantages(job_id, iteration) if groups else {}
    return sample_groups(groups, limit, offset, rewards, advantages)


def sample_groups(
    groups: Iterable[RolloutGroup],
    limit: int,
    offset: int = 0,
    rewards: RewardRange = ANY_REWARD,
    advantages: Advantages = MappingProxyType({}),
) -> list[Sample]:
    """Return up to `limit` responses of many prompts, with those rewards, after the first `offset` ones."""
    in_order = sorted(groups, key=lambda group: group_order(group.group_id))
    of_groups = [group_samples(group, rewards, advantages.get(group.group_id, ())) for group in in_order]
    # The first response of every group, then the second of every group: few samples show many prompts.
    samples = (sample for each in zip_longest(*of_groups) for sample in each if sample is not None)
    return list(islice(samples, offset, offset + limit))


async def has_accepted(ledger: Ledger, job_id: str, iteration: int) -> bool:
    return int((await ledger.iterations.fields(job_id, iteration)).get("num_accepted", "0")) > 0


def group_order(group_id: str) -> tuple[int, ...]:
    return tuple(int(part) for part in group_id.split("-") if part.isdigit())


def group_samples(
    group: RolloutGroup, rewards: RewardRange = ANY_REWARD, advantages: Sequence[float | None] = ()
) -> Iterator[Sample]:
    """Yield a group's responses in this range. `advantages`: of each response; empty where they are not known."""
    for index, response in enumerate(group.responses):
        if response.reward not in rewards:
            continue
        yield Sample(
            iteration=group.iteration,
            group_id=group.group_id,
            index=index,
            policy_version=group.policy_version,
            prompt=group.prompt_text,
            response=response.text,
            reward=response.reward,
            reward_parts={name: x for name, x in sorted(response.reward_parts.items()) if math.isfinite(x)},
            advantage=advantages[index] if index < len(advantages) else None,
            num_tokens=len(response.token_ids),
            finish_reason=response.finish_reason,
            turns=list(turns_of(response, len(group.prompt_token_ids))),
        )


def turns_of(response: Response, num_prompt: int) -> Iterator[EpisodeTurn]:
    """Yield the turns of an episode. `num_prompt`: tokens of the group's prompt."""
    path_lengths: list[int] = []  # to the end of each turn
    start = 0  # of its text
    for turn in response.turns:
        continues = turn.parent if turn.HasField("parent") else None
        before = num_prompt if continues is None else path_lengths[continues]
        path_lengths.append(turn.num_shared + len(turn.observed_token_ids) + turn.num_sampled)
        yield EpisodeTurn(
            continues=continues,
            is_fork=turn.num_shared < before or (continues is None and len(path_lengths) > 1),
            messages=messages_of(turn),
            text=response.text[start : start + turn.num_characters],
            num_observed_tokens=len(turn.observed_token_ids),
            num_cached_tokens=turn.num_cached_tokens,
            num_tokens=turn.num_sampled,
            finish_reason=turn.finish_reason,
            call_id=turn.call_id,
            reward=turn.reward if turn.HasField("reward") and math.isfinite(turn.reward) else None,
            waited_s=turn.waited_s,
            generate_s=turn.generate_s,
        )
        start += turn.num_characters


def messages_of(turn: Turn) -> list[dict[str, Any]]:
    """Return the messages that were new in this call; none where they cannot be read."""
    try:
        messages = from_json(turn.messages_json or "[]")  # see job_record
    except ValueError:
        return []
    return [message for message in messages if isinstance(message, dict)] if isinstance(messages, list) else []


async def read_evaluation_samples(ledger: Ledger, job_id: str, evaluation: int) -> list[Sample]:
    """Read the few responses that are kept of an evaluation; none before it is done."""
    fields = await ledger.evaluations.fields(job_id, evaluation)
    return [Sample.model_validate(sample) for sample in json.loads(fields.get("samples", "[]"))]
