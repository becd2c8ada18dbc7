"""Ends a trainer whose main thread has stopped getting on, so that its lease runs out and another trainer goes on."""

import faulthandler
import logging
import time

logger = logging.getLogger(__name__)

SHARE_OF_DEADLINE = 0.8  # of iteration_deadline_s: another trainer is to have the job before the broker fails it
WARN_AFTER = 0.9  # of the limit
ARM_AGAIN_AFTER = 0.05  # of the limit: it costs 0.3 ms, and there may be many signs of progress in a second


def stall_limit_s(stall_s: float, iteration_deadline_s: float) -> float:
    """`stall_s` is the setting; 0: by the job, which fails after its deadline anyway."""
    return stall_s or SHARE_OF_DEADLINE * iteration_deadline_s


class Watchdog:
    """From here to `close`, the main thread calls `progress` more often than each `limit_s`, or the process ends: with
    exit code 1, and the stacks of all threads on stderr.
    """

    # faulthandler waits in a thread of C: it acts also when the main thread is stuck in native code with the lock of
    # the interpreter in its hands, where no thread of Python could. There is one such timer in a process.

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._has_warned = False
        self._arm(time.monotonic())

    def _arm(self, now: float) -> None:
        self._progressed_at = self._armed_at = now
        faulthandler.dump_traceback_later(self._limit_s, exit=True)

    def progress(self) -> None:
        now = time.monotonic()
        self._progressed_at, self._has_warned = now, False
        if now - self._armed_at > ARM_AGAIN_AFTER * self._limit_s:
            self._arm(now)

    def warning(self, doing: str) -> str:
        """What to tell before the end, once; '' while there is nothing to tell. For another thread."""
        silence_s = time.monotonic() - self._progressed_at
        if self._has_warned or silence_s < WARN_AFTER * self._limit_s:
            return ""
        self._has_warned = True
        return (
            f"no progress for {silence_s:.0f} s while {doing}: this process ends in {self._limit_s - silence_s:.0f} s "
            "(ONBEAT_STALL_S), and another trainer goes on from the checkpoint"
        )

    def close(self) -> None:
        faulthandler.cancel_dump_traceback_later()
