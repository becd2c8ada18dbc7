"""The responses of groups as people read them: in the order in which a few show many prompts, episodes by turns."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from types import MappingProxyType
from typing import Any

from pydantic_core import from_json

from onbeat.contracts.records import EpisodeTurn, PromptPart, Sample
from onbeat.streams import codec
from onbeat.streams.codec import Response, RolloutGroup, Turn, is_truncated

Advantages = Mapping[str, Sequence[float | None]]  # group id -> that of each response


@dataclass(frozen=True)
class Choice:
    """A choice of responses: those that meet all of it. None and "" leave a thing open.

    `least` to `most`: the rewards, both ends included. `is_solved`: whether the reward reaches what `solved_at` has for
    the source, by default 1.
    `text`: is in the prompt, the decoded prompt or the response, in any case of letters. `source`: name of the
    prompt's, in a job of several.
    """

    least: float = -math.inf
    most: float = math.inf
    is_truncated: bool | None = None
    is_solved: bool | None = None
    solved_at: Mapping[str, float] = field(default_factory=dict)
    text: str = ""
    source: str = ""

    def takes(self, response: Response, source: str) -> bool:
        """Return whether a response is chosen, but for the text and its source."""
        return self._takes_reward(response, source) and self.is_truncated in (None, is_truncated(response))

    def _takes_reward(self, response: Response, source: str) -> bool:
        if response.has_no_reward:  # it is neither high nor low, neither right nor wrong
            return (self.least, self.most, self.is_solved) == (-math.inf, math.inf, None)
        is_solved = response.reward >= self.solved_at.get(source, 1.0)
        return self.least <= response.reward <= self.most and self.is_solved in (None, is_solved)

    def has_text(self, *texts: str) -> bool:
        """Return whether one of the texts holds the text that is looked for."""
        return not self.text or any(self.text.casefold() in text.casefold() for text in texts)


ANY_RESPONSE = Choice()


def sample_groups(
    groups: Iterable[RolloutGroup],
    limit: int,
    offset: int = 0,
    choice: Choice = ANY_RESPONSE,
    advantages: Advantages = MappingProxyType({}),
) -> list[Sample]:
    """Return up to `limit` chosen responses of many prompts, after the first `offset` ones."""
    of_source = (group for group in groups if choice.source in ("", group.source))
    in_order = sorted(of_source, key=lambda group: group_order(group.group_id))
    of_groups = [group_samples(group, choice, advantages.get(group.group_id, ())) for group in in_order]
    # The first response of every group, then the second of every group: few samples show many prompts.
    samples = (sample for next_samples in zip_longest(*of_groups) for sample in next_samples if sample is not None)
    return list(islice(samples, offset, offset + limit))


def group_order(group_id: str) -> tuple[int, ...]:
    return tuple(int(part) for part in group_id.split("-") if part.isdigit())


def group_samples(
    group: RolloutGroup, choice: Choice = ANY_RESPONSE, advantages: Sequence[float | None] = ()
) -> Iterator[Sample]:
    """Yield a group's chosen responses. `advantages`: of each response; empty where they are not known."""
    decoded_prompt = text_of(group.prompt_parts)
    is_prompt_chosen = choice.has_text(group.prompt_text, decoded_prompt or "")
    for index, response in enumerate(group.responses):
        if not choice.takes(response, group.source) or not (is_prompt_chosen or choice.has_text(response.text)):
            continue
        yield Sample(
            iteration=group.iteration,
            group_id=group.group_id,
            source=group.source,
            index=index,
            policy_version=group.policy_version,
            prompt=group.prompt_text,
            decoded_prompt=decoded_prompt,
            response=response.text,
            reward=None if response.has_no_reward else response.reward,
            reward_parts={name: x for name, x in sorted(response.reward_parts.items()) if math.isfinite(x)},
            advantage=advantages[index] if index < len(advantages) else None,
            num_tokens=len(response.token_ids),
            finish_reason=response.finish_reason,
            turns=list(turns_of(response, len(group.prompt_token_ids))),
            is_supervised=group.is_supervised,
        )


def turns_of(response: Response, num_prompt: int) -> Iterator[EpisodeTurn]:
    """Yield the turns of an episode. `num_prompt`: tokens of the group's prompt."""
    path_lengths: list[int] = []  # tokens up to the end of each turn
    start = 0  # start of the turn's text
    for turn in response.turns:
        continues = turn.parent if turn.HasField("parent") else None
        before = num_prompt if continues is None else path_lengths[continues]
        path_lengths.append(turn.num_shared + len(turn.observed_token_ids) + turn.num_sampled)
        yield EpisodeTurn(
            continues=continues,
            is_fork=turn.num_shared < before or (continues is None and len(path_lengths) > 1),
            messages=messages_of(turn),
            text=response.text[start : start + turn.num_characters],
            num_observed_tokens=len(turn.observed_token_ids),
            observed_parts=parts_of(turn.observed_parts),
            num_cached_tokens=turn.num_cached_tokens,
            num_tokens=turn.num_sampled,
            finish_reason=turn.finish_reason,
            call_id=turn.call_id,
            reward=turn.reward if turn.HasField("reward") and math.isfinite(turn.reward) else None,
            waited_s=turn.waited_s,
            generate_s=turn.generate_s,
        )
        start += turn.num_characters


def parts_of(parts: Iterable[codec.PromptPart]) -> list[PromptPart]:
    return [PromptPart(text=part.text, is_special=part.is_special, num_left_out=part.num_left_out) for part in parts]


def text_of(parts: Sequence[codec.PromptPart]) -> str | None:
    """Return a decoded prompt as one text; None where it was not recorded."""
    gap = "[{} tokens are left out here]"
    texts = (gap.format(part.num_left_out) if part.num_left_out else part.text for part in parts)
    return "".join(texts) if parts else None


def messages_of(turn: Turn) -> list[dict[str, Any]]:
    """Return the messages that were new in this call; none where they cannot be read."""
    try:
        messages = from_json(turn.messages_json or "[]")  # it refuses what could not be written as JSON again
    except ValueError:
        return []
    return [message for message in messages if isinstance(message, dict)] if isinstance(messages, list) else []
