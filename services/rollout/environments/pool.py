"""A pool of processes that environments run in, started on first use and kept warm."""

import asyncio
from collections.abc import Collection

from onbeat.contracts.states import EpisodeFailureKind
from onbeat.machine.memory import read_memory
from onbeat.process.confine import MEBIBYTE
from services.rollout.environments.process import EnvironmentProcess
from services.rollout.episodes.contract import EpisodeFailure, PlayRequest, PlayResult, Program


class EnvironmentProcesses:
    """An EnvironmentRunner with at most `num_processes`, idle ones included; further requests wait their turn.

    Each process runs one program. An idle one is kept for further groups of its program, and ends where another program
    needs its place or its memory.
    """

    def __init__(self, num_processes: int, programs: Collection[Program]) -> None:
        """Take the limit, and what may be requested."""
        self._num_processes, self._programs = num_processes, programs
        self._turns = asyncio.Semaphore(num_processes)
        self._num_playing = 0
        self._idle: list[EnvironmentProcess] = []  # longest idle ones first

    def num_groups(self) -> int:
        """Return how many groups can be played at a time, whatever their programs: one more process needs free memory
        up to its limit."""
        available_bytes = read_memory().available_bytes
        num_more = min(
            sum(idle.program == program for idle in self._idle) + available_bytes // memory_bytes(program)
            for program in self._programs
        )
        return max(1, min(self._num_processes, self._num_playing + num_more))

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
        """Return a process for this program: an idle one, or a new one, for which idle ones of others make way."""
        while same := [idle for idle in self._idle if idle.program == program]:
            process = same[-1]
            self._idle.remove(process)
            if process.is_reusable:
                return process
            await process.child.kill()
        while self._idle and not self._has_place(program):
            await self._idle.pop(0).child.kill()
        return await EnvironmentProcess.start(program)

    def _has_place(self, program: Program) -> bool:
        """Return whether a new process, which counts as playing, has its place and its memory."""
        num_processes = self._num_playing + len(self._idle)
        return num_processes <= self._num_processes and read_memory().available_bytes >= memory_bytes(program)

    async def close(self) -> None:
        """Kill idle processes; those at work are killed with the tasks that wait for them."""
        while self._idle:
            await self._idle.pop().child.kill()


def memory_bytes(program: Program) -> int:
    return program.memory_limit_mb * MEBIBYTE
