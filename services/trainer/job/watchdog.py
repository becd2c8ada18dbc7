"""A watchdog that ends a trainer whose main thread is stuck, so its lease expires and another trainer continues."""

import faulthandler
import logging
import time

logger = logging.getLogger(__name__)

SHARE_OF_DEADLINE = 0.8  # share of iteration_deadline_s: another trainer should get the job before the broker fails it
WARN_AFTER = 0.9  # share of the limit
ARM_AGAIN_AFTER = 0.05  # share of the limit: arming takes 0.3 ms, and progress may be reported many times per second


def stall_limit_s(stall_s: float, iteration_deadline_s: float) -> float:
    """Return the limit: the setting `stall_s`, or if it is 0, a share of the deadline after which the job fails."""
    return stall_s or SHARE_OF_DEADLINE * iteration_deadline_s


class Watchdog:
    """A timer that runs until `close`. Unless the main thread calls `progress` at least every `limit_s`, the process
    ends with exit code 1 and the stacks of all threads on stderr.
    """

    # faulthandler waits in a C thread, so it also works when the main thread is stuck in native code while it holds
    # the interpreter lock, where no Python thread could act. A process has only one such timer.

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
        """Return a warning shortly before the end, once; otherwise ''. May be called from another thread."""
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
