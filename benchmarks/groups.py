"""Groups of random tokens, and the operations that a pass over one takes, for benchmarks of the trainer."""

import torch

from onbeat.streams.codec import Response, RolloutGroup


def make_group(prompt_length: int, response_length: int, group_size: int) -> RolloutGroup:
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(1000, 40_000, (count,), generator=generator).tolist()

    responses = [
        Response(token_ids=tokens(response_length), rollout_logprobs=[0.0] * response_length) for _ in range(group_size)
    ]
    return RolloutGroup(group_id="0-0", prompt_token_ids=tokens(prompt_length), responses=responses)


def counted_operations(model, prompt_length: int, response_length: int, group_size: int) -> tuple[int, int]:
    """Return the multiplications and additions of a forward pass, (one-by-one, packed); backward has twice as many."""
    config = model.config
    head = config.vocab_size * config.hidden_size
    linear = sum(p.numel() for name, p in model.named_parameters() if "layers" in name and p.dim() == 2)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = config.num_hidden_layers * config.num_attention_heads * head_size
    response_places = response_length - 1
    row = prompt_length + response_places
    packed_places = prompt_length + group_size * response_places
    own_pairs = group_size * response_places * (2 * prompt_length + response_places)
    logits = 2 * head * group_size * response_length
    separate = 2 * linear * group_size * row + 2 * width * group_size * row * row + logits
    together = 2 * linear * packed_places + 2 * width * (prompt_length**2 + own_pairs) + logits
    return separate, together
