"""The report of a job as JSON, which `--report FILE` and `onbeat jobs report` write. Its names are stable."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from onbeat.client import AsyncClient
from onbeat.contracts.advice import advice_for
from onbeat.contracts.errors import OnbeatError
from onbeat.contracts.records import EvaluationRecord, IterationRecord, JobRecord, WeightsRecord
from onbeat.contracts.sharing import overlap_sentence
from onbeat.contracts.states import EvaluationState, IterationState


async def build_report(client: AsyncClient, job_id: str) -> dict[str, Any]:
    job = await client.jobs.get(job_id)
    iterations, evaluations = await client.jobs.iterations(job_id), await client.jobs.evaluations(job_id)
    return make_report(job, iterations, evaluations, await client.jobs.weights(job_id))


def make_report(
    job: JobRecord,
    iterations: Sequence[IterationRecord],
    evaluations: Sequence[EvaluationRecord] = (),
    weights: Sequence[WeightsRecord] = (),
) -> dict[str, Any]:
    """Return the report of committed iterations and scored evaluations: unfinished ones have no numbers yet."""
    committed = [record for record in iterations if record.state == IterationState.COMMITTED]
    chosen = job.max_tokens_per_micro_batch
    return {
        "job_id": job.id,
        "state": job.state.value,
        "mode": job.config.get("schedule", {}).get("mode"),
        "dtype": job.dtype,
        **({} if chosen is None else {"max_tokens_per_micro_batch": chosen}),
        "error": job.error,
        "checkpoint": job.checkpoint,
        "totals": make_totals(job, committed) | weight_totals(weights),
        "overlap": overlap_sentence(job, committed),
        "advice": advice_for(committed, job.config.get("schedule", {}).get("mode")),
        "iterations": [record.model_dump(mode="json") for record in committed],
        "evaluations": [
            record.model_dump(mode="json") for record in evaluations if record.state == EvaluationState.DONE
        ],
        "weights": [record.model_dump() for record in weights],
    }


def make_totals(job: JobRecord, committed: Sequence[IterationRecord]) -> dict[str, Any]:
    generated = [record for record in committed if not record.is_supervised]
    prompt_tokens = sum(record.prompt_tokens or 0 for record in committed)
    response_tokens = sum(record.response_tokens or 0 for record in committed)
    ended_at = job.finished_at or (committed[-1].committed_at if committed else None)
    counts = ("num_stale", "num_duplicate", "num_failed_groups", "num_replaced", "num_not_replaced")
    return (
        {
            "iterations": len(committed),
            "wall_s": sum(record.wall_s or 0.0 for record in committed),  # seconds without pauses and queues
            "job_s": ended_at - job.started_at if ended_at and job.started_at else None,  # including loading the model
            "prompt_tokens": prompt_tokens,
            "response_tokens": response_tokens,
            "tokens": prompt_tokens + response_tokens,
            "reward_mean_first5": mean_reward(generated[:5]),
            "reward_mean_last5": mean_reward(generated[-5:]),
            "tpspd": total_tpspd(committed),
            "staleness_max": max((r.staleness_max for r in committed if r.staleness_max is not None), default=None),
        }
        | {name: sum(getattr(record, name) for record in committed) for name in counts}
    )


def weight_totals(weights: Sequence[WeightsRecord]) -> dict[str, Any]:
    """Return totals over all versions and rollouts, including the versions that a joining rollout pulls in full.

    Two rollouts on three versions of 100 bytes, and 5 bytes of delta: 220 of 600 bytes.
    """
    updates = [(record.full_bytes, update) for record in weights for update in record.rollouts.values()]
    open_s = [update.open_s for _, update in updates if update.open_s is not None]
    return {
        "weight_bytes_full": sum(size for size, _ in updates if size is not None),  # as if all had been pulled in full
        "weight_bytes_received": sum(update.received_bytes for size, update in updates if size is not None),
        "weight_open_s": median(open_s) if open_s else None,
    }


def mean_reward(records: Sequence[IterationRecord]) -> float | None:
    rewards = [record.reward_mean for record in records if record.reward_mean is not None]
    return sum(rewards) / len(rewards) if rewards else None


def total_tpspd(records: Sequence[IterationRecord]) -> float | None:
    """Return all tokens over all device-seconds.

    The number of devices may change between iterations: an iteration's device-seconds are its tokens / its tpspd.
    """
    known = [(num_tokens(record), record.tpspd) for record in records if record.tpspd]
    device_s = sum(tokens / tpspd for tokens, tpspd in known)
    return sum(tokens for tokens, _ in known) / device_s if device_s else None


def num_tokens(record: IterationRecord) -> int:
    return (record.prompt_tokens or 0) + (record.response_tokens or 0)


def check_report_path(path: Path) -> None:
    """Check the path before the run rather than after it. Raise OnbeatError."""
    is_special = path.exists() and not path.is_file()  # such as /dev/null, which the report would replace
    if is_special or not os.access(path.parent, os.W_OK):
        raise OnbeatError(f"{path} cannot be written; name a file in an existing, writable folder")


def write_report(path: Path, report: dict[str, Any]) -> None:
    write_whole(path, json.dumps(report, indent=2) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write the file atomically: a reader never sees half of it. Raise OnbeatError when it cannot be written."""
    draft = path.with_name(f".{path.name}.new")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise OnbeatError(f"{path} cannot be written: {error.strerror or error}") from error
