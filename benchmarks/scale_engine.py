"""An engine of scale.py, in a process of its own: the seconds of vLLM to load all weights of a random model in place,
and to generate a token of each of several responses.

    scale.py -- starts -->  scale_engine.py MODEL_FOLDER RESULT.json
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness import own_dtype

from onbeat.engines import Sampling
from services.rollout.engines.vllm_engine import VllmEngine
from services.rollout.engines.weight_files import read_shapes

NUM_ROUNDS = 3  # after one that warms up
PROMPT, NUM_RESPONSES, RESPONSE_TOKENS = list(range(56)), 16, 19
CACHE_GIB = 0.25


async def arriving(names: list[str]) -> AsyncIterator[Sequence[str]]:
    """Yield the names of all tensors at once."""
    yield names


async def measure(folder: Path) -> dict[str, Any]:
    engine = VllmEngine(max_model_len=128, max_num_seqs=NUM_RESPONSES, dtype=own_dtype(), kv_cache_gib=CACHE_GIB)
    weights = folder / "model.safetensors"
    times = [time.perf_counter()]
    await engine.start(folder, 0)
    times.append(time.perf_counter())
    for version in range(1, 2 + NUM_ROUNDS):
        await engine.load(version, weights, arriving(list(read_shapes(weights))))
        times.append(time.perf_counter())
        await engine.generate(PROMPT, NUM_RESPONSES, Sampling(RESPONSE_TOKENS, temperature=1.0, seed=version), version)
        times.append(time.perf_counter())
    await engine.stop()
    start_s, _, _, *taken = [after - before for before, after in pairwise(times)]
    return {
        "start_s": start_s,
        "load_s": statistics.median(taken[::2]),
        "token_s": statistics.median(taken[1::2]) / RESPONSE_TOKENS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("result", type=Path)
    options = parser.parse_args()
    options.result.write_text(json.dumps(asyncio.run(measure(options.folder))), "utf-8")


if __name__ == "__main__":
    main()
