"""`Client`: a broker, for code without an event loop. Notebooks, where one runs, may use it too: it has a thread."""

import asyncio
import concurrent.futures
import functools
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from onbeat.client.asynchronous import AsyncClient
from onbeat.client.jobs import AsyncJobs, Update
from onbeat.types import Diagnosis, PoolStatus, Records, WorkerRecord

P = ParamSpec("P")
R = TypeVar("R")


class LoopThread:
    """One event loop in a background thread; `run` blocks the caller until a coroutine is done there."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="onbeat-client", daemon=True)
        self._thread.start()
        self._lock = threading.Lock()  # no coroutine comes to the loop after the last one
        self.is_closed = False

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Raises RuntimeError when the thread is closed, also while this waits."""
        with self._lock:
            if self.is_closed:
                coroutine.close()
                raise RuntimeError("this client is closed; make a new one")
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError as error:
            raise RuntimeError("this client was closed by another thread before the answer came") from error
        except KeyboardInterrupt:
            future.cancel()
            raise

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Cancel all that runs, so that nobody waits for ever, and run `last`. Safe to repeat."""
        with self._lock:
            if self.is_closed:
                last.close()
                return
            self.is_closed = True
            ending = asyncio.run_coroutine_threadsafe(cancel_others_and(last), self._loop)
        try:
            ending.result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def cancel_others_and(last: Coroutine[Any, Any, None]) -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await last


def jobs_face(
    method: Callable[Concatenate[AsyncJobs, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate["Jobs", P], R]:
    """The blocking twin of an AsyncJobs method, with its signature and docstring."""

    @functools.wraps(method)
    def call(self: "Jobs", *args: P.args, **kwargs: P.kwargs) -> R:
        return self._thread.run(method(self._jobs, *args, **kwargs))

    return call


async def next_of(updates: AsyncGenerator[Update]) -> Update | None:
    """None at the end."""
    return await anext(updates, None)


class Jobs:
    """AsyncJobs, blocking."""

    def __init__(self, jobs: AsyncJobs, thread: LoopThread) -> None:
        self._jobs, self._thread = jobs, thread

    create = jobs_face(AsyncJobs.create)
    list = jobs_face(AsyncJobs.list)
    get = jobs_face(AsyncJobs.get)
    cancel = jobs_face(AsyncJobs.cancel)
    pause = jobs_face(AsyncJobs.pause)
    resume = jobs_face(AsyncJobs.resume)
    delete = jobs_face(AsyncJobs.delete)
    iterations = jobs_face(AsyncJobs.iterations)
    evaluations = jobs_face(AsyncJobs.evaluations)
    evaluation_samples = jobs_face(AsyncJobs.evaluation_samples)
    weights = jobs_face(AsyncJobs.weights)
    audit = jobs_face(AsyncJobs.audit)
    explain = jobs_face(AsyncJobs.explain)
    metrics = jobs_face(AsyncJobs.metrics)
    samples = jobs_face(AsyncJobs.samples)
    group = jobs_face(AsyncJobs.group)
    alike = jobs_face(AsyncJobs.alike)
    events = jobs_face(AsyncJobs.events)
    timeline = jobs_face(AsyncJobs.timeline)
    wait = jobs_face(AsyncJobs.wait)

    def stream(self, job_id: str, after: str = "0") -> Iterator[Update]:
        """AsyncJobs.stream, blocking: a loop over it ends with the job."""
        updates = self._jobs.stream(job_id, after)
        try:
            while (update := self._thread.run(next_of(updates))) is not None:
                yield update
        except GeneratorExit:  # the caller has left its loop, and may have closed the client
            if not self._thread.is_closed:
                self._thread.run(updates.aclose())
            raise


class Client:
    """A blocking REST client; use it as `with Client(url) as client`, or close it."""

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 15.0,
        ca_file: str | Path | None = None,
    ) -> None:
        self._client = AsyncClient(base_url, api_key, timeout_s, ca_file)
        self._thread = LoopThread()
        self.jobs = Jobs(self._client.jobs, self._thread)

    @property
    def base_url(self) -> str:
        return self._client.base_url

    def __repr__(self) -> str:
        return f"Client({self.base_url!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """What other threads wait for ends with a RuntimeError. Safe to repeat."""
        self._thread.close(self._client.close())

    def workers(self, pool: str | None = None) -> Records[WorkerRecord]:
        """The rollouts of a pool (default: `default`), as their last heartbeats told."""
        return self._thread.run(self._client.workers(pool))

    def pool(self, pool: str) -> PoolStatus:
        """What a pool has to do, and who is there for it."""
        return self._thread.run(self._client.pool(pool))

    def doctor(self) -> Diagnosis:
        """What is wrong with the installation, and what every active job waits for."""
        return self._thread.run(self._client.doctor())
