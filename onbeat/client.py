"""The Python client: `AsyncClient` speaks to a broker over REST; `Client` is the same for code without an event loop.

with Client() as client:
    job = client.jobs.create(JobConfig.from_file(Path("examples/quickstart.toml")))
    print(client.jobs.wait(job.id).state)
"""

import asyncio
import functools
import json
import logging
import ssl
import threading
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import httpx

from onbeat.config import JobConfig
from onbeat.errors import ApiError, OnbeatError
from onbeat.types import (
    AuditReport,
    Diagnosis,
    EvaluationRecord,
    Event,
    GroupDetail,
    GroupSummary,
    IterationRecord,
    IterationUpdate,
    JobRecord,
    JobState,
    PoolStatus,
    Record,
    Sample,
    Timeline,
    WeightsRecord,
    WorkerRecord,
)

logger = logging.getLogger(__name__)

DEFAULT_URL = "http://127.0.0.1:8800"
RETRY_DELAYS_S = (0.2, 0.5, 1.0)  # before the second, third and fourth try
STREAM_DELAYS_S = (0.5, 1.0, 2.0, 5.0, 5.0, 10.0)  # before a stream is taken up again
STREAM_SILENCE_S = 45.0  # a broker sends a heartbeat each 15 s
BUSY_STATUSES = frozenset({429, 502, 503, 504})

P = ParamSpec("P")
R = TypeVar("R")
RecordT = TypeVar("RecordT", bound=Record)
# Named here because `list` is a method inside AsyncJobs and Jobs.
JobRecords = list[JobRecord]
Iterations = list[IterationRecord]
Evaluations = list[EvaluationRecord]
Weights = list[WeightsRecord]
Samples = list[Sample]
Groups = list[GroupSummary]
Events = list[Event]
Series = dict[str, list[tuple[int, float]]]
Update = JobRecord | IterationUpdate | Event | Diagnosis  # what a stream tells of a job
UPDATES: dict[str, type[Update]] = {
    "job": JobRecord,
    "iteration": IterationUpdate,
    "event": Event,
    "explain": Diagnosis,
}


@dataclass(frozen=True)
class Message:
    """One server-sent event."""

    kind: str
    data: str
    id: str  # '' where it has none


