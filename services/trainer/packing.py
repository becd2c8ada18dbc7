"""Whether a model may be packed, found out by trying its architecture; never by a list of names.

An attention that needs more than positions and a causal structure (ALiBi, a soft cap, a window shorter than the
sequences) would give wrong numbers on packed rows. Such a model is trained one response at a time instead.

The trial runs on a shrunken random model of the same configuration in float32, where equal means equal: bfloat16 noise
on a real model would hide a real difference. That trial runs on the CPU; another device's attention kernel is compared
with a dense mask on that device, forward and backward.
"""

import copy
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from onbeat.streams.codec import Response, RolloutGroup
from services.trainer.attention import build_layout, dense_mask, packed_attention, plan_attention
from services.trainer.batch import MicroBatch, pack
from services.trainer.model import PACKED_ATTENTION, register_attention, response_logprobs, use_attention

PROBE_PREFIX, PROBE_PROMPT, PROBE_RESPONSES = 16, 40, (20, 1, 9)
PROBE_LAYERS, PROBE_VOCAB, PROBE_GAIN = 2, 256, 8.0
TOLERANCE = 1e-3  # mean gap of logprobs, in nats
KERNEL_TOLERANCE = 0.02  # of the mean magnitude; bfloat16 resolves 0.004
PROBE_ERRORS = (AssertionError, AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError)


def choose_attention(model: Any, longest_tokens: int) -> str:
    """Leave the model packed, or switch it to one-by-one. Returns '' or the reason why it cannot be packed."""
    reason = window_problem(model.config, longest_tokens)
    is_sdpa_right = True
    if not reason:
        reason, is_sdpa_right = try_architecture(model.config)
    parameter = next(model.parameters())
    if not reason and parameter.device.type != "cpu":
        reason = try_kernel(model.config, parameter.device, parameter.dtype)
    if reason:
        use_attention(model, "sdpa" if is_sdpa_right else "eager")
    return reason


@torch.no_grad()
def try_architecture(config: Any) -> tuple[str, bool]:
    """'' or why packing is wrong; and whether transformers' sdpa agrees with eager (it may ignore a soft cap)."""
    group = random_group(PROBE_VOCAB)
    batch = pack([group, group], torch.device("cpu"))  # the second behind the first one's prompt
    try:
        model = shrunken(config)
        reference = probe(model, "eager", batch)
        is_sdpa_right = mean_gap(probe(model, "sdpa", batch), reference) <= TOLERANCE
    except PROBE_ERRORS as error:
        return f"its architecture could not be tried: {type(error).__name__}: {error}", False
    try:
        gap = mean_gap(probe(model, PACKED_ATTENTION, batch), reference)
    except PROBE_ERRORS as error:
        return f"its attention does not take packed rows: {type(error).__name__}: {error}", is_sdpa_right
    wrong = f"packed and one-by-one logprobs of its architecture differ by {gap:.3g} on average"
    return ("" if gap <= TOLERANCE else wrong), is_sdpa_right


def try_kernel(config: Any, device: torch.device, dtype: torch.dtype) -> str:
    """'' or what is wrong with the device's kernel: its output and gradients against those of a dense mask."""
    layout = build_layout([(PROBE_PROMPT, list(PROBE_RESPONSES))] * 2, device, PROBE_PREFIX)
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
        found, _ = packed_attention(None, query, key, value, None, layout_plan=plan_attention(layout))
        gradients = torch.autograd.grad(found.float().square().sum(), inputs)
    except PROBE_ERRORS as error:
        return f"the attention kernel of {device} fails: {type(error).__name__}: {error}"
    pairs = zip((found, *gradients), (expected, *torch.autograd.grad(expected.square().sum(), exact)), strict=True)
    gap = max((mean_gap(left.float(), right) / right.abs().mean()).item() for left, right in pairs)
    return "" if gap <= KERNEL_TOLERANCE else f"the attention kernel of {device} is off by {gap:.2g} of the mean value"


def shrunken(config: Any) -> Any:
    """A random float32 model with the same attention, few layers and tokens, and weights large enough to matter."""
    from transformers import AutoModelForCausalLM

    small = copy.deepcopy(config)
    small.vocab_size, small.num_hidden_layers = PROBE_VOCAB, PROBE_LAYERS
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(small, name, None)
    if layer_types := getattr(config, "layer_types", None):
        kinds = sorted(set(layer_types))
        small.layer_types = [kinds[index % len(kinds)] for index in range(PROBE_LAYERS)]
    register_attention()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(small, dtype=torch.float32, attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(PROBE_GAIN)
    return model.eval()


def probe(model: Any, attention: str, batch: MicroBatch) -> torch.Tensor:
    """Log-probabilities [N] of the batch by that attention."""
    use_attention(model, attention)
    return response_logprobs(model, batch, 1.0)[0]


def mean_gap(left: torch.Tensor, right: torch.Tensor) -> float:
    return (left - right).abs().mean().item()


def window_problem(config: Any, longest_tokens: int) -> str:
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None) or ["sliding_attention"]
    is_used = getattr(config, "use_sliding_window", True) and "sliding_attention" in layer_types
    if window is None or not is_used or longest_tokens <= window:
        return ""
    return (
        f"sequences may reach {longest_tokens} tokens, beyond the attention window of {window}; "
        f"set model.max_context_tokens to {window} or less to pack"
    )


def random_group(vocab_size: int) -> RolloutGroup:
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(vocab_size, (count,), generator=generator).tolist()

    responses = [Response(token_ids=tokens(n), rollout_logprobs=[0.0] * n) for n in PROBE_RESPONSES]
    return RolloutGroup(group_id="probe", prompt_token_ids=tokens(PROBE_PROMPT), responses=responses)
