"""Scoring processes, started on first use and kept warm. A reward may hang or crash: only its process dies."""

import asyncio
from collections.abc import Sequence

from services.rollout.rewards.limits import Limits
from services.rollout.rewards.outcome import RewardRefused, RewardRequest, Score
from services.rollout.rewards.process import RewardProcess


class RewardPool:
    """At most `num_processes` at a time; further requests wait their turn."""

    def __init__(self, num_processes: int) -> None:
        self._turns = asyncio.Semaphore(num_processes)
        self._idle: list[RewardProcess] = []

    async def score(
        self, request: RewardRequest, indexes: Sequence[int], scores: dict[int, Score], deadline: float
    ) -> None:
        """See RewardSource. May leave out the last responses, when a process has reached the end of its life. Leaves
        the deadline to the caller."""
        async with self._turns:
            process = await self._take(Limits(request.timeout_s, request.memory_limit_mb))
            is_reusable = False
            try:
                await process.score(request, indexes, scores)
                is_reusable = True
            except RewardRefused:  # the process is as good as before
                is_reusable = True
                raise
            finally:  # a cancelled request leaves a process in mid-sentence: that one goes, too
                if is_reusable and process.is_alive:
                    self._idle.append(process)
                else:
                    await process.kill()

    async def _take(self, limits: Limits) -> RewardProcess:
        while self._idle:
            process = self._idle.pop()
            if process.is_alive and process.limits == limits:
                return process
            await process.kill()
        return await RewardProcess.start(limits)

    async def close(self) -> None:
        """Kill the idle ones; those at work are killed with the tasks that wait for them."""
        while self._idle:
            await self._idle.pop().kill()
