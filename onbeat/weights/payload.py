"""A payload: one shard of a version, in full or as the delta from a base, as a plan and its bytes.

A payload grows while it is received, and a peer that reads it waits for the bytes that it needs next: so a relay passes
on a payload that it has received only in part. All of this happens on one event loop.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from blake3 import blake3

from onbeat.errors import WeightsError


@dataclass(frozen=True)
class PayloadKey:
    """The name of one payload. `base_version` None: in full."""

    policy_version: int
    base_version: int | None = None
    shard: int = 0

    def __str__(self) -> str:
        way = "in full" if self.base_version is None else f"from {self.base_version}"
        return f"version {self.policy_version} {way}" + (f", shard {self.shard}" if self.shard else "")


@dataclass(frozen=True)
class PlanEntry:
    tensor_index: int  # in the manifest
    encoding: int  # delta.Encoding
    size_bytes: int  # encoded


@dataclass(frozen=True)
class Plan:
    """The division of the payload's bytes into encoded tensors, back to back."""

    entries: tuple[PlanEntry, ...]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The offset of each entry, and at last the payload's size."""
        return tuple(accumulate((entry.size_bytes for entry in self.entries), initial=0))

    @property
    def size_bytes(self) -> int:
        return self.starts[-1]

    def digest(self, key: PayloadKey) -> bytes:
        whole = blake3(repr(key).encode())
        for entry in self.entries:
            whole.update(repr((entry.tensor_index, int(entry.encoding), entry.size_bytes)).encode())
        return whole.digest()


class PayloadGivenUp(WeightsError):
    """The owner of the payload moves on to another version."""


class Payload:
    """A payload on this host. `segments` together have the plan's size; their first `available` bytes are valid."""

    def __init__(
        self, key: PayloadKey, plan: Plan, segments: Sequence[memoryview], available: int | None = None
    ) -> None:
        self.key, self.plan = key, plan
        self._segments = segments
        self._starts = tuple(accumulate((len(segment) for segment in segments), initial=0))
        assert self._starts[-1] == plan.size_bytes, "segments and plan disagree"
        self.available = plan.size_bytes if available is None else available
        self._reason = ""  # the reason why it was given up; '' if it was not
        self._grown = asyncio.Event()

    @property
    def is_complete(self) -> bool:
        return self.available == self.plan.size_bytes

    def slices(self, start: int, end: int) -> list[memoryview]:
        """Return the bytes `start:end`, one slice per segment that they lie in."""
        found = []
        index = max(0, bisect_right(self._starts, start) - 1)
        while start < end:
            segment, offset = self._segments[index], start - self._starts[index]
            piece = segment[offset : offset + end - start]
            if len(piece):
                found.append(piece)
            start += len(piece)
            index += 1
        return found

    def advance(self, available: int) -> None:
        """Make the first `available` bytes valid and wake the readers."""
        self.available = available
        self._wake()

    def give_up(self, reason: str) -> None:
        """End the payload: its readers get PayloadGivenUp."""
        self._reason = reason
        self._wake()

    def check(self) -> None:
        if self._reason:
            raise PayloadGivenUp(f"{self.key} is given up: {self._reason}")

    async def wait_for(self, size_bytes: int, timeout_s: float) -> bool:
        """Return whether `size_bytes` bytes arrive in time. Raise PayloadGivenUp."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            self.check()
            if self.available >= size_bytes:
                return True
            grown = self._grown
            try:
                async with asyncio.timeout_at(deadline):
                    await grown.wait()
            except TimeoutError:
                return False

    def _wake(self) -> None:
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()
