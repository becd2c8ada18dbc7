"""Groups of random tokens, passes over them and the operations that these take, for benchmarks of the trainer."""

from collections.abc import Callable
from typing import Any

import torch

from onbeat.streams.codec import Response, RolloutGroup, Turn
from services.trainer.batch import pack
from services.trainer.episode import turn_paths
from services.trainer.model.logprobs import TargetLogprobs
from services.trainer.model.model import response_logprobs


def make_group(prompt_length: int, response_length: int, group_size: int) -> RolloutGroup:
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(1000, 40_000, (count,), generator=generator).tolist()

    responses = [
        Response(token_ids=tokens(response_length), rollout_logprobs=[0.0] * response_length) for _ in range(group_size)
    ]
    return RolloutGroup(group_id="0-0", prompt_token_ids=tokens(prompt_length), responses=responses)


def separate_paths(group: RolloutGroup) -> list[tuple[list[int], list[tuple[int, int]]]]:
    """Return each path that nothing continues, and the spans of its sampled tokens that no path before it has."""
    paths_with_spans: list[tuple[list[int], list[tuple[int, int]]]] = []
    for response in group.responses:
        paths: list[list[int]] = []
        spans: list[list[tuple[int, int]]] = []  # sampled by the turn, and by those before it that it extends
        turns = response.turns or [Turn()]
        for turn, (before, sampled) in zip(turns, turn_paths(response, list(group.prompt_token_ids)), strict=True):
            turn_spans = [(len(before), len(before) + len(sampled))]
            is_extended = turn.HasField("parent") and turn.num_shared == len(paths[turn.parent])
            if is_extended:
                turn_spans = spans[turn.parent] + turn_spans
                spans[turn.parent] = []
            paths.append(before + sampled)
            spans.append(turn_spans)
        paths_with_spans += [(path, span) for path, span in zip(paths, spans, strict=True) if span]
    return paths_with_spans


def packed(model: Any, *groups: RolloutGroup) -> None:
    """Do a forward and a backward pass of these groups as the trainer does it."""
    response_logprobs(model, pack(groups, torch.device("cpu")), 1.0)[0].sum().backward()


def one_by_one(model: Any, group: RolloutGroup, device: torch.device) -> torch.Tensor:
    """Return the log-probabilities of a group's responses, each in a row of its own; they have the same length."""
    prompt = list(group.prompt_token_ids)
    rows = torch.tensor([prompt + list(response.token_ids) for response in group.responses], device=device)
    hidden = model.get_decoder()(input_ids=rows[:, :-1], use_cache=False).last_hidden_state[:, len(prompt) - 1 :]
    weight, targets = model.get_output_embeddings().weight, rows[:, len(prompt) :].flatten()
    logprobs: torch.Tensor = TargetLogprobs.apply(hidden.flatten(0, 1), weight, targets, 1.0)[0]
    return logprobs


def alternate(
    packed_s: Callable[[], float], other_s: Callable[[], float], num_rounds: int
) -> list[tuple[float, float]]:
    """Return the seconds of each round: the other way's, and the mean of two packed passes, one before and one after
    it, so that a drift of the machine's speed affects both sides. A pass of each kind warms up."""
    packed_s(), other_s()
    rounds = []
    for _ in range(num_rounds):
        before_s, separate_s, after_s = packed_s(), other_s(), packed_s()
        rounds.append((separate_s, (before_s + after_s) / 2))
    return rounds


def counted_operations(model: Any, group: RolloutGroup) -> tuple[int, int]:
    """Return the multiplications and additions of a forward pass, (by paths, packed); backward has twice as many."""
    config = model.config
    linear = sum(p.numel() for name, p in model.named_parameters() if "layers" in name and p.dim() == 2)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = config.num_hidden_layers * config.num_attention_heads * head_size
    logits = 2 * config.vocab_size * config.hidden_size * sum(len(response.token_ids) for response in group.responses)
    lengths = [len(path) - 1 for path, _ in separate_paths(group)]
    separate = 2 * linear * sum(lengths) + 2 * width * sum(length**2 for length in lengths) + logits
    layout = pack([group], torch.device("cpu")).layout
    pairs = sum(segment.length * (2 * segment.position + segment.length) for segment in layout.segments)
    return separate, 2 * linear * layout.num_places + 2 * width * pairs + logits
