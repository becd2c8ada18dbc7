"""`Client`: a broker's client for code without an event loop. It has its own thread, so notebooks can use it."""

import functools
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from onbeat.client.asynchronous import AsyncClient
from onbeat.client.datasets import AsyncDatasets
from onbeat.client.jobs import AsyncJobs, Update
from onbeat.client.notebook import html_of_job
from onbeat.contracts.errors import OnbeatError
from onbeat.contracts.records import JobRecord
from onbeat.process.loop_thread import LoopThread

P = ParamSpec("P")
R = TypeVar("R")
Twin = TypeVar("Twin")


class Blocking(Generic[Twin]):
    """The blocking form of an object whose methods are coroutines."""

    def __init__(self, twin: Twin, thread: LoopThread) -> None:
        self._twin, self._thread = twin, thread


def blocking(
    method: Callable[Concatenate[Twin, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Blocking[Twin], P], R]:
    """Return the method's blocking form for `Blocking`, with its signature and docstring."""

    @functools.wraps(method)
    def call(self: Blocking[Twin], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._thread.run(method(self._twin, *args, **kwargs), timeout_s=None)

    return call


async def next_of(updates: AsyncGenerator[Update]) -> Update | None:
    """Return the next update; None at the end."""
    return await anext(updates, None)


def drawn(
    method: Callable[Concatenate[AsyncJobs, P], Coroutine[Any, Any, JobRecord]],
) -> Callable[Concatenate[Blocking[AsyncJobs], P], JobRecord]:
    """Return the method's blocking form, whose jobs a notebook shows with their curves."""
    ask = blocking(method)

    @functools.wraps(method)
    def call(self: Blocking[AsyncJobs], /, *args: P.args, **kwargs: P.kwargs) -> JobRecord:
        return ask(self, *args, **kwargs).drawn_by(functools.partial(draw_job, self))

    return call


def draw_job(jobs: Blocking[AsyncJobs], job: JobRecord) -> str | None:
    """Return the job with its curves of now as HTML; None if the broker does not give them, or the client is closed."""
    try:
        curves = blocking(AsyncJobs.metrics)(jobs, job.id)
    except (OnbeatError, RuntimeError):
        return None
    return html_of_job(job, curves)


class Jobs(Blocking[AsyncJobs]):
    """The blocking form of AsyncJobs."""

    create = drawn(AsyncJobs.create)
    validate = blocking(AsyncJobs.validate)
    check = blocking(AsyncJobs.check)
    fork = drawn(AsyncJobs.fork)
    list = blocking(AsyncJobs.list)
    get = drawn(AsyncJobs.get)
    cancel = drawn(AsyncJobs.cancel)
    pause = drawn(AsyncJobs.pause)
    resume = drawn(AsyncJobs.resume)
    delete = blocking(AsyncJobs.delete)
    iterations = blocking(AsyncJobs.iterations)
    evaluations = blocking(AsyncJobs.evaluations)
    evaluation_samples = blocking(AsyncJobs.evaluation_samples)
    weights = blocking(AsyncJobs.weights)
    audit = blocking(AsyncJobs.audit)
    explain = blocking(AsyncJobs.explain)
    metrics = blocking(AsyncJobs.metrics)
    samples = blocking(AsyncJobs.samples)
    group = blocking(AsyncJobs.group)
    events = blocking(AsyncJobs.events)
    timeline = blocking(AsyncJobs.timeline)
    wait = drawn(AsyncJobs.wait)

    def stream(self, job_id: str, after: str = "0") -> Iterator[Update]:
        """Yield what AsyncJobs.stream yields, blocking: a loop over it ends with the job."""
        updates = self._twin.stream(job_id, after)
        try:
            while (update := self._thread.run(next_of(updates), timeout_s=None)) is not None:
                yield update
        except GeneratorExit:  # the caller has left its loop, and may have closed the client
            if not self._thread.is_closed:
                self._thread.start(updates.aclose())  # waiting would block the loop if the collector runs in its thread
            raise


class Datasets(Blocking[AsyncDatasets]):
    """The blocking form of AsyncDatasets."""

    push = blocking(AsyncDatasets.push)
    list = blocking(AsyncDatasets.list)
    delete = blocking(AsyncDatasets.delete)


class Client(Blocking[AsyncClient]):
    """A blocking REST client; use it as `with Client(url) as client`, or close it."""

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 15.0,
        ca_file: str | Path | None = None,
    ) -> None:
        super().__init__(AsyncClient(base_url, api_key, timeout_s, ca_file), LoopThread("client"))
        self.jobs = Jobs(self._twin.jobs, self._thread)
        self.datasets = Datasets(self._twin.datasets, self._thread)

    @property
    def base_url(self) -> str:
        return self._twin.base_url

    def __repr__(self) -> str:
        return f"Client({self.base_url!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the client: calls that other threads wait for end with a RuntimeError. Safe to repeat."""
        self._thread.close(self._twin.close())

    workers = blocking(AsyncClient.workers)
    pool = blocking(AsyncClient.pool)
    doctor = blocking(AsyncClient.doctor)
