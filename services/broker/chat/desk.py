"""The chats of a broker: it hands them to rollouts and passes on what they answer; every wait has a deadline."""

import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from onbeat.contracts.completions import ChatFailed, CompletionRequest
from onbeat.contracts.errors import JobNotFound
from onbeat.contracts.records import JobRecord
from onbeat.contracts.states import JobState
from onbeat.streams.chat import FIRST, Chats, Reply
from onbeat.streams.inspection import existing_jobs
from onbeat.streams.ledger import Ledger
from services.broker.settings import Settings
from services.broker.views.records import job_record

SERVED_STATES = (JobState.RUNNING, JobState.PAUSED)  # a rollout stays with a paused job
READ_S = 1.0  # the longest delay until a stopping broker ends a chat
ROLLOUT_SILENT_S = 15.0  # a rollout that has taken a chat reports it every second


class ChatDesk:
    """The chats of one broker."""

    def __init__(self, ledger: Ledger, settings: Settings, is_stopping: Callable[[], bool]) -> None:
        self._ledger, self._settings, self._is_stopping = ledger, settings, is_stopping

    # ---- models --------------------------------------------------------------------------------------------------

    async def models(self) -> list[JobRecord]:
        """Return the jobs that rollouts serve, the oldest first."""
        started = await existing_jobs(self._ledger, await self._ledger.lists.started())
        records = map(job_record, started.values())
        return [job for job in records if job.state in SERVED_STATES and job.config]  # others cannot be read

    async def find(self, name: str) -> JobRecord:
        """Find a job by its id, or by its name if no other job has it. Raises ChatFailed."""
        try:
            job = job_record(await self._ledger.jobs.fields(name))
        except JobNotFound:
            return await self._find_named(name)
        if job.state is JobState.PENDING:
            message = f"job {name} is PENDING: it has no policy yet; `onbeat doctor {name}` says what it waits for"
            raise ChatFailed(503, "no_rollout", message)
        if job.state not in SERVED_STATES:
            message = f"job {name} is {job.state}: no rollout serves it any more; "
            raise ChatFailed(404, "model_not_found", message + "GET /v1/models lists the available jobs", "model")
        return job

    async def _find_named(self, name: str) -> JobRecord:
        named = [job for job in await self.models() if job.name == name]
        if len(named) > 1:
            ids = ", ".join(job.id for job in named)
            raise ChatFailed(400, "ambiguous_model", f"several jobs are named {name}: {ids}; take an id", "model")
        if not named:
            message = f"no running job has the id or the name {name!r}; GET /v1/models lists the available jobs"
            raise ChatFailed(404, "model_not_found", message, "model")
        return named[0]

    # ---- answers -------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def converse(self, job_id: str, request: CompletionRequest) -> AsyncIterator[AsyncGenerator[Reply]]:
        """Ask the rollouts of a job, and yield the parts of the answer; the last may be an error. When this context
        ends, so does the generation. Raises ChatFailed; JobNotFound when the job was deleted meanwhile."""
        settings, chat_id = self._settings, f"chatcmpl-{secrets.token_hex(12)}"
        chats = Chats(self._ledger.redis, job_id)
        if (request.wanted_tokens or 0) > settings.chat_max_tokens:
            message = (
                f"max_tokens is {request.wanted_tokens}; at most {settings.chat_max_tokens} (ONBEAT_CHAT_MAX_TOKENS)"
            )
            raise ChatFailed(400, "invalid_value", message, "max_tokens")
        entry = await chats.ask(chat_id, request, settings.chat_queue)
        if entry is None:
            message = f"{settings.chat_queue} chats wait for the rollouts of {job_id} already; try again"
            raise ChatFailed(429, "queue_full", message)
        try:
            yield self._listen(chats, chat_id, entry)
        finally:
            await chats.withdraw(entry)
            await chats.close(chat_id)

    async def _listen(self, chats: Chats, chat_id: str, entry: str) -> AsyncGenerator[Reply]:
        """Yield replies that have something to say, up to the last. Raises as `converse` does."""
        settings, cursor, is_taken = self._settings, FIRST, False
        answer_by, hear_by = time.monotonic() + settings.chat_answer_s, time.monotonic() + settings.chat_take_s
        while True:
            now = time.monotonic()
            if self._is_stopping():
                raise ChatFailed(503, "broker_stopping", "this broker ends; ask again")
            if now > answer_by:
                message = f"the answer was not complete after {settings.chat_answer_s:g} s (ONBEAT_CHAT_ANSWER_S); "
                raise ChatFailed(504, "timeout", message + "ask for fewer tokens")
            if now > hear_by:
                if is_taken:
                    message = f"the rollout has said nothing for {ROLLOUT_SILENT_S:.0f} s; "
                    raise ChatFailed(503, "rollout_silent", message + "ask again, another may answer")
                if await chats.withdraw(entry):
                    raise ChatFailed(503, "no_rollout", await self._why_not_taken(chats.job_id))
                is_taken, hear_by = True, now + ROLLOUT_SILENT_S
            for entry_id, reply in await chats.read(chat_id, cursor, READ_S):
                cursor, is_taken, hear_by = entry_id, True, time.monotonic() + ROLLOUT_SILENT_S
                if reply.body or reply.is_last:
                    yield reply
                if reply.is_last:
                    return

    async def _why_not_taken(self, job_id: str) -> str:
        state, take_s = await self._ledger.jobs.state(job_id), self._settings.chat_take_s
        return (
            f"no rollout of job {job_id}, which is {state}, took it within {take_s:g} s: there is none, or all are "
            f"starting, busy or have ONBEAT_CHAT_SLOTS=0; `onbeat doctor {job_id}` says what it waits for"
        )
