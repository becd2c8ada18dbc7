"""Batch invariance: does a row come out with the same bits, whatever else is in the batch?

Exact on-policy training needs operators of which this holds, in engine and trainer. This says where it does not: a
finding, not an error.
"""

from collections.abc import Callable

import torch
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention

from .part import Findings, Place, run_part

BATCHES, TINY_BATCHES = (2, 3, 4, 8, 16, 32, 64, 128, 256, 1024), (2, 3, 8, 64)
HIDDEN, INTERMEDIATE, HEADS, KEY_HEADS, HEAD_SIZE, CONTEXT = 1536, 8960, 12, 2, 128, 640  # Qwen2.5 1.5B
MAX_PROMPTS = 64

Operator = Callable[[torch.Tensor], torch.Tensor]


def operators(dtype: torch.dtype, place: Place) -> list[tuple[str, Operator, tuple[int, ...]]]:
    """Return the name of each operator, the function of a batch, and the shape of one of its rows."""
    hidden, intermediate = (64, 96) if place.is_tiny else (HIDDEN, INTERMEDIATE)
    context = 40 if place.is_tiny else CONTEXT
    weights = random((intermediate, hidden), dtype, place)
    back = random((hidden, intermediate), dtype, place)
    gain = random((hidden,), dtype, place)
    keys, values = (random((KEY_HEADS, context, HEAD_SIZE), dtype, place) for _ in range(2))

    def attend(rows_BHTD: torch.Tensor, is_causal: bool) -> torch.Tensor:
        key, value = (tensor.expand(len(rows_BHTD), -1, -1, -1) for tensor in (keys, values))
        return scaled_dot_product_attention(rows_BHTD, key, value, is_causal=is_causal, enable_gqa=True)

    def own_rms_norm(rows: torch.Tensor) -> torch.Tensor:
        """Compute the RMS norm as transformers does."""
        precise = rows.float()
        return gain * (precise * torch.rsqrt(precise.pow(2).mean(-1, keepdim=True) + 1e-6)).to(rows.dtype)

    return [
        ("linear, up", lambda rows: linear(rows, weights), (hidden,)),
        ("linear, down", lambda rows: linear(rows, back), (intermediate,)),
        ("RMS norm, of PyTorch", lambda rows: rms_norm(rows, (hidden,), gain, 1e-6), (hidden,)),
        ("RMS norm, of transformers", own_rms_norm, (hidden,)),
        ("attention, one token", lambda rows: attend(rows, False), (HEADS, 1, HEAD_SIZE)),
        ("attention, a prompt", lambda rows: attend(rows, True), (HEADS, context, HEAD_SIZE)),
    ]


def random(shape: tuple[int, ...], dtype: torch.dtype, place: Place) -> torch.Tensor:
    return torch.randn(shape, device=place.device).to(dtype)


@torch.no_grad()
def measure(place: Place, findings: Findings) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for name, run, shape in operators(dtype, place):
            most = MAX_PROMPTS if "prompt" in name else max(BATCHES)
            batches = [size for size in (TINY_BATCHES if place.is_tiny else BATCHES) if size <= most]
            rows = random((max(batches), *shape), dtype, place)
            alone = run(rows[:1])
            gaps = {size: (run(rows[:size])[:1] - alone).abs().max().item() for size in batches}
            findings.figure(
                f"{str(dtype).removeprefix('torch.')}, {name}",
                same_bits_as_alone=[size for size, gap in gaps.items() if gap == 0],
                other_bits=[size for size, gap in gaps.items() if gap > 0],
                largest_gap=max(gaps.values()),
                largest_value=alone.abs().max().item(),
            )


if __name__ == "__main__":
    run_part(measure)
