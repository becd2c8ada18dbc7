"""The rule behind `training.max_tokens_per_micro_batch = "auto"`: rows as long as memory allows.

    for a pass = free memory - reserve - what the trainer, and engines beside it, have still to take
    a row      = as many tokens, in steps of 64, as a pass has memory for

It is never longer than a rank's share of an update, since a row holds nothing else, and never shorter than the longest
response needs behind its prompt, which cannot be split. An example or an episode, whose length is not known beforehand,
is a row by itself where it is longer.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from onbeat.config import JobConfig
from onbeat.config.warm_start import SFT
from onbeat.contracts.model_config import context_tokens

RESERVE, LEAST_RESERVE = 0.2, 500_000_000  # share of the free memory that stays free, and bytes at least
STEP = 64
LEAST_TOKENS = 512  # a pass over fewer tokens spends most of its time on reading all weights
MOST_TOKENS = 1 << 20
UNKNOWN_CONTEXT = 4096  # tokens of a sequence, where neither the job nor the model has a limit
LONGEST_COUNTED = 4096  # tokens of a row whose memory is counted; counting takes the longer, the longer the row is
MAX_GUESSES = 8

BytesOfRow = Callable[[int], int]  # tokens -> bytes


@dataclass(frozen=True)
class Bounds:
    least: int
    most: int


def bounds_of(config: JobConfig, prompt_tokens: int | None, model: Mapping[str, Any], num_ranks: int = 1) -> Bounds:
    """Return the tokens of the shortest and of the longest row that is of use. `prompt_tokens`: of the longest prompt;
    None: not known. `model`: its config.json. `num_ranks`: ranks that share an update, each with rows of its own."""
    limits = (config.model.max_context_tokens, context_tokens(model))
    context = min((limit for limit in limits if limit is not None), default=UNKNOWN_CONTEXT)
    generated = generated_bounds(config, prompt_tokens, context, num_ranks)
    if config.warm_start is None:
        return generated
    most = min(MOST_TOKENS, -(-config.warm_start.num_rows_per_iteration // num_ranks) * context)
    if config.objective.type == SFT:
        return Bounds(min(LEAST_TOKENS, most), most)
    return Bounds(generated.least, max(generated.most, most))


def generated_bounds(config: JobConfig, prompt_tokens: int | None, context: int, num_ranks: int) -> Bounds:
    num_samples, is_played = config.rollout.num_samples_per_prompt, any(config.environments_by_source.values())
    longest = context if is_played else config.longest_response
    prompt = max(1, context - longest) if prompt_tokens is None else prompt_tokens
    group = prompt + num_samples * max(1, min(longest, context - prompt))
    known_prompt = prompt_tokens or 0
    known_response = 0 if is_played else min(longest, context - known_prompt)
    part = known_prompt + known_response * (num_samples if config.objective.needs_whole_group else 1)
    num_prompts = config.rollout.num_reserved_prompts
    most = min(MOST_TOKENS, -(-num_prompts // (config.training.num_updates_per_iteration * num_ranks)) * group)
    return Bounds(min(most, max(LEAST_TOKENS, part)), most)


def reserve_of(available_bytes: int) -> int:
    return max(int(RESERVE * available_bytes), LEAST_RESERVE)


def longest_row(bytes_of_row: BytesOfRow, limit_bytes: int, bounds: Bounds) -> int:
    """Return the most tokens whose row takes no more than the limit, and `bounds.least` if that takes more already.

    What a row takes grows about evenly with its tokens, so that a few guesses between two known rows are enough.
    """
    low, high = bounds.least, bounds.most
    if low == high or bytes_of_row(high) <= limit_bytes:
        return high
    for _ in range(MAX_GUESSES):
        share = (limit_bytes - bytes_of_row(low)) / max(1, bytes_of_row(high) - bytes_of_row(low))
        guess = int(low + share * (high - low)) // STEP * STEP
        if guess <= low:
            break
        if bytes_of_row(guess) <= limit_bytes:
            low = guess
        else:
            high = guess
    return low


def beyond_counted(count: BytesOfRow, least: int) -> BytesOfRow:
    """Return a function that counts each row once, and takes a long one for as many of the longest that is counted: of
    LONGEST_COUNTED tokens, or of `least`, as shorter rows hold one response, too, and so as much.

    That is more than it takes, by what does not grow with a row.
    """
    counted, most_counted = functools.cache(count), max(LONGEST_COUNTED, least)

    def bytes_of_row(num_tokens: int) -> int:
        longest = min(num_tokens, most_counted)
        return counted(longest) * num_tokens // longest

    return bytes_of_row
