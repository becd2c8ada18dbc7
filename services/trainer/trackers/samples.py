"""Tables of samples for trackers: a few responses of each evaluation, and of every tenth iteration.

A table is small whatever the job: few rows, and long texts without their middle.
"""

import json
from collections.abc import Mapping
from typing import NamedTuple

from onbeat.contracts.records import Sample
from onbeat.streams.codec import decode_group, is_truncated
from onbeat.streams.inspection import stored_group
from onbeat.streams.ledger import Ledger
from services.trainer.trackers.points import Point

EVERY_ITERATIONS = 10
MAX_ROWS = 16  # all responses that are kept of an evaluation
MAX_CHARS = 2_000  # per prompt and per response


class Row(NamedTuple):
    """A response. The fields are the columns of a table."""

    iteration: int  # or the number of the evaluation
    prompt: str
    response: str
    reward: float | None  # None: no reward has an opinion on it
    is_truncated: bool
    reward_parts: str  # such as "answer 1, format 0.5"; "" if the reward has no parts


def table_name(point: Point) -> str:
    return "samples/evaluation" if point.is_evaluation else "samples/training"


async def read_rows(ledger: Ledger, job_id: str, point: Point) -> list[Row]:
    """Return the table of a point; empty for most iterations, and if the groups are not kept. Raises RedisError."""
    if point.is_evaluation:
        return await evaluation_rows(ledger, job_id, point.step)
    return await iteration_rows(ledger, job_id, point.step) if point.step % EVERY_ITERATIONS == 0 else []


async def evaluation_rows(ledger: Ledger, job_id: str, evaluation: int) -> list[Row]:
    fields = await ledger.evaluations.fields(job_id, evaluation)
    samples = map(Sample.model_validate, json.loads(fields.get("samples", "[]"))[:MAX_ROWS])
    rows = []
    for sample in samples:
        is_cut = "length" in (sample.finish_reason, *(turn.finish_reason for turn in sample.turns))
        rows.append(make_row(evaluation, (sample.prompt, sample.response), sample.reward, is_cut, sample.reward_parts))
    return rows


async def iteration_rows(ledger: Ledger, job_id: str, iteration: int) -> list[Row]:
    """Return the first response to each of the iteration's first prompts; one by one, as groups may be large."""
    states = await ledger.iterations.groups(job_id, iteration)
    rows = []
    for group_id in sorted(states, key=lambda group_id: (len(group_id), group_id))[:MAX_ROWS]:
        payload = await stored_group(ledger, job_id, states[group_id].partition(":")[2])
        group = decode_group(payload) if payload is not None else None
        if group is not None and group.responses:  # a failed group has none
            response = group.responses[0]
            texts, reward = (group.prompt_text, response.text), None if response.has_no_reward else response.reward
            rows.append(make_row(iteration, texts, reward, is_truncated(response), response.reward_parts))
    return rows


def make_row(
    iteration: int, texts: tuple[str, str], reward: float | None, is_cut: bool, parts: Mapping[str, float]
) -> Row:
    """Return the row of a response. `texts`: its prompt and its own."""
    shown = ", ".join(f"{name} {value:g}" for name, value in sorted(parts.items()))
    prompt, response = map(shorten, texts)
    return Row(iteration, prompt, response, reward, is_cut, shown)


def shorten(text: str) -> str:
    """Return the text; of a long one the beginning and the end, where the answer is."""
    half, num_left_out = MAX_CHARS // 2, len(text) - MAX_CHARS
    gap = f"\n[{num_left_out} characters are left out here]\n"
    return text if num_left_out <= 0 else text[:half] + gap + text[-half:]
