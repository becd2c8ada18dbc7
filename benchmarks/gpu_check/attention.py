"""FlexAttention as the trainer uses it, against a dense mask: output and gradients, in float32 and bfloat16.

The truth is a dense mask in float64. A kernel is right when it is about as near as a dense mask in its own dtype. On a
CPU FlexAttention is not compiled and has no backward pass.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from services.trainer.attention import PackedLayout, Tree, build_layout, dense_mask, packed_attention
from services.trainer.attention.flex import BLOCK, compiled, forget_compiled, plan_flex

from .part import Findings, Place, run_part

FORKED = Tree((160, 70, 40, 300, 20), (-1, 0, 0, 2, 2), torch.arange(-1, 589))  # segments of an episode
Groups = Sequence[tuple[int, Sequence[int | Tree]]]  # (prompt, responses) of each, in tokens
LAYOUTS: dict[str, tuple[Groups, int]] = {  # groups, and the tokens of the prefix that their prompts share
    "smallest": ([(1, [2])], 0),
    "whole blocks": ([(128, [129, 129]), (128, [129])], 0),
    # These are those of tests/unit/trainer/attention/test_kernels.py.
    "long": ([(150, [3, 40, 1]), (5, [200, 7])], 0),
    "longer": ([(300, [310, 2, 1]), (150, [3, 40, 1]), (5, [200, 7])], 0),
    "behind a long prefix": ([(152, [3, 40, 1]), (131, [200, 7])], 130),
    "many behind a prefix": ([(24, [6, 9])] * 32, 20),
    "alike": ([(9, [5, 5]), (9, [5, 4]), (8, [5, 5])], 0),
    "episodes that fork": ([(152, [3, FORKED, 40]), (131, [FORKED, FORKED, 7])], 130),
    "long prompt": ([(512, [128] * 8)], 0),
}
MOST_VERSIONS = 2  # the first length, all others
TINY_LAYOUTS = ("smallest", "long", "behind a long prefix", "alike", "episodes that fork")
HEADS = {  # dtype: query heads, key/value heads, head size; (12, 2) and (28, 4) are of Qwen2.5 1.5B and 7B
    torch.bfloat16: [(12, 2, 128), (28, 4, 128), (6, 2, 16)],
    torch.float32: [(12, 2, 128), (6, 2, 16), (3, 1, 64)],
}
TINY_HEADS = {torch.bfloat16: [(6, 2, 16)], torch.float32: [(6, 2, 16), (3, 1, 16)]}
TIMES_DENSE, FLOOR = (
    2.0,
    {torch.bfloat16: 1e-3, torch.float32: 1e-5},
)  # allowed gap: times that of a dense mask, at least


def measure(place: Place, findings: Findings) -> None:
    num_versions = count_versions(range(2, 12))
    findings.check("rows of ten lengths share their kernels", num_versions <= MOST_VERSIONS, num_versions=num_versions)
    layouts = TINY_LAYOUTS if place.is_tiny else tuple(LAYOUTS)
    for dtype, choices in (TINY_HEADS if place.is_tiny else HEADS).items():
        for heads in choices:
            forget_compiled()  # as a trainer does for each job's model
            for name in layouts:
                check(name, heads, dtype, place, findings)


def count_versions(lengths: Iterable[int]) -> int:
    """Return how often PyTorch would compile the attention for rows of these lengths, in blocks. Nothing is compiled:
    the functions that it has traced are called as they are."""
    forget_compiled()
    versions = []

    def capture(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        versions.append(graph)
        return graph.forward

    attend = compiled(flex_attention, capture)
    for length in (BLOCK * blocks for blocks in lengths):
        mask = create_block_mask(lambda b, h, query, key: key <= query, None, None, length, length, "cpu", BLOCK)
        query, key, value = (torch.randn(1, heads, length, 16) for heads in (4, 2, 2))
        attend(query, key, value, block_mask=mask, enable_gqa=True)
    return len(versions)


def check(name: str, heads: tuple[int, int, int], dtype: torch.dtype, place: Place, findings: Findings) -> None:
    """Check one combination: one that the compiler refuses does not cost the others."""
    title = f"{str(dtype).removeprefix('torch.')}, heads {heads}, {name}"
    try:
        gap, gap_of_dense, first_call_s = compare(name, heads, dtype, place)
    except (RuntimeError, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
        findings.check(title, False, error=f"{type(error).__name__}: {error}")
        return
    is_met = gap <= max(TIMES_DENSE * gap_of_dense, FLOOR[dtype])
    findings.check(title, is_met, gap=gap, gap_of_dense=gap_of_dense, first_call_s=first_call_s)


def compare(name: str, heads: tuple[int, int, int], dtype: torch.dtype, place: Place) -> tuple[float, float, float]:
    """Return the gap of FlexAttention, that of a dense mask in the same dtype, and the seconds that the first took."""
    groups, prefix_length = LAYOUTS[name]
    layout = build_layout(groups, place.device, prefix_length)
    inputs = random_inputs(layout, heads, dtype, place.device)
    exact = outputs(lambda *tensors: by_dense_mask(layout, *tensors), [tensor.double() for tensor in inputs])
    dense = outputs(lambda *tensors: by_dense_mask(layout, *tensors), inputs)
    started = time.perf_counter()
    plan = plan_flex(layout)
    flex = outputs(lambda q, k, v: packed_attention(None, q, k, v, None, layout_plan=plan)[0], inputs)
    place.synchronize()
    first_s = time.perf_counter() - started
    return largest_gap(flex, exact), largest_gap(dense, exact), first_s


def random_inputs(
    layout: PackedLayout, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """Return query [1, H, T, D], key and value [1, K, T, D]."""
    num_heads, num_keys, size = heads
    generator = torch.Generator().manual_seed(layout.num_places)
    shapes = [(1, count, layout.num_places, size) for count in (num_heads, num_keys, num_keys)]
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def outputs(attend: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the output, and on a GPU the gradients of the inputs too."""
    inputs = [tensor.detach().requires_grad_(tensor.is_cuda) for tensor in inputs]
    output = attend(*inputs)
    weights = torch.linspace(-1, 1, output.numel(), device=output.device).to(torch.bfloat16).reshape(output.shape)
    gradients = torch.autograd.grad(output, inputs, weights.to(output.dtype)) if output.is_cuda else ()
    return [tensor.detach() for tensor in (output, *gradients)]


def by_dense_mask(layout: PackedLayout, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    mask = dense_mask(layout).to(query.device)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def largest_gap(computed: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """Return the largest of the tensors' gaps: the mean gap divided by the mean size of the values."""
    gaps = [(ours - truth).abs().mean() / truth.abs().mean() for ours, truth in zip(computed, exact, strict=True)]
    return max(gap.item() for gap in gaps)


if __name__ == "__main__":
    run_part(measure)
