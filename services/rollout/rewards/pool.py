"""Scoring processes, started on first use and kept warm. A reward may hang or crash: only its process dies."""

import asyncio
import logging
from collections import Counter

from services.rollout.rewards.process import HARMLESS, RewardError, RewardProcess, RewardRequest, Score

logger = logging.getLogger(__name__)


class RewardPool:
    """At most `num_processes` at a time; further requests wait their turn."""

    def __init__(self, num_processes: int) -> None:
        self._turns = asyncio.Semaphore(num_processes)
        self._idle: list[RewardProcess] = []

    async def score(self, request: RewardRequest) -> list[Score]:
        """One score per response, in order. Raises RewardError once a response has failed `max_attempts` times."""
        scores: dict[int, Score] = {}
        num_failures: Counter[int] = Counter()
        async with self._turns:
            while missing := [index for index in range(len(request.responses)) if index not in scores]:
                try:
                    await self._score_once(request, missing, scores)
                except RewardError as error:
                    logger.warning("reward %s: %s", request.name, error)
                    num_failures[error.index] += 1
                    if num_failures[error.index] >= request.max_attempts:
                        raise
        return [scores[index] for index in range(len(request.responses))]

    async def _score_once(self, request: RewardRequest, indexes: list[int], scores: dict[int, Score]) -> None:
        process = await self._take(request.memory_limit_mb)
        is_reusable = False
        try:
            await process.score(request, indexes, scores)
            is_reusable = True
        except RewardError as error:
            is_reusable = error.kind in HARMLESS
            raise
        finally:  # a cancelled request leaves a process in mid-sentence: that one goes, too
            if is_reusable and process.is_alive:
                self._idle.append(process)
            else:
                await process.kill()

    async def _take(self, memory_limit_mb: int) -> RewardProcess:
        while self._idle:
            process = self._idle.pop()
            if process.is_alive and process.memory_limit_mb == memory_limit_mb:
                return process
            await process.kill()
        return await RewardProcess.start(memory_limit_mb)

    async def close(self) -> None:
        """Kill the idle ones; those at work are killed with the tasks that wait for them."""
        while self._idle:
            await self._idle.pop().kill()
