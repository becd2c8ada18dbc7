"""The delta codec on the weights of a 135M-parameter Llama in bfloat16: bytes and speed over the share that changed.

It runs on one core with synthetic steps: each weight changes with the given chance, by one unit in the last place (9 of
10) or two; "random bits" is a tensor that shares nothing with its base. GB/s counts the bytes of the weights, not of
the delta. Every round copies the same weights too: the ratio to that copy does not depend on the machine's speed.
Figures are medians over the rounds. The result of every delta is compared with the weights that it stands for.
"""

import math
import os
import statistics
from collections import Counter

os.environ["OMP_NUM_THREADS"] = "1"

from typing import Any

import numpy as np
from harness import command_line, save, seconds, start
from weights_peer import shapes

from onbeat.weights.delta import Encoding, apply, encode

SHARES = {  # share of the weights that change -> the GB/s that encode and apply must both reach
    0.0: 1.0,
    0.001: 1.0,
    0.01: 1.0,
    0.04: 1.0,
    0.1: None,
    0.3: None,
    1.0: None,
}
ITEM_BYTES, ROUNDS, CORE = 2, 5, 1

Weights = list[np.ndarray]


def sizes() -> list[int]:
    """Return the number of items of each tensor."""
    return [math.prod(shape) for shape in shapes().values()]


def make_weights(generator: np.random.Generator) -> Weights:
    floats = (generator.standard_normal(size, np.float32) * np.float32(0.02) for size in sizes())
    return [(tensor.view(np.uint32) >> 16).astype(np.uint16) for tensor in floats]


def stepped(weights: Weights, share: float, generator: np.random.Generator) -> Weights:
    steps = np.array([1, -1] * 9 + [2, -2]).astype(np.uint16)
    stepped_weights = [tensor.copy() for tensor in weights]
    for tensor in stepped_weights:
        positions = np.flatnonzero(generator.random(len(tensor), np.float32) < share)
        tensor[positions] += steps[generator.integers(0, len(steps), len(positions))]
    return stepped_weights


def random_bits(weights: Weights, generator: np.random.Generator) -> Weights:
    return [generator.integers(0, 1 << 16, len(tensor), np.uint16) for tensor in weights]


def measure(base: Weights, new: Weights) -> dict[str, Any]:
    target = [tensor.copy() for tensor in base]
    deltas: list[tuple[Encoding, memoryview | bytes]] = []

    def encode_all() -> None:
        deltas[:] = [encode(old, tensor, ITEM_BYTES) for old, tensor in zip(base, new, strict=True)]

    def apply_all() -> None:
        for (encoding, payload), tensor in zip(deltas, target, strict=True):
            apply(encoding, payload, tensor, ITEM_BYTES)

    encode_all()
    apply_all()
    assert all(np.array_equal(tensor, wanted) for tensor, wanted in zip(target, new, strict=True))
    copied = [np.empty_like(tensor) for tensor in base]
    rounds = [
        (seconds(lambda: [*map(np.copyto, copied, base)]), seconds(encode_all), seconds(apply_all))
        for _ in range(ROUNDS)
    ]
    num_bytes = sum(tensor.nbytes for tensor in new)
    copy_s, encode_s, apply_s = (statistics.median(column) for column in zip(*rounds, strict=True))
    return {
        "share_of_raw_bytes": sum(len(payload) for _, payload in deltas) / num_bytes,
        "encodings": dict(Counter(encoding.name for encoding, _ in deltas)),
        "encode_s": encode_s,
        "apply_s": apply_s,
        "copy_gb_per_s": num_bytes / copy_s / 1e9,
        "encode_gb_per_s": num_bytes / encode_s / 1e9,
        "apply_gb_per_s": num_bytes / apply_s / 1e9,
        "encode_to_copy": statistics.median(copy / encoding for copy, encoding, _ in rounds),
        "apply_to_copy": statistics.median(copy / applying for copy, _, applying in rounds),
    }


def main() -> None:
    os.sched_setaffinity(0, {CORE})
    generator = np.random.default_rng(0)
    base = make_weights(generator)
    results = []
    for share, goal in SHARES.items():
        result = {"changed": share} | measure(base, stepped(base, share, generator))
        if goal is not None:
            is_met = min(result["encode_gb_per_s"], result["apply_gb_per_s"]) >= goal
            result |= {"goal": f"encode and apply >= {goal} GB/s", "is_met": is_met}
        results.append(result)
    results.append({"changed": "random bits"} | measure(base, random_bits(base, generator)))
    num_items = sum(sizes())
    save("delta_codec", {"num_parameters": num_items, "rounds": ROUNDS, "core": CORE, "deltas": results})


if __name__ == "__main__":
    start(command_line(__doc__))
    main()
