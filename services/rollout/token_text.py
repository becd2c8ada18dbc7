"""The number of characters that each token gave to a response's text, for pages that show the text token by token.

A character that is spread over several tokens belongs to the last of them, and bytes that are no character to the next
token that ends one. The text may end before its tokens do.

    tokens   "Hi"  0xF0 0x9F 0x98  0x80   "!"   end of sequence      text "Hi😀!"
    lengths    2       0            1      1           0
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from tokenizers.decoders import DecodeStream

BROKEN = "\ufffd"  # bytes that are no character, or not yet, decode to this
MAX_HELD = 256  # tokens without a character of their own, one after the other: each is decoded again with the next one


class PlainStream:
    """A stream like DecodeStream, for a tokenizer that is written in Python."""

    def __init__(self, tokenizer: Any, ids: Sequence[int]) -> None:
        self._shown, self._new = list(ids), list[int]()  # tokens before the next piece, and those of it
        self._text = tokenizer.decode(self._shown, skip_special_tokens=True)

    def step(self, tokenizer: Any, token_id: int) -> str | None:
        """Return the text that is complete with this token, if any is."""
        self._new.append(token_id)
        text = tokenizer.decode([*self._shown, *self._new], skip_special_tokens=True)
        piece = text[len(self._text) :]
        if not piece or text.endswith(BROKEN):
            return None
        self._shown, self._new = self._new, []
        self._text = tokenizer.decode(self._shown, skip_special_tokens=True)
        return str(piece)


class TokenText:
    """The texts of tokens, by a tokenizer of transformers; like the tokenizer, for one thread at a time."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self._is_fast = self._tokenizer is not tokenizer
        self._before = list(tokenizer("a", add_special_tokens=False)["input_ids"])

    def lengths(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Return [T]: characters (Unicode code points) by token, len(text) together; empty where they are unknown."""
        try:  # some decoders, and not all engines, omit a space where a text begins
            return self._fit(token_ids, text, after=self._before) or self._fit(token_ids, text, after=[])
        except Exception:  # noqa: BLE001  the stream raises Exception itself where a token changes the text before it
            return []

    def _fit(self, token_ids: Sequence[int], text: str, after: list[int]) -> list[int]:
        stream: DecodeStream | PlainStream
        if self._is_fast:
            stream = DecodeStream(ids=after, skip_special_tokens=True)
        else:
            stream = PlainStream(self._tokenizer, after)
        ends, num_held = [0], 0  # positions in the text
        for token_id in token_ids:
            piece = stream.step(self._tokenizer, token_id) or ""
            part = text[ends[-1] : ends[-1] + len(piece)]  # shorter than the piece where the text is cut off
            num_held = 0 if piece else num_held + 1
            if not piece.startswith(part) or num_held > MAX_HELD:
                return []
            ends.append(ends[-1] + len(part))
        if held := text[ends[-1] :]:  # it ends within a character
            given = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
            if not num_held or not given.rstrip(BROKEN).endswith(held.rstrip(BROKEN)):
                return []
            ends[-num_held:] = [len(text)] * num_held
        return [end - start for start, end in pairwise(ends)]
