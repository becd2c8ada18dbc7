"""The questions to `services.trainer.memory_plan` and `services.rollout.memory_plan`, programs that predict memory.

job  -> trainer_request -> trainer's answer -> rollout_request -> rollout's answer       parts in bytes, by process
"""

from typing import Any

MAX_NUM_SEQS = 64  # responses that an engine generates at a time, by default
CACHE_GIB = 1.0

Fields = dict[str, Any]


def trainer_request(
    job: Fields,
    prompt_tokens: int,
    num_ranks: int = 1,
    is_on_gpu: bool = False,
    available_bytes: int | None = None,
) -> Fields:
    """Return the trainer's question. `job`: a configuration as JSON; its dtype may not be "auto".

    `available_bytes`: of a rank that chooses the tokens of a row itself; None: it has memory for a whole iteration.
    """
    return {
        "job": job,
        "prompt_tokens": prompt_tokens,
        "num_ranks": num_ranks,
        "is_on_host": not is_on_gpu,
        "available_bytes": available_bytes,
    }


def rollout_request(job: Fields, trainer: Fields, has_episodes: bool, max_num_seqs: int = MAX_NUM_SEQS) -> Fields:
    """Return the question about a rollout on a CPU. `trainer`: the trainer's answer. `has_episodes`: an environment
    plays some of the job's prompts."""
    return {
        "model": trainer["model"],
        "num_parameters": trainer["num_parameters"],
        "dtype": job["model"]["dtype"],
        "max_model_len": job["model"]["max_context_tokens"],
        "max_num_seqs": max_num_seqs,
        "has_episodes": has_episodes,
        "cache_gib": CACHE_GIB,
    }


def planned_dtype(dtype: str, has_bfloat16: bool) -> str:
    """Return the dtype that "auto" stands for on this machine."""
    return ("bfloat16" if has_bfloat16 else "float32") if dtype == "auto" else dtype