class BrokerUnreachable(OnbeatError):
    """No answer from the broker, after retries."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(
            f"no answer from a broker at {url} ({reason}); start a local stack with `onbeat up`, "
            "or name another broker with --url or ONBEAT_URL"
        )
        self.url = url


class AsyncJobs:
    """Everything under /v1/jobs. Methods raise ApiError for refusals and BrokerUnreachable without an answer."""

    def __init__(self, client: "AsyncClient") -> None:
        self._client = client

    async def create(self, config: JobConfig | dict[str, Any], idempotency_key: str | None = None) -> JobRecord:
        """Submit a job. Safe to repeat: the same key gives the same job, and every call has a key."""
        body = config.model_dump(mode="json") if isinstance(config, JobConfig) else config
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        answer = await self._client.request("POST", "/v1/jobs", json=body, headers=headers, is_repeatable=True)
        return JobRecord.model_validate(answer)

    async def list(self, state: JobState | str | None = None) -> JobRecords:
        """Newest first."""
        return parse_list(JobRecord, "jobs", await self._client.get("/v1/jobs", state=state))

    async def get(self, job_id: str) -> JobRecord:
        return JobRecord.model_validate(await self._client.get(job_path(job_id)))

    async def cancel(self, job_id: str) -> JobRecord:
        return await self._move(job_id, "cancel")

    async def pause(self, job_id: str) -> JobRecord:
        return await self._move(job_id, "pause")

    async def resume(self, job_id: str) -> JobRecord:
        return await self._move(job_id, "resume")

    async def delete(self, job_id: str) -> None:
        """Remove a job that is over, and all of it but its checkpoints. Safe to repeat."""
        await self._client.request("DELETE", job_path(job_id), is_repeatable=True)

    async def _move(self, job_id: str, verb: str) -> JobRecord:
        return JobRecord.model_validate(await self._client.request("POST", f"{job_path(job_id)}:{verb}"))

    async def iterations(self, job_id: str, after: int = -1) -> Iterations:
        """Iterations with a number above `after`, in order."""
        answer = await self._client.get(f"{job_path(job_id)}/iterations", after=after)
        return parse_list(IterationRecord, "iterations", answer)

    async def evaluations(self, job_id: str, after: int = -1) -> Evaluations:
        """Evaluations with a number above `after`, in order."""
        answer = await self._client.get(f"{job_path(job_id)}/evaluations", after=after)
        return parse_list(EvaluationRecord, "evaluations", answer)

    async def evaluation_samples(self, job_id: str, evaluation: int) -> Samples:
        """A few responses of an evaluation that is done."""
        answer = await self._client.get(f"{job_path(job_id)}/evaluations/{evaluation}/samples")
        return parse_list(Sample, "samples", answer)

    async def weights(self, job_id: str, after: int = -1) -> Weights:
        """How policy versions above `after` came to the rollouts, in order."""
        answer = await self._client.get(f"{job_path(job_id)}/weights", after=after)
        return parse_list(WeightsRecord, "weights", answer)

    async def audit(self, job_id: str, head: str = "") -> AuditReport:
        """Re-check the job's audit log, its ledger and all groups that are kept. `head`: of an earlier report."""
        return AuditReport.model_validate(await self._client.get(f"{job_path(job_id)}/audit", head=head))

    async def explain(self, job_id: str) -> Diagnosis:
        """Why the job is where it is: who waits for whom, since when, and what happens next."""
        return Diagnosis.model_validate(await self._client.get(f"{job_path(job_id)}:explain"))

    async def metrics(self, job_id: str, after: int = -1) -> Series:
        """`area/name` -> [(iteration, value), ...]; `eval/name` by the number of the evaluation. Above `after`."""
        answer = await self._client.get(f"{job_path(job_id)}/metrics", after=after)
        return {name: [(int(i), float(value)) for i, value in points] for name, points in answer["metrics"].items()}

    async def samples(
        self,
        job_id: str,
        iteration: int | None = None,
        limit: int | None = None,
        offset: int | None = None,
        min_reward: float | None = None,
        max_reward: float | None = None,
    ) -> Samples:
        """Responses of an iteration (default: the newest that has any), after the first `offset` ones; with rewards
        from `min_reward` to `max_reward`."""
        page = {"iteration": iteration, "limit": limit, "offset": offset}
        answer = await self._client.get(
            f"{job_path(job_id)}/samples", **page, min_reward=min_reward, max_reward=max_reward
        )
        return parse_list(Sample, "samples", answer)

    async def group(self, job_id: str, group_id: str) -> GroupDetail:
        """A prompt with all its responses, token by token."""
        return GroupDetail.model_validate(await self._client.get(group_path(job_id, group_id)))

    async def alike(self, job_id: str, group_id: str) -> Groups:
        """The groups of all iterations that have this one's prompt, itself included, in order."""
        return parse_list(GroupSummary, "groups", await self._client.get(f"{group_path(job_id, group_id)}/alike"))

    async def events(self, job_id: str, after: str = "0", wait_s: float = 0) -> Events:
        """Events after the cursor (the last event's id), waiting up to `wait_s` (at most 30) for the first one."""
        answer = await self._client.get(f"{job_path(job_id)}/events", after=after, wait_s=wait_s)
        return parse_list(Event, "events", answer)

    async def timeline(self, job_id: str, iterations: int = 5) -> Timeline:
        """What the trainer and each rollout did during the last iterations (20 at most)."""
        answer = await self._client.get(f"{job_path(job_id)}/timeline", iterations=iterations)
        return Timeline.model_validate(answer)

    async def stream(self, job_id: str, after: str = "0") -> AsyncGenerator[Update]:
        """The job as it runs: what is so, the events after `after`, then whatever changes, until the job is over.

        Events come once each, in order; states come whole, and one that has not changed may come again. A lost
        connection is taken up again where it broke off; raises BrokerUnreachable when that fails for a while.
        """
        num_failures = 0
        while True:
            try:
                async for message in self._client.messages(f"{job_path(job_id)}/stream", after):
                    num_failures = 0
                    if message.kind == "end" and json.loads(message.data)["reason"] == "over":
                        return
                    after = message.id or after
                    if message.kind in UPDATES:
                        yield UPDATES[message.kind].model_validate_json(message.data)
                await asyncio.sleep(RETRY_DELAYS_S[0])
            except BrokerUnreachable:
                if num_failures == len(STREAM_DELAYS_S):
                    raise
                await asyncio.sleep(STREAM_DELAYS_S[num_failures])
                num_failures += 1

    async def wait(self, job_id: str, timeout_s: float | None = None) -> JobRecord:
        """Wait until the job is final. Raises TimeoutError after `timeout_s`."""
        deadline = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
        cursor = "0"
        while not (job := await self.get(job_id)).state.is_final:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"job {job_id} is still {job.state} after {timeout_s} s")
            events = await self.events(job_id, after=cursor, wait_s=min(20.0, left_s))
            cursor = events[-1].id if events else cursor
        return job


