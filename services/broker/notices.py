"""Notices to the operator at a job's end, its failure and its first problem: a command, a webhook, or both.

The loop is level-triggered like the conductor. A broker claims a notice in the ledger before it sends it, so that of
several brokers one sends it, and none repeats it after a restart. A notice that cannot be delivered is tried NUM_TRIES
times, logged and given up: jobs never wait for it.

    look (1 s) --> jobs that have ended, first problems --> claim in the ledger --> deliver, in a task of its own
"""

import asyncio
import json
import logging
import shlex
import time
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

import httpx
from redis.exceptions import RedisError

from onbeat.contracts.errors import JobNotFound
from onbeat.contracts.states import IterationState, JobState
from onbeat.process.children import end_group, inherited_environment, last_words
from onbeat.streams.inspection import existing_jobs
from onbeat.streams.keys import JobKeys
from onbeat.streams.ledger import Ledger
from onbeat.streams.records import Fields, read_iterations
from services.broker.doctor.explain import explain_job
from services.broker.settings import Settings

logger = logging.getLogger(__name__)

LOOK_S, EXPLAIN_S = 1.0, 10.0
LASTING_S = 10.0  # a problem that began later may end by itself
CATCH_UP_S = 3600.0  # a job that has been over for longer is left alone
NUM_TRIES, RETRY_S = 4, 5.0  # the delay between tries doubles
CLOSE_S = 5.0  # time for the notices of jobs that end just before this broker
AT_ONCE = 4  # deliveries at a time
MAX_OUTPUT_BYTES = 4_000  # end of what a command prints, for the log
FINAL_STATUSES = frozenset({400, 401, 403, 404, 405, 410, 413, 415, 422})  # trying again would not help
KINDS = {JobState.SUCCEEDED: "job.succeeded", JobState.FAILED: "job.failed", JobState.CANCELLED: "job.cancelled"}

Notice = dict[str, Any]
# Data from another version raises these when it cannot be read.
ODD = (ValueError, TypeError, LookupError)


class NotDelivered(Exception):
    """A try has failed. `is_final`: another one would, too."""

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


