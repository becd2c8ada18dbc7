"""Whether a model may be packed, found out by trying it; never by a list of names.

An attention that needs more than positions and a causal structure (ALiBi, a soft cap, a window shorter than the
sequences) would give wrong numbers on packed rows. Such a model is trained one response at a time instead.
"""

from typing import Any

import torch

from onbeat.streams.codec import Response, RolloutGroup
from services.trainer.batch import MicroBatch, pack
from services.trainer.model import PACKED_ATTENTION, response_logprobs, use_attention

PROBE_PROMPT, PROBE_RESPONSES = 40, (20, 1, 9)
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # mean gap of logprobs, in nats


@torch.no_grad()
def choose_attention(model: Any, longest_tokens: int) -> str:
    """Leave the model packed, or switch it to one-by-one. Returns '' or the reason why it cannot be packed."""
    batch = pack([random_group(model.config.vocab_size)], next(model.parameters()).device)
    reference = probe(model, "eager", batch)
    reason = window_problem(model.config, longest_tokens) or packed_problem(model, batch, reference)
    if reason:  # sdpa is faster, but transformers lets it ignore soft caps
        is_sdpa_right = mean_gap(probe(model, "sdpa", batch), reference) <= tolerance(model)
        use_attention(model, "sdpa" if is_sdpa_right else "eager")
    return reason


def packed_problem(model: Any, batch: MicroBatch, reference: torch.Tensor) -> str:
    try:
        gap = mean_gap(probe(model, PACKED_ATTENTION, batch), reference)
    except (AssertionError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return f"its attention does not take packed rows: {type(error).__name__}: {error}"
    return "" if gap <= tolerance(model) else f"packed and one-by-one logprobs differ by {gap:.3g} on average"


def probe(model: Any, attention: str, batch: MicroBatch) -> torch.Tensor:
    """Log-probabilities [N] of the batch by that attention."""
    use_attention(model, attention)
    return response_logprobs(model, batch, 1.0)[0]


def mean_gap(left: torch.Tensor, right: torch.Tensor) -> float:
    return (left - right).abs().mean().item()


def tolerance(model: Any) -> float:
    return TOLERANCE.get(next(model.parameters()).dtype, 1e-3)


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
