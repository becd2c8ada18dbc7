"""The client for everything under /v1/jobs, and the stream that follows a job."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any

from onbeat.client.transport import BrokerUnreachable, RecordT, Transport, checked_name, part_of, read_record
from onbeat.config import JobConfig, apply_override
from onbeat.contracts.records import (
    MAX_LISTED_ITERATIONS,
    AuditReport,
    Diagnosis,
    EvaluationRecord,
    Event,
    GroupDetail,
    IterationRecord,
    IterationUpdate,
    JobRecord,
    MetricSeries,
    Record,
    Sample,
    Timeline,
    Validation,
    WeightsRecord,
)
from onbeat.contracts.states import JobState

STREAM_DELAYS_S = (0.5, 1.0, 2.0, 5.0, 5.0, 10.0)  # before a stream that failed is resumed
CREATE_S = 120.0  # the broker opens a job's data, and may have to download it
AUDIT_S = 600.0  # the broker reads the job's whole log, and all that it keeps
STREAM_RENEWAL_S = 0.2  # before a stream that ended normally is resumed
GOOD_STREAM_S = 10.0  # failures count in a row until a stream lasts this long, or delivers an event

Records = list[RecordT]  # classes with a method `list` cannot write `list[...]`
Series = dict[str, list[tuple[int, float]]]
Update = JobRecord | IterationUpdate | Event | Diagnosis  # the messages of a job's stream
UPDATES: dict[str, type[Update]] = {
    "job": JobRecord,
    "iteration": IterationUpdate,
    "event": Event,
    "explain": Diagnosis,
}


class StreamEnd(Record):
    reason: str


class AsyncJobs:
    """The client for /v1/jobs. Methods raise ApiError for refusals, BrokerUnreachable if no broker can answer, and
    OnbeatError, the base class of both, for an answer that cannot be read."""

    def __init__(self, client: Transport) -> None:
        self._client = client

    async def create(self, config: JobConfig | Mapping[str, Any], idempotency_key: str | None = None) -> JobRecord:
        """Submit a job. Safe to repeat: the same key gives the same job, and every call has a key."""
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        return read_record(JobRecord, await self._send("/v1/jobs", config, headers=headers))

    async def validate(self, config: JobConfig | Mapping[str, Any]) -> Sequence[str]:
        """Have a job checked that is not created; return notes about its data. A wrong one raises ApiError."""
        return (await self.check(config)).notes

    async def check(self, config: JobConfig | Mapping[str, Any]) -> Validation:
        """Have a job checked as `validate` does; return also how many rows of its data can be used, and why not all."""
        return read_record(Validation, await self._send("/v1/jobs:validate", config))

    async def _send(self, path: str, config: JobConfig | Mapping[str, Any], **options: Any) -> Any:
        """Send a job, and return the answer. Raise TypeError for anything else, such as the path of a job file."""
        if isinstance(config, JobConfig):
            config = config.model_dump(mode="json")
        if not isinstance(config, Mapping):
            kind = type(config).__name__
            raise TypeError(f"a job is a JobConfig or a mapping, not a {kind}; JobConfig.from_file reads a job file")
        options |= {"json": dict(config), "timeout": CREATE_S}
        return await self._client.request("POST", path, is_repeatable=True, **options)

    async def fork(self, job_id: str, iteration: int, overrides: Sequence[str] = ()) -> JobRecord:
        """Submit a job that starts from the checkpoint which another one wrote after `iteration` iterations, and counts
        on from there. `overrides`: what is to be different, such as `optimizer.learning_rate=1e-6`."""
        parent = (await self.get(job_id)).config
        config = JobConfig.without_derived(parent) | {"fork": {"job": job_id, "iteration": iteration}}
        for override in overrides:
            apply_override(config, override)
        with suppress(AttributeError, KeyError, TypeError):  # the broker says how a schedule is wrong
            schedule = config["schedule"]
            ends = [end for end in schedule.get("earlier_ends", []) if end < schedule["num_iterations"]]
            schedule["earlier_ends"] = ends
        return await self.create(config)

    async def list(self, state: JobState | str | None = None, limit: int | None = None) -> Records[JobRecord]:
        """Return jobs, newest first, at most `limit` (1 to 500; default: 200). `state`: only those in this state."""
        wanted = state.upper() if state else None
        return parse_list(JobRecord, "jobs", await self._client.get("/v1/jobs", state=wanted, limit=limit))

    async def get(self, job_id: str) -> JobRecord:
        return read_record(JobRecord, await self._get(job_id, ""))

    async def cancel(self, job_id: str) -> JobRecord:
        return await self._move(job_id, "cancel")

    async def pause(self, job_id: str) -> JobRecord:
        return await self._move(job_id, "pause")

    async def resume(self, job_id: str, num_iterations: int | None = None) -> JobRecord:
        """Let a paused job run on, and one that FAILED or was CANCELLED wait for a trainer again. `num_iterations`: in
        all, for one that SUCCEEDED and is to make more."""
        body = None if num_iterations is None else {"num_iterations": num_iterations}
        return await self._move(job_id, "resume", json=body)

    async def delete(self, job_id: str) -> None:
        """Remove a job that is over, with everything but its checkpoints. Safe to repeat."""
        await self._client.request("DELETE", job_path(job_id), is_repeatable=True)

    async def _get(self, job_id: str, path: str, **params: Any) -> Any:
        return await self._client.get(job_path(job_id) + path, **params)

    async def _move(self, job_id: str, verb: str, **options: Any) -> JobRecord:
        return read_record(JobRecord, await self._client.request("POST", f"{job_path(job_id)}:{verb}", **options))

    async def iterations(self, job_id: str, after: int = -1) -> Records[IterationRecord]:
        """Return iterations with a number above `after`, in order. A broker gives them in parts."""
        return await self._list_all(job_id, "iterations", IterationRecord, lambda record: record.iteration, after)

    async def evaluations(self, job_id: str, after: int = -1) -> Records[EvaluationRecord]:
        """Return evaluations with a number above `after`, in order."""
        return parse_list(EvaluationRecord, "evaluations", await self._get(job_id, "/evaluations", after=after))

    async def evaluation_samples(self, job_id: str, evaluation: int) -> Records[Sample]:
        """Return a few responses of an evaluation that is done."""
        return parse_list(Sample, "samples", await self._get(job_id, f"/evaluations/{evaluation}/samples"))

    async def weights(self, job_id: str, after: int = -1) -> Records[WeightsRecord]:
        """Return how policy versions above `after` reached the rollouts, in order. A broker gives them in parts."""
        return await self._list_all(job_id, "weights", WeightsRecord, lambda record: record.policy_version, after)

    async def _list_all(
        self, job_id: str, name: str, record: type[RecordT], number_of: Callable[[RecordT], int], after: int
    ) -> Records[RecordT]:
        """Return all records with a number above `after`: ask until an answer is short."""
        records: Records[RecordT] = []
        while True:
            newest = number_of(records[-1]) if records else after
            answer = await self._get(job_id, f"/{name}", after=newest, limit=MAX_LISTED_ITERATIONS)
            records += parse_list(record, name, answer)
            if len(answer[name]) < MAX_LISTED_ITERATIONS:
                return records

    async def audit(self, job_id: str, head: str = "") -> AuditReport:
        """Re-check the job's audit log, its ledger and all stored groups. `head`: that of an earlier report."""
        path = f"{job_path(job_id)}/audit"
        options = {"params": {"head": head}, "timeout": AUDIT_S}
        return read_record(AuditReport, await self._client.request("GET", path, is_repeatable=True, **options))

    async def explain(self, job_id: str) -> Diagnosis:
        """Explain why the job is where it is: who waits for whom, since when, and what happens next."""
        return read_record(Diagnosis, await self._get(job_id, ":explain"))

    async def metrics(self, job_id: str, after: int = -1) -> Series:
        """Return `area/name` -> [(iteration, value), ...] above `after`; for `eval/name`, (evaluation, value). A broker
        gives the iterations in parts."""
        curves: dict[str, dict[int, float]] = {}  # the evaluations of later parts are repeated in each part
        newest = after
        while True:
            answer = await self._get(job_id, "/metrics", after=newest)
            seen = newest
            for name, points in read_record(MetricSeries, answer).metrics.items():
                curves.setdefault(name, {}).update(points)
                if points and not name.startswith("eval/"):
                    newest = max(newest, points[-1][0])
            if newest == seen:
                return {name: list(values.items()) for name, values in curves.items()}

    async def samples(
        self,
        job_id: str,
        iteration: int | None = None,
        limit: int | None = None,
        offset: int | None = None,
        min_reward: float | None = None,
        max_reward: float | None = None,
        source: str | None = None,
        truncated: bool = False,
        wrong: bool = False,
        search: str = "",
    ) -> Records[Sample]:
        """Return responses of an iteration (default: the newest that has any), after the first `offset` ones, with
        rewards from `min_reward` to `max_reward`.

        `source`: one of several sources of the job. `truncated`: only those that were cut at the limit of tokens.
        `wrong`: only those with a reward below `solved_at`. `search`: only those that hold this text in the prompt or
        the response, in any case of letters.
        """
        page = {"iteration": iteration, "limit": limit, "offset": offset}
        rewards = {"min_reward": min_reward, "max_reward": max_reward}
        choice = {"is_truncated": True if truncated else None, "is_solved": False if wrong else None}
        more = {"text": search or None, "source": source}
        answer = await self._get(job_id, "/samples", **page, **rewards, **choice, **more)
        return parse_list(Sample, "samples", answer)

    async def group(self, job_id: str, group_id: str) -> GroupDetail:
        """Return a prompt with all its responses, token by token."""
        return read_record(GroupDetail, await self._get(job_id, group_path(group_id)))

    async def events(self, job_id: str, after: str = "0") -> Records[Event]:
        """Return all events after the cursor (the last event's id). A broker gives them in parts."""
        events: Records[Event] = []
        while True:
            answer = await self._get(job_id, "/events", after=events[-1].id if events else after)
            if not part_of(answer, "events"):
                return events
            events += parse_list(Event, "events", answer)

    async def timeline(self, job_id: str, iterations: int = 5) -> Timeline:
        """Return what the trainer and each rollout did during the last iterations (20 at most)."""
        return read_record(Timeline, await self._get(job_id, "/timeline", iterations=iterations))

    async def stream(self, job_id: str, after: str = "0") -> AsyncGenerator[Update]:
        """Yield the job's current state, the events after `after`, then every change, until the job is over.

        Events come once each, in order; states come whole, and an unchanged one may come again. A lost connection is
        resumed where it broke off; raise BrokerUnreachable when that fails for a while.
        """
        path, num_failures = f"{job_path(job_id)}/stream", 0
        while True:
            started, end = time.monotonic(), "broken"  # unless the broker gives another reason
            try:
                async with aclosing(self._client.messages(path, after)) as messages:
                    async for message in messages:
                        if message.kind == "end":
                            end = read_record(StreamEnd, message.data).reason
                            break
                        if message.id:
                            after, num_failures = message.id, 0
                        if message.kind in UPDATES:
                            yield read_record(UPDATES[message.kind], message.data)
                if end == "over":
                    return
                if end == "broken":
                    text = "its stream of the job breaks off; its log says why"
                    raise BrokerUnreachable(self._client.base_url, text)
                delay_s, num_failures = STREAM_RENEWAL_S, 0
            except BrokerUnreachable:
                if time.monotonic() - started > GOOD_STREAM_S:
                    num_failures = 0
                if num_failures == len(STREAM_DELAYS_S):
                    raise
                delay_s, num_failures = STREAM_DELAYS_S[num_failures], num_failures + 1
            await asyncio.sleep(delay_s)

    async def wait(self, job_id: str, timeout_s: float | None = None) -> JobRecord:
        """Wait until the job is final. Raise TimeoutError after `timeout_s`."""
        if (job := await self.get(job_id)).state.is_final:
            return job
        is_late = False
        try:
            async with asyncio.timeout(timeout_s), aclosing(self.stream(job_id)) as updates:
                async for _ in updates:
                    pass
        except TimeoutError:
            is_late = True
        job = await self.get(job_id)
        if is_late and not job.state.is_final:
            raise TimeoutError(f"job {job_id} is still {job.state} after {timeout_s} s")
        return job


def job_path(job_id: str) -> str:
    return f"/v1/jobs/{checked_name(job_id, 'a job id; `onbeat jobs list` shows them', punctuation='._-')}"


def group_path(group_id: str) -> str:
    return f"/groups/{checked_name(group_id, 'a group id; samples have them')}"


def parse_list(record: type[RecordT], name: str, answer: Any) -> Records[RecordT]:
    return [read_record(record, item) for item in part_of(answer, name)]