class Notifier:
    """The loop of one broker; `run` ends only by cancellation."""

    def __init__(self, ledger: Ledger, settings: Settings) -> None:
        self._ledger, self._timeout_s = ledger, settings.notify_timeout_s
        self._ways: list[Callable[[Notice], Coroutine[Any, Any, None]]] = []
        if settings.notify_command:
            self._command = shlex.split(settings.notify_command)
            self._ways.append(self._run_command)
        if settings.notify_url:
            self._url = settings.notify_url
            self._ways.append(self._post)
        self._settled: set[str] = set()  # notices that were claimed, here or by another broker
        self._over: set[str] = set()  # jobs with a notice of their end
        self._explained_at: dict[str, float] = {}
        self._deliveries: set[asyncio.Task[None]] = set()
        self._free = asyncio.Semaphore(AT_ONCE)

    async def run(self) -> None:
        while True:
            try:
                await self.look()
            except RedisError as error:
                logger.warning("no notices for now: %s: %s", type(error).__name__, error)
            await asyncio.sleep(LOOK_S)

    async def close(self) -> None:
        """Look a last time, and give the deliveries under way a moment."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await self.look()
                while self._deliveries:
                    await asyncio.wait(self._deliveries)
        except (RedisError, TimeoutError) as error:
            logger.warning("notices may be missing: %s: %s", type(error).__name__, error)
        for delivery in self._deliveries:
            delivery.cancel()

    async def look(self) -> None:
        """Send the notices that are due."""
        since = await self._ledger.now() - CATCH_UP_S
        ended = [job_id for job_id in await self._ledger.lists.ended_since(since) if job_id not in self._over]
        for job_id, fields in (await existing_jobs(self._ledger, ended)).items():
            state, finished_at = fields["state"], fields.get("finished_at", "")
            if state in KINDS and await self._claim(job_id, f"{state}:{finished_at}"):
                done, total = fields.get("next_iteration", "0"), fields.get("num_iterations", "?")
                reason = f": {fields['error']}" if fields.get("error") else ""
                await self._send(KINDS[JobState(state)], fields, f"{state} after {done} of {total} iterations{reason}")
            self._over.add(job_id)
        started = await self._ledger.lists.started()
        self._over.difference_update(started)  # a job that is resumed ends again
        for job_id, fields in (await existing_jobs(self._ledger, started)).items():
            if problem := await self._first_problem(job_id):
                await self._send("job.problem", fields, problem)

    async def _first_problem(self, job_id: str) -> str:
        """Return the first problem of a job that has lasted; '' if there is none, or a notice of it was sent."""
        if f"{job_id} problem" in self._settled or time.monotonic() - self._explained_at.get(job_id, 0.0) < EXPLAIN_S:
            return ""
        self._explained_at[job_id] = time.monotonic()
        try:
            findings = await explain_job(self._ledger, job_id)
        except (JobNotFound, *ODD) as error:
            logger.info("no notice of job %s: %s: %s", job_id, type(error).__name__, error)
            return ""
        problems = [
            finding.sentence
            for finding in findings
            if finding.is_problem and (finding.since_s is None or finding.since_s >= LASTING_S)
        ]
        return problems[0] if problems and await self._claim(job_id, "problem") else ""

    async def _claim(self, job_id: str, name: str) -> bool:
        """Return whether this broker is the first one that sends the notice."""
        if f"{job_id} {name}" in self._settled:
            return False
        self._settled.add(f"{job_id} {name}")
        return bool(await self._ledger.redis.sadd(JobKeys(job_id).notices, name))

    # ---- delivery ------------------------------------------------------------------------------------------------

    async def _send(self, kind: str, fields: Fields, message: str) -> None:
        try:
            notice = await self._describe(kind, fields, message)
        except ODD as error:
            logger.warning("no notice of job %s: its record cannot be read: %s", fields.get("id"), error)
            return
        for way in self._ways:
            delivery = asyncio.create_task(self._deliver(way, notice), name=f"notice {notice['job_id']}")
            self._deliveries.add(delivery)
            delivery.add_done_callback(self._deliveries.discard)

    async def _describe(self, kind: str, fields: Fields, message: str) -> Notice:
        """Return the JSON that is sent."""
        done, reward = int(fields.get("next_iteration", "0")), None
        try:
            records = await read_iterations(self._ledger, fields["id"], done - 2, 1)
            committed = [record for record in records if record.state is IterationState.COMMITTED]
            reward = committed[-1].reward_mean if committed else None
        except ODD as error:
            logger.info("the reward of job %s cannot be read: %s", fields["id"], error)
        return {
            "kind": kind,
            "job_id": fields["id"],
            "name": fields.get("name", ""),
            "state": fields["state"],
            "message": message,
            "next_iteration": done,
            "num_iterations": int(fields.get("num_iterations", "0")),
            "reward_mean": reward,
            "checkpoint": fields.get("checkpoint"),
            "time": await self._ledger.now(),
        }

    async def _deliver(self, way: Callable[[Notice], Coroutine[Any, Any, None]], notice: Notice) -> None:
        """Try until it is delivered, a bounded number of times. The end of each try is logged."""
        about = f"notice {notice['kind']} of job {notice['job_id']}"
        for number in range(1, NUM_TRIES + 1):
            try:
                async with self._free, asyncio.timeout(self._timeout_s):
                    await way(notice)
            except (NotDelivered, TimeoutError, OSError) as error:
                reason = str(error) or f"no end within {self._timeout_s:g} s"
                if number == NUM_TRIES or (isinstance(error, NotDelivered) and error.is_final):
                    logger.error("%s is given up after %d tries: %s", about, number, reason)
                    return
                logger.warning("%s, try %d of %d: %s", about, number, NUM_TRIES, reason)
                await asyncio.sleep(RETRY_S * 2 ** (number - 1))
            else:
                logger.info("%s is delivered", about)
                return

    async def _run_command(self, notice: Notice) -> None:
        """Give the command the notice on its standard input. Raise NotDelivered, OSError."""
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=inherited_environment(),  # settings, such as the password of Redis, are left out
            start_new_session=True,
        )
        try:
            _, stderr = await process.communicate(json.dumps(notice).encode() + b"\n")
        finally:
            await end_group(process)
        if process.returncode:
            words = last_words(stderr[-MAX_OUTPUT_BYTES:].decode(errors="replace"))
            raise NotDelivered(f"the command exited with {process.returncode}: {words or 'it printed no reason'}")

    async def _post(self, notice: Notice) -> None:
        """Post the notice. Raise NotDelivered, with the host alone: the rest of the URL may be a secret."""
        host = urlsplit(self._url).hostname
        try:
            async with httpx.AsyncClient(timeout=self._timeout_s) as client:
                answer = await client.post(self._url, json=notice)
        except httpx.HTTPError as error:
            raise NotDelivered(f"{host} did not answer ({type(error).__name__})") from error
        if not answer.is_success:
            is_final = answer.status_code in FINAL_STATUSES
            raise NotDelivered(f"{host} answered {answer.status_code}", is_final=is_final)
