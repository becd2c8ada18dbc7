"""The group that a page shows: found by its id, with the engine's data for every token. Nothing is written here."""

import math
from collections.abc import Sequence

from onbeat.contracts.errors import GroupsTrimmed
from onbeat.contracts.records import GroupDetail, Token
from onbeat.streams.codec import Response, RolloutGroup, decode_group
from onbeat.streams.inspection import accepted_entry, stored_group
from onbeat.streams.ledger import Ledger
from onbeat.streams.ledger.rollout_side import failure_text
from services.broker.datasets.choice import Choice
from services.broker.samples import group_samples, parts_of

MAX_TOKENS = 100_000  # per answer
LEAST_LOGPROB = -1e6  # replaces one that is not finite, which JSON cannot express; its job fails for it

EVALUATION = "eval-"  # prefix of its groups' ids


class GroupNotFound(Exception):
    """The job has no accepted group with this id."""


async def read_group(ledger: Ledger, job_id: str, group_id: str) -> bytes:
    """Return the stored RolloutGroup. Raises JobNotFound, GroupNotFound, GroupsTrimmed."""
    await ledger.jobs.state(job_id)  # raises JobNotFound
    if group_id.startswith(EVALUATION):
        number = group_id.split("-")[1]
        reason = f"groups of evaluations are not kept; /evaluations/{number}/samples has some of their responses"
        raise GroupNotFound(f"{group_id}: {reason}")
    iteration = int(group_id.partition("-")[0])
    entry = await accepted_entry(ledger, job_id, iteration, group_id)
    if entry is None:
        is_waiting = group_id in await ledger.iterations.groups(job_id, iteration)
        reason = "has not been accepted yet; it is being generated" if is_waiting else "is no group of this job"
        raise GroupNotFound(f"{group_id} {reason}")
    payload = await stored_group(ledger, job_id, entry)
    if payload is None:
        raise GroupsTrimmed(job_id, iteration, int((await ledger.jobs.fields(job_id)).get("num_trimmed", "0")))
    return payload


async def why_chosen(ledger: Ledger, job_id: str, group_id: str) -> str:
    """Return the row or level of a group's prompt and the reason for its choice; '' where outcomes did not decide, and
    for a group in the place of another one."""
    iteration, place = map(int, group_id.split("-"))
    fields = await ledger.iterations.fields(job_id, iteration)
    num_first = int(fields.get("num_groups", "0")) - int(fields.get("num_replaced", "0"))
    picks = Choice.from_json(fields.get("choice", "")).picks[:num_first]
    pick = picks[place] if place < len(picks) else None
    return "" if pick is None else pick.words


def detail_json(payload: bytes, advantages: Sequence[float | None], chosen: str) -> str:
    """Return a GroupDetail as JSON. This is slow for many tokens."""
    return group_detail(decode_group(payload), advantages, chosen).model_dump_json()


def group_detail(group: RolloutGroup, advantages: Sequence[float | None] = (), chosen: str = "") -> GroupDetail:
    """Return the group's details, without the tokens of those responses that no longer fit into MAX_TOKENS."""
    tokens: list[list[Token]] = []
    num_tokens = 0
    for response in group.responses:
        num_tokens += len(response.token_ids)
        tokens.append(tokens_of(response) if num_tokens <= MAX_TOKENS else [])
    return GroupDetail(
        iteration=group.iteration,
        group_id=group.group_id,
        policy_version=group.policy_version,
        worker_id=group.worker_id,
        prompt=group.prompt_text,
        prompt_parts=parts_of(group.prompt_parts),
        num_prompt_tokens=len(group.prompt_token_ids),
        generate_s=group.timings.generate_s,
        score_s=group.timings.score_s,
        failure=failure_text(group),
        chosen=chosen,
        responses=list(group_samples(group, advantages=advantages)),
        tokens=tokens,
        is_supervised=group.is_supervised,
    )


def tokens_of(response: Response) -> list[Token]:
    """Return the engine's data for every token; none for a row of examples, which no engine generated."""
    if not response.rollout_logprobs:
        return []
    texts: list[str | None] = [None] * len(response.token_ids)
    if response.token_lengths:
        text, start = response.text, 0
        for place, length in enumerate(response.token_lengths):
            texts[place] = text[start : start + length]
            start += length
    return [
        Token(id=token_id, text=text, logprob=round(logprob, 6) if math.isfinite(logprob) else LEAST_LOGPROB)
        for token_id, text, logprob in zip(response.token_ids, texts, response.rollout_logprobs, strict=True)
    ]
