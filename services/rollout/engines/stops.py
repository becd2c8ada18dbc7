"""The end of a response: stop strings and stop tokens, the same ones by every engine.

stop = ["\\n\\nQ:"]      tokens   "4"   ".\\n"   "\\nQ"   ": 5"   ...
                       response |---------------------|         all of the token that completes the stop, trained
                       text     "4."                            before the stop
"""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from onbeat.engines import FinishReason, GeneratedResponse, Sampling, VersionSpan

UNFINISHED = "\ufffd"  # bytes that are no character yet decode to this


def first_stop(text: str, stops: Sequence[str], num_searched: int = 0) -> int | None:
    """Return where the stop begins that is complete first, the longest of several; None without one. None is complete
    in the first `num_searched` characters.

    >>> first_stop("one END two", ["END", "ND"]), first_stop("one", ["END"])
    (4, None)
    """
    starts = ((stop, text.find(stop, max(0, num_searched + 1 - len(stop)))) for stop in stops)
    matches = [(start + len(stop), start) for stop, start in starts if start >= 0]
    return min(matches)[1] if matches else None


class StopFilter:
    """A filter of text that comes in pieces. It does not depend on the borders of the pieces.

    >>> text = StopFilter(["END"])
    >>> [text.push("one E"), text.push("N"), text.push("D two"), text.rest()]
    ['one ', '', '', '']
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Filter by `stops`, none of them empty."""
        self._stops = stops
        self._held = ""  # may be the beginning of a stop
        self.is_hit = False

    def push(self, text: str) -> str:
        """Add text, and return what is safe to show now."""
        if self.is_hit:
            return ""
        self._held += text
        if (start := first_stop(self._held, self._stops)) is not None:
            self.is_hit = True
            return self._release(start, keep_rest=False)
        return self._release(len(self._held) - self._num_suspicious())

    def rest(self) -> str:
        """Return what was held back, once the text has ended."""
        return self._release(len(self._held))

    def _num_suspicious(self) -> int:
        """Return the length of the longest end of the text that begins a stop."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0

    def _release(self, num_chars: int, *, keep_rest: bool = True) -> str:
        shown, held = self._held[:num_chars], self._held[num_chars:]
        self._held = held if keep_rest else ""
        return shown


class Ending:
    """A response that is watched token by token until it ends. `decode` gives the text of tokens without the special
    ones; `end_ids` are the model's own stop tokens."""

    def __init__(
        self, decode: Callable[[list[int]], str], sampling: Sampling, end_ids: Collection[int] = frozenset()
    ) -> None:
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._decode, self._sampling = decode, sampling
        self._end_ids = {*end_ids, *sampling.stop_token_ids}
        self._text: str | None = None  # None: not decoded yet

    @property
    def text(self) -> str:
        """The text before the stop."""
        return self._decode(self.token_ids) if self._text is None else self._text

    def push(self, token_id: int) -> bool:
        """Add a token to a response that has not ended. Return whether it ends here."""
        self.token_ids.append(token_id)
        if token_id in self._end_ids:
            self._text, self.finish_reason = self._decode(self.token_ids[:-1]), "stop"
        elif self._sampling.stop:
            self._look_for_stop()
        if self.finish_reason is None and len(self.token_ids) == self._sampling.max_response_tokens:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def _look_for_stop(self) -> None:
        num_searched = len((self._text or "").rstrip(UNFINISHED))
        self._text = self._decode(self.token_ids)
        start = first_stop(self._text, self._sampling.stop, num_searched)
        if start is not None and len(self.token_ids) > self._sampling.min_tokens:
            self._text, self.finish_reason = self._text[:start], "stop"


def cut_at_stop(
    response: GeneratedResponse, decode: Callable[[list[int]], str], sampling: Sampling
) -> GeneratedResponse:
    """Return the response of an engine that knows no stops as far as its first one."""
    ending = Ending(decode, sampling)
    if not any(ending.push(token_id) for token_id in response.token_ids) or ending.finish_reason != "stop":
        return response
    num_tokens = len(ending.token_ids)
    return replace(
        response,
        token_ids=ending.token_ids,
        rollout_logprobs=response.rollout_logprobs[:num_tokens],
        finish_reason="stop",
        version_spans=[
            VersionSpan(span.policy_version, span.start, min(span.end, num_tokens))
            for span in response.version_spans
            if span.start < num_tokens
        ],
        text=ending.text,
    )


def read_end_ids(model_dir: Path) -> set[int]:
    """Return the end-of-sequence tokens that the files of a model name: one or several, perhaps not the same ones."""
    return {
        token_id
        for name in ("config.json", "generation_config.json")
        if (file := model_dir / name).exists()
        for token_id in end_ids_in(json.loads(file.read_text("utf-8")))
    }


def end_ids_in(config: dict[str, object]) -> list[int]:
    """Return the tokens that end a sequence by a configuration, or by that of its text part.

    >>> end_ids_in({"eos_token_id": [1, 5]}), end_ids_in({"text_config": {"eos_token_id": 2}}), end_ids_in({})
    ([1, 5], [2], [])
    """
    text_config = config.get("text_config")
    named = config.get("eos_token_id")
    if named is None and isinstance(text_config, dict):
        named = text_config.get("eos_token_id")
    return [token_id for token_id in (named if isinstance(named, list) else [named]) if isinstance(token_id, int)]
