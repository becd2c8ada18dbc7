"""The broker's side of the data process: it starts the process when first needed, and again after it has died."""

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeVar

from onbeat.config import HubData
from onbeat.contracts.errors import OnbeatError
from onbeat.contracts.records import RowCounts
from onbeat.process.children import ChildDied, ChildProcess, name_of_signal
from services.broker.datasets import DatasetError, DatasetSpec, PromptItem, Section, Survey

MAX_ANSWER_BYTES = 1 << 30
GRACE_S = 5.0  # the child ends itself at its limit; after this much longer, the broker kills it
PLACE_S = 30.0  # time for a new job to get a place where others are being checked

T = TypeVar("T")


class TooBusy(OnbeatError):
    """Other jobs are being checked, and have been for too long."""

    def __init__(self) -> None:
        super().__init__(f"the broker has been busy for {PLACE_S:g} s with checks of other jobs; send this one again")


@contextlib.asynccontextmanager
async def hold(place: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
    """Hold a place that others may hold, too. Raises TooBusy when it is not free in time."""
    async with contextlib.AsyncExitStack() as held:
        try:
            async with asyncio.timeout(PLACE_S):
                entered = await held.enter_async_context(place)
        except TimeoutError as error:
            raise TooBusy from error
        yield entered


class DatasetProcess:
    """A client that sends one request at a time; the next ones wait. It never blocks the event loop.

    idle_s: the process ends after so long without a request, and its 100 MB are free; None: it stays.
    """

    def __init__(self, data_dir: Path, timeout_s: float, memory_mb: int, idle_s: float | None = None) -> None:
        self._data_dir, self._timeout_s, self._memory_mb = data_dir, timeout_s, memory_mb
        self._idle_s = idle_s
        self._ending: asyncio.TimerHandle | None = None
        self._lock = asyncio.Lock()
        self._child: ChildProcess | None = None
        self._is_mid_exchange = False  # a cancelled caller left a request without its answer

    async def read(self, spec: DatasetSpec, first: int, count: int) -> tuple[list[PromptItem], str]:
        """Read items `first` to `first + count - 1`, and what the job's events should say about the data ('' for
        nothing). Raises DatasetError, also when a time or memory limit is hit."""
        answer = await self._ask({"spec": spec.model_dump(mode="json"), "first": first, "count": count})
        if "error" in answer:
            raise DatasetError(answer["error"]["field"], answer["error"]["message"])
        return [PromptItem.model_validate(item) for item in answer["items"]], answer["note"]

    async def read_rows(self, spec: DatasetSpec, rows: Sequence[int]) -> list[PromptItem]:
        """Read the prompts of these rows; of generated data, those of these numbers. Raises DatasetError as `read`."""
        answer = await self._ask({"spec": spec.model_dump(mode="json"), "rows": list(rows)})
        if "error" in answer:
            raise DatasetError(answer["error"]["field"], answer["error"]["message"])
        return [PromptItem.model_validate(item) for item in answer["items"]]

    async def rows(self, spec: DatasetSpec) -> Sequence[int]:
        """Return the rows that prompts are drawn from, ascending. Raises DatasetError as `read`."""
        answer = await self._ask({"spec": spec.model_dump(mode="json"), "has_rows": True})
        if "error" in answer:
            raise DatasetError(answer["error"]["field"], answer["error"]["message"])
        rows: Sequence[int] = range(answer["count"]) if "count" in answer else answer["rows"]
        return rows

    async def survey(self, sections: Sequence[Section]) -> Survey:
        """Look at all rows of data sets, training first. Raises DatasetError when a time or memory limit is hit."""
        answer = await self._ask({"sections": [section.model_dump(mode="json") for section in sections]})
        counts = [RowCounts.model_validate(count) for count in answer["counts"]]
        return Survey(counts, [(field, message) for field, message in answer["complaints"]], answer["notes"])

    async def check_pattern(self, pattern: str) -> tuple[str, int]:
        """Return why a regular expression cannot be used ('' if it can), and its groups. Compiling can take minutes."""
        try:
            answer = await self._ask({"pattern": pattern})
        except DatasetError as error:
            return error.message, 0
        return answer["problem"], answer["num_groups"]

    async def tasks(self) -> list[str]:
        """Return the names of the procedural tasks that are installed. Raises DatasetError as `read`."""
        answer = await self._ask({"has_tasks": True})
        return list(answer["tasks"])

    async def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await child.kill()

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        async with self._lock:
            if self._ending is not None:
                self._ending.cancel()
            try:
                return await self._exchange(request | {"timeout_s": self._timeout_s})
            finally:
                if self._idle_s is not None:
                    self._ending = asyncio.get_running_loop().call_later(self._idle_s, self._end_idle)

    def _end_idle(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end_input()

    async def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        child, deadline_s = await self._running_child(), self._timeout_s + GRACE_S
        self._is_mid_exchange = True
        try:
            async with asyncio.timeout(deadline_s):
                await child.send(request, deadline_s)
                answer: dict[str, Any] = json.loads(await child.receive(deadline_s))
        except (TimeoutError, ChildDied) as error:
            await self.close()
            raise DatasetError("data", self._reason(error)) from error
        self._is_mid_exchange = False
        return answer

    async def _running_child(self) -> ChildProcess:
        if self._child is None or not self._child.is_alive or self._is_mid_exchange:
            await self.close()
            self._child = await ChildProcess.start(
                "the process that reads it",
                "services.broker.datasets.child",
                *(str(self._data_dir), str(self._memory_mb)),
                max_answer_bytes=MAX_ANSWER_BYTES,
            )
        return self._child

    def _reason(self, error: TimeoutError | ChildDied) -> str:
        """Return why there was no answer."""
        if isinstance(error, TimeoutError) or error.exit_code == -signal.SIGALRM:
            return f"takes longer than {self._timeout_s:g} s; choose something cheaper or less"
        if error.exit_code < 0:
            remedy = "if it was for want of memory, choose something smaller"
            return f"cannot be read: {name_of_signal(-error.exit_code)} ended the process that reads it; {remedy}"
        if "MemoryError" in error.last_words:
            remedy = "write fewer or smaller columns, and shorter rows, or raise ONBEAT_DATASET_MEMORY_MB of the broker"
            return f"needs more than {self._memory_mb} MB; {remedy}"
        return f"cannot be read: {error.last_words or error}; correct the options or the file"


class DatasetPool:
    """A few data processes, so that one slow file does not hold up all others. Splits of a hub are opened one at a
    time: two downloads would remove each other's files."""

    def __init__(self, processes: Sequence[DatasetProcess]) -> None:
        self._processes, self._hub = processes, asyncio.Lock()
        self._free: asyncio.LifoQueue[DatasetProcess] = asyncio.LifoQueue()  # the one that was just used comes first
        for process in processes:
            self._free.put_nowait(process)

    async def read(self, spec: DatasetSpec, first: int, count: int) -> tuple[list[PromptItem], str]:
        """Read as `DatasetProcess.read`, once a process is free. Raises TooBusy, too."""
        hub = self._hub if isinstance(spec.data, HubData) else contextlib.nullcontext()
        async with hold(hub), hold(self._free_process()) as process:
            return await process.read(spec, first, count)

    async def read_rows(self, spec: DatasetSpec, rows: Sequence[int]) -> list[PromptItem]:
        """Read as `DatasetProcess.read_rows`, once a process is free. Raises TooBusy, too."""
        hub = self._hub if isinstance(spec.data, HubData) else contextlib.nullcontext()
        async with hold(hub), hold(self._free_process()) as process:
            return await process.read_rows(spec, rows)

    async def survey(self, sections: Sequence[Section]) -> Survey:
        """Look at rows as `DatasetProcess.survey`, once a process is free. Raises TooBusy, too."""
        is_hub = any(isinstance(section.spec.data, HubData) for section in sections)
        async with hold(self._hub if is_hub else contextlib.nullcontext()), hold(self._free_process()) as process:
            return await process.survey(sections)

    async def tasks(self) -> list[str]:
        """Return names as `DatasetProcess.tasks`, once a process is free. Raises TooBusy, too."""
        async with hold(self._free_process()) as process:
            return await process.tasks()

    @contextlib.asynccontextmanager
    async def _free_process(self) -> AsyncIterator[DatasetProcess]:
        process = await self._free.get()
        try:
            yield process
        finally:
            self._free.put_nowait(process)

    async def close(self) -> None:
        for process in self._processes:
            await process.close()
