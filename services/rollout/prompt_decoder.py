"""The prompt that the model saw, for people: its token ids decoded, with special tokens apart from the text.

    token ids   1  9690  198  57  2  198        parts   <|im_start|>   "user\\nHi"   <|im_end|>   "\\n"

Only the tokenizer knows which tokens are special: text of a row may look like one.
"""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from onbeat.streams.codec import PromptPart, RolloutGroup

MAX_SHOWN = 8192  # tokens of a prompt that are decoded; of a longer one as many from its beginning as from its end


class PromptDecoder:
    """A decoder of prompts, by a tokenizer of transformers; like the tokenizer, for one thread at a time."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._special = {*tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}
        self._before = list(tokenizer("a", add_special_tokens=False)["input_ids"])
        self._text_before = self._decode(self._before)

    async def add_parts(self, group: RolloutGroup) -> None:
        """Add the decoded prompts to a group and its turns, once; other tasks get a turn between responses."""
        if not group.prompt_parts:
            group.prompt_parts.extend(self.parts(group.prompt_token_ids, is_first=True))
        for response in group.responses:
            for turn in response.turns:
                turn.observed_parts.extend(self.parts(turn.observed_token_ids, is_first=False))
            await asyncio.sleep(0)

    def parts(self, token_ids: Sequence[int], *, is_first: bool) -> list[PromptPart]:
        """Return the parts of a prompt; none where these tokens cannot be decoded. `is_first`: no tokens precede."""
        gap, half = len(token_ids) - MAX_SHOWN, MAX_SHOWN // 2
        try:
            if gap <= 0:
                return list(self._parts(token_ids, is_first=is_first))
            left_out = PromptPart(num_left_out=gap)
            tail = self._parts(token_ids[-half:], is_first=False)
            return [*self._parts(token_ids[:half], is_first=is_first), left_out, *tail]
        except (TypeError, ValueError, LookupError, OverflowError):  # tokenizers raise different errors for odd ids
            return []

    def _parts(self, token_ids: Sequence[int], *, is_first: bool) -> Iterator[PromptPart]:
        for is_special, run in groupby(token_ids, key=self._special.__contains__):
            for tokens in ([token_id] for token_id in run) if is_special else [list(run)]:
                yield PromptPart(text=self._text(tokens, is_first=is_first), is_special=is_special)
                is_first = False

    def _text(self, token_ids: list[int], *, is_first: bool) -> str:
        """Decode tokens. Some decoders omit a space where a text begins, so those within a prompt follow others."""
        if is_first:
            return self._decode(token_ids)
        return self._decode([*self._before, *token_ids]).removeprefix(self._text_before)

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text
