"""`python -m services.rollout.memory_plan REQUEST.json` estimates the memory of a job's rollout before it runs.

A rollout is two processes: the service, which holds the weights that it has pulled, and vLLM's engine core, whose peak
is while it loads a new version. Bytes of programs, tokenizers and gaps were measured on a CPU, in three models.

vLLM on a CPU multiplies with a packed copy of each weight, which oneDNN makes. It then drops the weight of a linear
layer. It keeps that of the embedding, whose rows it reads, and packs it twice: also as the head, tied or not.
"""

import json
import sys
from pathlib import Path
from typing import Any

from onbeat.machine.processor import read_processor
from services.rollout.engines.vllm_platform import GIB, kv_cache_bytes, num_cached_seqs

SERVICE_BYTES = 625_000_000  # the service without weights and tokenizers: it has imported vLLM
TOKEN_BYTES = 3_200  # bytes for each token of the vocabulary, in the tokenizers of the service and of the engine
ENGINE_BYTES = 300_000_000  # the engine core without weights, cache and what it shares with the service
PACKED_EMBEDDINGS = 2  # the embedding's copy, which nothing reads, and the head's
LOADED_EMBEDDINGS = 2  # while a version is loaded, the largest weight and its packed copy exist beside the former ones
GAPS = 0.1  # share of the layers: the allocator's slack after packing them one by one
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
    embedding = model["vocab_size"] * model.get("hidden_size", 0) * ITEM_BYTES[dtype]  # GPT-2's has another name
    service = {"program": SERVICE_BYTES, "tokenizers": TOKEN_BYTES * model["vocab_size"], "pulled weights": weights}
    engine = {"program": ENGINE_BYTES, "weights": weights, "cache": cache, "logits": logits, "loading": embedding}
    if is_packed(dtype):
        engine |= {
            "packed embeddings": PACKED_EMBEDDINGS * embedding,
            "loading": LOADED_EMBEDDINGS * embedding,
            "gaps": int(GAPS * (weights - embedding)),
        }
    return {"rollout": service, "engine core": engine}


def is_packed(dtype: str) -> bool:
    """Return whether oneDNN packs weights of this dtype on this processor: where it has instructions to multiply it."""
    return dtype == "float32" or read_processor().bfloat16 == "native"


def main() -> None:
    """Print the plan as JSON."""
    request = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    sys.stdout.write(json.dumps(plan_rollout(**request)) + "\n")


if __name__ == "__main__":
    main()
