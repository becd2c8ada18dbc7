"""The choice of a model's passes over micro-batches, made before the model is loaded and anything is generated.

`trial.py` tries the architecture on the CPU. The attention kernel of another device is compared with a dense mask on
that device, forward and backward. No list of model names is consulted.
"""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from services.trainer.attention import Tree, build_layout, dense_mask, packed_attention, plan_attention
from services.trainer.model.errors import TRIAL_ERRORS
from services.trainer.model.model import Passes
from services.trainer.passes.shrink import rope_tables
from services.trainer.passes.trial import architecture_name, try_architecture

PROBE_PREFIX, PROBE_PROMPT, PROBE_RESPONSES = 16, 40, (20, 1, 9)
PROBE_FORK = Tree((6, 5, 7, 3), (-1, 0, 0, -1), torch.arange(-1, 21))  # segments of an episode; targets do not matter
KERNEL_TOLERANCE = 0.02  # relative to the mean magnitude; bfloat16 resolves 0.004


def choose_passes(
    config: Any, max_context_tokens: int | None, device: torch.device, dtype: torch.dtype, is_sharded: bool = False
) -> tuple[Passes, str]:
    """Return the fastest passes that are right for the model, and why they are not packed ('' if they are).

    Raises ValueError naming the architecture when no passes are right.
    """
    text = config.get_text_config()
    longest = max_context_tokens or getattr(text, "max_position_embeddings", None) or float("inf")
    if problem := rope_problem(text, longest):
        raise ValueError(f"model.max_context_tokens: {architecture_name(config)} {problem}")
    passes, reason = try_architecture(config, longest, is_sharded)
    window = getattr(text, "sliding_window", None)
    if reason and window and longest > window and try_architecture(config, window)[0].is_packed:
        reason = (
            f"sequences may reach {longest} tokens, beyond the attention window of {window}; "
            f"set model.max_context_tokens to {window} or less to pack"
        )
    if passes.is_packed and device.type != "cpu" and (reason := try_kernel(text, device, dtype)):
        passes, _ = try_architecture(config, longest, is_sharded, may_pack=False)
    return passes, reason


def rope_problem(config: Any, longest_tokens: float) -> str:
    """Return the problem if sequences may be long enough for rotary tables to depend on a pass's longest one, or ''.

    Then a token's logprob would depend on what else is in the micro-batch, and engines choose other tables.
    """
    for rope in rope_tables(config):
        limit = {
            "longrope": rope.get("original_max_position_embeddings"),
            "dynamic": getattr(config, "max_position_embeddings", None),
        }.get(rope["rope_type"])
        if limit is not None and longest_tokens > limit:
            return (
                f"has other rotary embeddings ({rope['rope_type']}) in passes of more than {limit} tokens, so that "
                f"results would depend on what shares a pass; set model.max_context_tokens to {limit} or less"
            )
    return ""


def try_kernel(config: Any, device: torch.device, dtype: torch.dtype) -> str:
    """Compare the device's kernel with a dense mask, output and gradients. Returns what is wrong, or ''."""
    layout = build_layout([(PROBE_PROMPT, [*PROBE_RESPONSES, PROBE_FORK])] * 2, device, PROBE_PREFIX)
    num_heads = config.num_attention_heads
    num_keys = getattr(config, "num_key_value_heads", None) or num_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    generator = torch.Generator().manual_seed(0)
    query, key, value = inputs = [
        torch.randn(1, heads, layout.num_places, head_size, generator=generator).to(device, dtype).requires_grad_()
        for heads in (num_heads, num_keys, num_keys)
    ]
    exact_query, exact_key, exact_value = exact = [tensor.detach().float().requires_grad_() for tensor in inputs]
    mask = dense_mask(layout).to(device)
    expected = scaled_dot_product_attention(exact_query, exact_key, exact_value, mask, enable_gqa=True).transpose(1, 2)
    try:
        out, _ = packed_attention(None, query, key, value, None, layout_plan=plan_attention(layout))
        gradients = torch.autograd.grad(out.float().square().sum(), inputs)
    except TRIAL_ERRORS as error:
        return f"the attention kernel of {device} fails: {type(error).__name__}: {error}"
    pairs = zip((out, *gradients), (expected, *torch.autograd.grad(expected.square().sum(), exact)), strict=True)
    gap = max(((left.float() - right).abs().mean() / right.abs().mean()).item() for left, right in pairs)
    return "" if gap <= KERNEL_TOLERANCE else f"the attention kernel of {device} is off by {gap:.2g} of the mean value"
