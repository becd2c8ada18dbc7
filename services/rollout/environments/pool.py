"""A pool of processes that environments run in, started on first use and kept warm."""

import asyncio

from onbeat.contracts.states import EpisodeFailureKind
from onbeat.machine.memory import read_memory
from onbeat.process.confine import MEBIBYTE
from services.rollout.environments.process import EnvironmentProcess
from services.rollout.episodes.contract import EpisodeFailure, PlayRequest, PlayResult, Program


class EnvironmentProcesses:
    """An EnvironmentRunner with at most `num_processes` at a time; further requests wait their turn."""

    def __init__(self, num_processes: int, memory_limit_mb: int) -> None:
        """Take the limits; `memory_limit_mb`: what one process may use."""
        self._num_processes, self._memory_bytes = num_processes, memory_limit_mb * MEBIBYTE
        self._turns = asyncio.Semaphore(num_processes)
        self._num_playing = 0
        self._idle: list[EnvironmentProcess] = []

    def num_groups(self) -> int:
        """Return how many groups can be played at a time: one more process needs free memory up to its limit."""
        num_started = self._num_playing + len(self._idle)
        num_more = read_memory().available_bytes // self._memory_bytes
        return max(1, min(self._num_processes, num_started + num_more))

    async def play(self, request: PlayRequest) -> list[PlayResult]:
        """Play all episodes side by side in one process; see EnvironmentRunner."""
        async with self._turns:
            self._num_playing += 1
            try:
                return await self._play(request)
            finally:
                self._num_playing -= 1

    async def _play(self, request: PlayRequest) -> list[PlayResult]:
        try:
            process = await self._take(request.program)
        except OSError as error:
            failure = EpisodeFailure(EpisodeFailureKind.CRASHED, f"no process could be started: {error}")
            return [failure] * len(request.access)
        try:
            return await process.play(request)
        finally:
            if process.is_reusable:
                self._idle.append(process)
            else:
                await process.child.kill()

    async def _take(self, program: Program) -> EnvironmentProcess:
        """Return a process for this program; idle ones of others make way for it."""
        while self._idle:
            process = self._idle.pop()
            if process.is_reusable and process.program == program:
                return process
            await process.child.kill()
        return await EnvironmentProcess.start(program)

    async def close(self) -> None:
        """Kill idle processes; those at work are killed with the tasks that wait for them."""
        while self._idle:
            await self._idle.pop().child.kill()