class AsyncClient:
    """An async REST client; use it as `async with AsyncClient(url) as client`."""

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        api_key: str | None = None,
        timeout_s: float = 15.0,
        ca_file: str | Path | None = None,  # PEM authority of the broker's certificate; default: those of the system
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.timeout_s = timeout_s
        self.jobs = AsyncJobs(self)
        is_here = host_of(self.base_url) in ("127.0.0.1", "localhost", "::1")
        if api_key and not is_here and self.base_url.startswith("http:"):
            logger.warning("the API key travels in the clear to %s; give the broker TLS and use https", self.base_url)
        self._http = httpx.AsyncClient(
            base_url=self.base_url,
            headers={"Authorization": f"Bearer {checked_key(api_key)}"} if api_key else {},
            timeout=timeout_s,
            trust_env=not is_here,  # no proxy between us and this machine
            verify=trust_in(ca_file) if ca_file else True,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def workers(self, pool: str | None = None) -> list[WorkerRecord]:
        return parse_list(WorkerRecord, "workers", await self.get("/v1/workers", pool=pool))

    async def pool(self, pool: str) -> PoolStatus:
        """What a pool has to do, and who is there for it."""
        return PoolStatus.model_validate(await self.get(pool_path(pool)))

    async def doctor(self) -> Diagnosis:
        """What is wrong with the installation, and what every active job waits for."""
        return Diagnosis.model_validate(await self.get("/v1/doctor"))

    async def get(self, path: str, **params: Any) -> Any:
        given = {name: value for name, value in params.items() if value is not None}
        timeout_s = self.timeout_s + float(params.get("wait_s", 0))
        return await self.request("GET", path, params=given, timeout=timeout_s, is_repeatable=True)

    async def messages(self, path: str, after: str) -> AsyncGenerator[Message]:
        """Server-sent events after the one with this id, until the broker ends them.

        Raises ApiError for refusals, BrokerUnreachable without an answer or when the connection breaks.
        """
        headers = {"Last-Event-ID": after, "Accept": "text/event-stream"}
        timeout = httpx.Timeout(self.timeout_s, read=STREAM_SILENCE_S)
        try:
            async with self._http.stream("GET", path, headers=headers, timeout=timeout) as response:
                if response.status_code in BUSY_STATUSES:
                    raise BrokerUnreachable(self.base_url, f"it answers {response.status_code}")
                if not response.is_success:
                    await response.aread()
                    parse_answer(response)
                fields: dict[str, str] = {}
                async for line in lines_of(response.aiter_text()):
                    name, _, value = line.partition(": ")
                    if name:
                        fields[name] = value
                    elif "event" in fields:
                        yield Message(fields["event"], fields.get("data", ""), fields.get("id", ""))
                    if not line:
                        fields = {}
        except httpx.TransportError as error:
            raise BrokerUnreachable(self.base_url, str(error) or type(error).__name__) from error

    async def request(self, method: str, path: str, *, is_repeatable: bool = False, **options: Any) -> Any:
        """One call with bounded retries; what is not repeatable is only retried when nothing was sent."""
        for delay_s in (*RETRY_DELAYS_S, None):
            try:
                response = await self._http.request(method, path, **options)
            except httpx.TransportError as error:
                if delay_s is None or not (is_repeatable or isinstance(error, httpx.ConnectError)):
                    raise BrokerUnreachable(self.base_url, str(error) or type(error).__name__) from error
            else:
                is_retried = is_repeatable and response.status_code in BUSY_STATUSES and delay_s is not None
                if not is_retried:
                    return parse_answer(response)
            await asyncio.sleep(delay_s or 0)
        raise AssertionError("the last try returns or raises")


async def lines_of(chunks: AsyncIterator[str]) -> AsyncGenerator[str]:
    r"""Those that end with \n or \r\n. To `aiter_lines` of httpx a line also ends at U+2028 and the like."""
    rest = ""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split("\n")
        for line in lines:
            yield line.removesuffix("\r")


def host_of(base_url: str) -> str:
    """Raises ValueError when this is no URL of a broker."""
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as error:
        raise ValueError(f"{base_url!r} is not a URL: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"{base_url!r} is not a broker's URL; expected something like {DEFAULT_URL}")
    return url.host


def checked_key(api_key: str) -> str:
    """Raises ValueError without quoting the key."""
    if not all("!" <= character <= "~" for character in api_key):
        raise ValueError("the API key has a blank, a line end or a character beyond ASCII; copy it again")
    return api_key


def trust_in(ca_file: str | Path) -> ssl.SSLContext:
    """Raises ValueError."""
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise ValueError(f"the CA file {ca_file} has no PEM certificate: {error}") from error


def job_path(job_id: str) -> str:
    if not job_id or not all(character.isalnum() or character in "._-" for character in job_id):
        raise ValueError(f"{job_id!r} is not a job id; `onbeat jobs list` shows them")
    return f"/v1/jobs/{job_id}"


def group_path(job_id: str, group_id: str) -> str:
    if not group_id or not all(character.isalnum() or character == "-" for character in group_id):
        raise ValueError(f"{group_id!r} is not a group id; samples have them")
    return f"{job_path(job_id)}/groups/{group_id}"


def pool_path(pool: str) -> str:
    if not pool or not all(character.isalnum() or character == "-" for character in pool):
        raise ValueError(f"{pool!r} is not the name of a pool; `pool` of a job names it")
    return f"/v1/pools/{pool}"


def parse_list(record: type[RecordT], name: str, answer: Any) -> list[RecordT]:
    return [record.model_validate(item) for item in answer[name]]


def parse_answer(response: httpx.Response) -> Any:
    """The JSON of a success, None where it has none; raises ApiError with the problem document of a refusal."""
    if response.status_code == 204:
        return None
    try:
        body = response.json()
    except ValueError:
        body = None
    if response.is_success and body is not None:
        return body
    if not isinstance(body, dict):
        text = response.text.strip()[:200] or "empty answer"
        raise ApiError(response.status_code, response.reason_phrase or "not a broker's answer", text)
    title = str(body.get("title") or response.reason_phrase)
    detail = body.get("detail")
    errors = body.get("errors")
    raise ApiError(
        response.status_code,
        title,
        detail if isinstance(detail, str) else "",
        errors if isinstance(errors, list) else None,
    )


# ---- the same without an event loop ----------------------------------------------------------------------------


class LoopThread:
    """One event loop in a background thread; `run` blocks the caller until a coroutine is done there."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="onbeat-client", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


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
        except GeneratorExit:  # the caller has left its loop
            self._thread.run(updates.aclose())
            raise


class Client:
    """A blocking REST client; use it as `with Client(url) as client`."""

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        api_key: str | None = None,
        timeout_s: float = 15.0,
        ca_file: str | Path | None = None,
    ) -> None:
        self._client = AsyncClient(base_url, api_key, timeout_s, ca_file)
        self._thread = LoopThread()
        self.jobs = Jobs(self._client.jobs, self._thread)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._thread.run(self._client.close())
        self._thread.close()

    def workers(self, pool: str | None = None) -> list[WorkerRecord]:
        return self._thread.run(self._client.workers(pool))

    def pool(self, pool: str) -> PoolStatus:
        return self._thread.run(self._client.pool(pool))

    def doctor(self) -> Diagnosis:
        return self._thread.run(self._client.doctor())
