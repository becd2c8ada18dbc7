"""Chats with a job's policy, on their way between broker and rollouts. Nothing of them is in the ledger.

    broker   ask   --> `chats`, a stream per job     --> take   a rollout: only one gets it
             read  <-- `chat:ID`, a stream per chat  <-- say    pieces of text, at last Done or Failed
             close

The stream of a chat is there as long as its answer is wanted: the broker closes it when its client hangs up, and it
ends by itself when the broker has died. Nothing is ever written to one that is not there.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from onbeat.streams.keys import JobKeys
from onbeat.types import Record

MAX_WAIT_S = 60  # a request that nobody has taken for so long is forgotten
WANTED_S = 30  # an answer is wanted for so long after its broker has looked for it
FIRST = "0-1"  # the entry that makes the stream of a chat


class ChatMessage(Record):
    role: Literal["system", "user", "assistant"]
    content: str


class ChatRequest(Record):
    """What a rollout needs to know to answer."""

    id: str
    messages: list[ChatMessage]
    max_tokens: int | None = None  # of each choice; None: as many as a response of the job has
    temperature: float = 1.0  # 0: always the likeliest token
    top_p: float = 1.0
    seed: int  # of the first choice; the others have the following ones
    stop: tuple[str, ...] = ()
    num_choices: int = 1
    is_streaming: bool = False  # text is wanted as it comes


class Alive(Record):
    """The rollout has the request and works on it; told every second or so."""

    kind: Literal["alive"] = "alive"
    worker_id: str


class Piece(Record):
    """The next text of a choice. All pieces of a chat are of one policy version."""

    kind: Literal["piece"] = "piece"
    policy_version: int
    index: int = 0  # of the choice
    text: str
    finish_reason: Literal["stop", "length"] | None = None  # of the last piece of a choice


class Done(Record):
    """All choices are complete."""

    kind: Literal["done"] = "done"
    prompt_tokens: int
    completion_tokens: int  # of all choices


class Failed(Record):
    """There will be no more, and why."""

    kind: Literal["failed"] = "failed"
    status: int  # of HTTP
    code: str
    message: str
    param: str | None = None


Reply = Alive | Piece | Done | Failed
REPLY: TypeAdapter[Reply] = TypeAdapter(Annotated[Reply, Field(discriminator="kind")])


class Chats:
    """Of all jobs of one Redis."""

    def __init__(self, redis: Any) -> None:
        self._redis = redis

    # ---- the broker's side ---------------------------------------------------------------------------------------

    async def ask(self, job_id: str, request: ChatRequest, max_waiting: int) -> str | None:
        """The entry of the request; None when `max_waiting` others wait already."""
        job = JobKeys(job_id)
        seconds, _ = await self._redis.time()
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.xadd(job.chat(request.id), {"asked": ""}, id=FIRST)
        pipeline.expire(job.chat(request.id), WANTED_S)
        oldest = (int(seconds) - MAX_WAIT_S) * 1000
        pipeline.xadd(job.chats, {"request": request.model_dump_json()}, minid=oldest, approximate=False)
        pipeline.expire(job.chats, MAX_WAIT_S)
        pipeline.xlen(job.chats)
        _, _, entry, _, num_waiting = await pipeline.execute()
        if num_waiting > max_waiting:
            await self._redis.xdel(job.chats, entry)
            await self.close(job_id, request.id)
            return None
        return str(entry.decode())

    async def withdraw(self, job_id: str, entry: str) -> bool:
        """True if no rollout had taken it; now none will."""
        return bool(await self._redis.xdel(JobKeys(job_id).chats, entry))

    async def read(self, job_id: str, chat_id: str, after: str, timeout_s: float) -> list[tuple[str, Reply]]:
        """Entries and replies after an entry (FIRST for all); none when none came in time. Keeps the answer wanted."""
        key = JobKeys(job_id).chat(chat_id)
        await self._redis.expire(key, WANTED_S)
        found = await self._redis.xread({key: after}, block=max(1, int(timeout_s * 1000)))
        entries = found[0][1] if found else []
        return [(entry.decode(), REPLY.validate_json(fields[b"reply"])) for entry, fields in entries]

    async def close(self, job_id: str, chat_id: str) -> None:
        """The answer is not wanted any more."""
        await self._redis.unlink(JobKeys(job_id).chat(chat_id))

    # ---- the rollout's side --------------------------------------------------------------------------------------

    async def take(self, job_id: str, timeout_s: float) -> ChatRequest | None:
        """The oldest request whose answer is still wanted; None when there is none, or another rollout was faster."""
        job = JobKeys(job_id)
        found = await self._redis.xread({job.chats: "0"}, count=1, block=max(1, int(timeout_s * 1000)))
        if not found:
            return None
        entry, fields = found[0][1][0]
        if not await self._redis.xdel(job.chats, entry):
            return None
        try:
            request = ChatRequest.model_validate_json(fields.get(b"request", b""))
        except ValidationError:  # not of a broker's
            return None
        return request if await self._redis.exists(job.chat(request.id)) else None

    async def say(self, job_id: str, chat_id: str, *replies: Reply) -> bool:
        """False when nobody wants the answer any more."""
        pipeline = self._redis.pipeline(transaction=False)
        for reply in replies:
            pipeline.xadd(JobKeys(job_id).chat(chat_id), {"reply": reply.model_dump_json()}, nomkstream=True)
        return None not in await pipeline.execute()
