"""A circuit breaker: whoever fails again and again is left alone for a while, and then asked by one call first.

CLOSED --max_failures in a row--> OPEN --pause_s--> PROBING --success--> CLOSED
                                   ^-------------------- failure -------'
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum

from services.rollout.rewards.outcome import CircuitOpen, RewardRefused, RewardUnavailable

PROBE_POLL_S = 1.0  # when to come back while another call probes


class Circuit(IntEnum):
    """The numbers are the metric's."""

    CLOSED = 0
    OPEN = 1
    PROBING = 2


class CircuitBreaker:
    def __init__(
        self,
        name: str,
        on_change: Callable[[Circuit], None],
        max_failures: int = 5,
        pause_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = Circuit.CLOSED
        self._name, self._on_change, self._clock = name, on_change, clock
        self._max_failures, self._pause_s = max_failures, pause_s
        self._num_failures = 0  # in a row
        self._last_failure = ""
        self._probe_at = 0.0

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around one call. RewardUnavailable is a failure; an answer is none, even a refusal. Raises CircuitOpen
        instead of calling."""
        is_probe = self._admit()
        try:
            yield
        except RewardUnavailable as error:
            self._num_failures, self._last_failure = self._num_failures + 1, str(error)
            if is_probe or (self.state is Circuit.CLOSED and self._num_failures >= self._max_failures):
                self._open(self._pause_s)
            raise
        except RewardRefused:
            self._close()
            raise
        except BaseException:  # cancelled: nothing is learned, the next call may probe
            if is_probe:
                self._open(0.0)
            raise
        self._close()

    def _admit(self) -> bool:
        """Whether this call is the probe."""
        if self.state is Circuit.CLOSED:
            return False
        left_s = self._probe_at - self._clock()
        if self.state is Circuit.OPEN and left_s <= 0:
            self._move(Circuit.PROBING)
            return True
        message = (
            f"{self._name} is left alone after {self._num_failures} failures in a row, the last: {self._last_failure}"
        )
        retry_after_s = left_s if self.state is Circuit.OPEN else PROBE_POLL_S
        raise CircuitOpen("circuit_open", message, retry_after_s=retry_after_s)

    def _open(self, pause_s: float) -> None:
        self._probe_at = self._clock() + pause_s
        self._move(Circuit.OPEN)

    def _close(self) -> None:
        self._num_failures = 0
        self._move(Circuit.CLOSED)

    def _move(self, state: Circuit) -> None:
        if state is not self.state:
            self.state = state
            self._on_change(state)
