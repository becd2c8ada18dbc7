"""A filter of text that comes in pieces: the text ends before the first stop string, wherever the borders are."""

from collections.abc import Sequence


class StopFilter:
    """A filter that does not depend on the borders: the string that is complete first counts, the longest of several.

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
        matches = [(start + len(stop), start) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if matches:
            self.is_hit = True
            return self._release(min(matches)[1], keep_rest=False)
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
