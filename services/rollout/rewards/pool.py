"""A pool of scoring processes, started on first use and kept warm. A reward that hangs or crashes takes only its own
process with it.
"""

import asyncio
from collections.abc import Sequence

from onbeat.rewards import MAX_REWARDS
from services.rollout.rewards.outcome import RewardRefused, RewardRequest, Score
from services.rollout.rewards.process import Limits, RewardProcess


class RewardPool:
    """A pool of at most `num_processes` at a time; further requests wait their turn. Idle ones are kept for each of the
    limits that a job's rewards have."""

    def __init__(self, num_processes: int) -> None:
        self._turns, self._max_idle = asyncio.Semaphore(num_processes), MAX_REWARDS * num_processes
        self._idle: list[RewardProcess] = []

    async def score(
        self, request: RewardRequest, indexes: Sequence[int], scores: dict[int, Score], deadline: float
    ) -> None:
        """Try once; see RewardSource. The caller enforces the deadline."""
        async with self._turns:
            process = await self._take(Limits(request.timeout_s, request.memory_limit_mb))
            is_reusable = False
            try:
                await process.score(request, indexes, scores)
                is_reusable = True
            except RewardRefused:  # the process is as good as before
                is_reusable = True
                raise
            finally:  # a cancelled request leaves a process half way: that one is killed, too
                if is_reusable and process.is_alive:
                    self._idle.append(process)
                else:
                    await process.kill()

    async def _take(self, limits: Limits) -> RewardProcess:
        for process in [each for each in self._idle if not each.is_alive]:
            self._idle.remove(process)
            await process.kill()
        for process in reversed(self._idle):
            if process.limits == limits:
                self._idle.remove(process)
                return process
        while len(self._idle) >= self._max_idle:
            await self._idle.pop(0).kill()
        return await RewardProcess.start(limits)

    async def close(self) -> None:
        """Kill idle processes; those at work are killed with the tasks that wait for them."""
        while self._idle:
            await self._idle.pop().kill()
