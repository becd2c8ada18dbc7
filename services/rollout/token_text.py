"""The number of characters that each token gave to a response's text, for pages that show the text token by token.

Most tokens decode to a piece of their own, and the pieces join to the text. They do not where a character is spread
over several tokens, or where the decoder looks at neighbours (a space at the beginning, clean-up): there a run of
tokens is decoded together, until it gives a piece of the text. The text may end before its tokens do.

    tokens   "Hi"  0xF0 0x9F   0x98 0x80   "!"   end of sequence      text "Hi😀!"
    lengths    2       0           1        1           0
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise, takewhile
from typing import Any

BROKEN = "\ufffd"  # bytes that are no character, or not yet, decode to this
MAX_RUN = 32  # tokens that are decoded together
MAX_REMEMBERED = 100_000  # tokens and runs whose text is cached


class TokenText:
    """The texts of tokens, by a tokenizer of transformers; like the tokenizer, for one thread at a time."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._before = list(tokenizer("a", add_special_tokens=False)["input_ids"])
        self._text_before = self._decode(self._before)
        self._after_others = lru_cache(MAX_REMEMBERED)(self._decode_after_others)

    def lengths(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Return [T]: characters (Unicode code points) by token, len(text) together; empty where they are unknown."""
        try:
            pieces = [self._after_others((token_id,)) for token_id in token_ids]
            if "".join(pieces) == text:
                return list(map(len, pieces))
            return self._fit(token_ids, pieces, text)
        except (TypeError, ValueError, LookupError, OverflowError):  # tokenizers raise different errors for odd ids
            return []

    def _fit(self, token_ids: Sequence[int], pieces: Sequence[str], text: str) -> list[int]:
        ends = [0]  # position of the parts so far, in the text
        while len(ends) <= len(token_ids):
            piece = pieces[len(ends) - 1]
            if BROKEN not in piece and text.startswith(piece, ends[-1]):
                ends.append(ends[-1] + len(piece))
                continue
            run = self._run_ends(token_ids[len(ends) - 1 : len(ends) - 1 + MAX_RUN], text, ends[-1])
            if not run:
                return []
            ends += run
        return [end - start for start, end in pairwise(ends)] if ends[-1] == len(text) else []

    def _run_ends(self, token_ids: Sequence[int], text: str, start: int) -> list[int]:
        """Return where the parts of the first tokens end, as many as make a piece of the text; empty if none do.

        A replacement character may still become another one: no piece ends with it, unless it has to.
        """
        ends: list[int] = []
        for num_tokens in range(1, len(token_ids) + 1):
            given = self._given(token_ids[:num_tokens], text, start)
            is_whole, is_last = text.startswith(given, start), num_tokens == len(token_ids)
            end = start + (len(given) if is_whole else num_common(given, text, start))
            ends.append(max(end, ends[-1]) if ends else end)
            if is_whole and (is_last or not given.endswith(BROKEN)):
                return ends
        return ends if ends[-1] == len(text) else []  # cut off

    def _given(self, token_ids: Sequence[int], text: str, start: int) -> str:
        """Return the tokens' text at `start`. Some decoders, and not all engines, omit a space where a text begins."""
        given = self._after_others(tuple(token_ids))
        if start > 0:
            return given
        return max(given, self._decode(token_ids), key=lambda candidate: num_common(candidate, text, start))

    def _decode_after_others(self, token_ids: tuple[int, ...]) -> str:
        return self._decode([*self._before, *token_ids]).removeprefix(self._text_before)

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text


def num_common(given: str, text: str, start: int) -> int:
    """Return how many leading characters `given` and `text[start:]` have in common."""
    pairs = zip(given, text[start : start + len(given)], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
