"""`python -m services.rollout.memory_plan REQUEST.json` estimates the memory of a job's rollout before it runs.

A rollout is two processes: the service, which holds the weights that it has pulled, and vLLM's engine core. Figures
other than the model's bytes were measured on a CPU.
"""

import json
import sys
from pathlib import Path
from typing import Any

from services.rollout.engines.vllm_platform import GIB, kv_cache_bytes, num_cached_seqs

SERVICE_BYTES = 780_000_000  # the service without weights: it has imported vLLM
ENGINE_BYTES = {"float32": 1_380_000_000, "bfloat16": 1_080_000_000}  # the engine core without weights and cache
NUM_LOGITS = 3  # copies of the logits of a step, float32: raw, tempered, probabilities
ITEM_BYTES = {"float32": 4, "bfloat16": 2}

Parts = dict[str, int]


def plan_rollout(
    model: dict[str, Any],
    num_parameters: int,
    dtype: str,
    max_model_len: int | None,
    max_num_seqs: int,
    has_episodes: bool,
    cache_gib: float,
) -> dict[str, Parts]:
    """Return bytes by process and part, of a rollout whose engine computes on a CPU.

    model: the text part of its config.json.
    """
    weights = num_parameters * ITEM_BYTES[dtype]
    num_cached = num_cached_seqs(max_num_seqs, has_episodes)
    cache = kv_cache_bytes(int(cache_gib * GIB), model, dtype, max_model_len, num_cached)
    logits = NUM_LOGITS * max_num_seqs * model["vocab_size"] * 4
    return {
        "rollout": {"program": SERVICE_BYTES, "pulled weights": weights},
        "engine core": {"program": ENGINE_BYTES[dtype], "weights": weights, "cache": cache, "logits": logits},
    }


def main() -> None:
    """Print the plan as JSON."""
    request = json.loads(Path(sys.argv[1]).read_text())
    sys.stdout.write(json.dumps(plan_rollout(**request)) + "\n")


if __name__ == "__main__":
    main()
