"""The chats of a broker: it hands them to rollouts of the job and waits for the answers; every wait has a deadline."""

import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from onbeat.errors import JobNotFound
from onbeat.streams.chat import FIRST, Alive, ChatRequest, Chats, Done, Failed, Piece, Reply
from onbeat.streams.inspection import existing_jobs
from onbeat.streams.ledger import Ledger
from onbeat.types import SILENT_S, JobState

SERVED_STATES = (JobState.RUNNING, JobState.PAUSED)  # a rollout stays with a paused job
READ_S = 1.0  # the longest delay until a stopping broker ends a chat
ROLLOUT_SILENT_S = 15.0  # a rollout that has taken a chat reports it every second
RETRY_AFTER_S = 5


class ChatFailed(Exception):
    """An error as the answer: its HTTP status, a code for programs and a message that says what to do."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


@dataclass(frozen=True)
class ChatLimits:
    max_waiting: int  # requests of a job that no rollout has taken
    take_s: float  # time for a rollout to take one
    answer_s: float  # time for the whole answer
    max_tokens: int  # the most that a request may ask for


@dataclass(frozen=True)
class TrainedModel:
    job_id: str
    name: str
    pool: str
    state: JobState
    created_at: float


class Conversation:
    """A request that a rollout is asked to answer. It must be closed, whatever happens."""

    def __init__(
        self,
        ledger: Ledger,
        chats: Chats,
        model: TrainedModel,
        request: ChatRequest,
        entry: str,
        limits: ChatLimits,
        is_stopping: Callable[[], bool],
    ) -> None:
        self._ledger, self._chats, self._model, self._request = ledger, chats, model, request
        self._entry, self._limits, self._is_stopping = entry, limits, is_stopping
        self.id = request.id
        self._asked_at = self._heard_at = time.monotonic()
        self._is_taken = False
        self._cursor = FIRST
        self._replies: deque[Reply] = deque()

    async def next(self) -> Piece | Done:
        """Return the next piece of the answer; Done is the last. Raises ChatFailed."""
        while True:
            while self._replies:
                reply = self._replies.popleft()
                if isinstance(reply, Failed):
                    raise ChatFailed(reply.status, reply.code, reply.message, reply.param)
                if not isinstance(reply, Alive):
                    return reply
            await self._check_deadlines()
            for entry, reply in await self._chats.read(self._model.job_id, self._request.id, self._cursor, READ_S):
                self._cursor, self._is_taken, self._heard_at = entry, True, time.monotonic()
                self._replies.append(reply)

    async def close(self) -> None:
        """Withdraw the request; the rollout stops if it has not finished."""
        await self._chats.withdraw(self._model.job_id, self._entry)
        await self._chats.close(self._model.job_id, self._request.id)

    async def _check_deadlines(self) -> None:
        now = time.monotonic()
        if self._is_stopping():
            raise ChatFailed(503, "broker_stopping", "this broker ends; ask again")
        if now - self._asked_at > self._limits.answer_s:
            message = f"the answer was not complete after {self._limits.answer_s:g} s (ONBEAT_CHAT_ANSWER_S); "
            raise ChatFailed(504, "timeout", message + "ask for fewer tokens")
        if self._is_taken:
            if now - self._heard_at > ROLLOUT_SILENT_S:
                message = f"the rollout has said nothing for {ROLLOUT_SILENT_S:.0f} s; ask again, another may answer"
                raise ChatFailed(503, "rollout_silent", message)
        elif now - self._asked_at > self._limits.take_s:
            if await self._chats.withdraw(self._model.job_id, self._entry):
                raise ChatFailed(503, "no_rollout", await self._why_not_taken())
            self._is_taken, self._heard_at = True, now

    async def _why_not_taken(self) -> str:
        job_id, now = self._model.job_id, await self._ledger.now()
        workers = [
            worker
            for worker in await self._ledger.workers.records(self._model.pool)
            if worker.job_id == job_id and now - worker.last_seen_at < SILENT_S
        ]
        state = await self._ledger.jobs.state(job_id)
        if not workers:
            reason = f"no rollout serves job {job_id}, which is {state}"
        else:
            doing = ", ".join(sorted({worker.state for worker in workers}))
            reason = f"the rollouts of job {job_id} ({len(workers)}: {doing}) are starting, busy with other chats, or "
            reason += "have ONBEAT_CHAT_SLOTS=0"
        return f"{reason}; not taken within {self._limits.take_s:g} s. `onbeat doctor {job_id}` says what it waits for"


class ChatDesk:
    """The chats of one broker."""

    def __init__(self, ledger: Ledger, limits: ChatLimits, is_stopping: Callable[[], bool]) -> None:
        self._ledger, self._limits, self._is_stopping = ledger, limits, is_stopping
        self._chats = Chats(ledger.redis)

    async def models(self) -> list[TrainedModel]:
        """Return the models of jobs that rollouts serve, the oldest first."""
        started = await existing_jobs(self._ledger, await self._ledger.lists.started())
        models = []
        for job_id, fields in started.items():
            with contextlib.suppress(ValueError, LookupError):  # an unreadable record is not a model
                models.append(model_of(job_id, fields))
        return [model for model in models if model.state in SERVED_STATES]

    async def find(self, name: str) -> TrainedModel:
        """Find a model by its job's id, or by the job's name if no other job has it. Raises ChatFailed."""
        model = await self._read(name)
        if model is None:
            named = [model for model in await self.models() if model.name == name]
            if len(named) > 1:
                ids = ", ".join(model.job_id for model in named)
                raise ChatFailed(400, "ambiguous_model", f"several jobs are named {name}: {ids}; take an id", "model")
            if not named:
                message = f"no running job has the id or the name {name!r}; GET /v1/models lists those there are"
                raise ChatFailed(404, "model_not_found", message, "model")
            model = named[0]
        if model.state is JobState.PENDING:
            message = f"job {name} is PENDING: it has no policy yet; `onbeat doctor {name}` says what it waits for"
            raise ChatFailed(503, "no_rollout", message)
        if model.state not in SERVED_STATES:
            message = (
                f"job {name} is {model.state}: no rollout serves it any more; GET /v1/models lists those there are"
            )
            raise ChatFailed(404, "model_not_found", message, "model")
        return model

    async def open(self, model: TrainedModel, request: ChatRequest) -> Conversation:
        """Submit a request. Raises ChatFailed when it asks for too many tokens or the queue is full."""
        if request.max_tokens is not None and request.max_tokens > self._limits.max_tokens:
            message = f"max_tokens is {request.max_tokens}; at most {self._limits.max_tokens} (ONBEAT_CHAT_MAX_TOKENS)"
            raise ChatFailed(400, "invalid_value", message, "max_tokens")
        entry = await self._chats.ask(model.job_id, request, self._limits.max_waiting)
        if entry is None:
            message = f"{self._limits.max_waiting} chats wait for the rollouts of {model.job_id} already; try again"
            raise ChatFailed(429, "queue_full", message)
        place = (self._ledger, self._chats, model, request, entry)
        return Conversation(*place, self._limits, self._is_stopping)

    async def _read(self, job_id: str) -> TrainedModel | None:
        try:
            fields = await self._ledger.jobs.fields(job_id)
        except JobNotFound:
            return None
        return model_of(job_id, fields)


def model_of(job_id: str, fields: dict[str, str]) -> TrainedModel:
    """Return the model of a job. Raises ValueError or LookupError for a record that cannot be read."""
    created_at, state = float(fields["created_at"]), JobState(fields["state"])
    return TrainedModel(job_id, fields["name"], fields["pool"], state, created_at)
