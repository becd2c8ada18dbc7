"""Chats with a job's policy, on their way between broker and rollouts. The ledger holds nothing of them.

    broker   ask   --> `chats`, a stream per job     --> take   a rollout: only one gets it
             read  <-- `chat:ID`, a stream per chat  <-- say    pieces of text, at last Done or Failed
             close

The stream of a chat exists while its answer is wanted: the broker closes it when its client hangs up, and it expires by
itself when the broker has died. Replies are never written to a stream that does not exist.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from onbeat.streams.keys import JobKeys
from onbeat.types import Record

MAX_WAIT_S = 60  # an unclaimed request is dropped after this time
WANTED_S = 30  # an answer counts as wanted for this long after its broker's last read
FIRST = "0-1"  # the entry that creates the stream of a chat


class ChatMessage(Record):
    role: Literal["system", "user", "assistant"]
    content: str


class ChatRequest(Record):
    """A request, with all that a rollout needs to answer it."""

    id: str
    messages: list[ChatMessage]
    max_tokens: int | None = None  # of each choice; None: the job's limit for a response
    temperature: float = 1.0  # 0: always the most likely token
    top_p: float = 1.0
    seed: int  # of the first choice; the others have the seeds after it
    stop: tuple[str, ...] = ()
    num_choices: int = 1
    is_streaming: bool = False  # text is wanted as it is generated


class Alive(Record):
    """The rollout has the request and works on it; sent about every second."""

    kind: Literal["alive"] = "alive"
    worker_id: str


class Piece(Record):
    """The next text of a choice. All pieces of a chat are from one policy version."""

    kind: Literal["piece"] = "piece"
    policy_version: int
    index: int = 0  # of the choice
    text: str
    finish_reason: Literal["stop", "length"] | None = None  # set on the last piece of a choice


class Done(Record):
    """All choices are complete."""

    kind: Literal["done"] = "done"
    prompt_tokens: int
    completion_tokens: int  # of all choices


class Failed(Record):
    """There will be no more replies; the message is the reason."""

    kind: Literal["failed"] = "failed"
    status: int  # HTTP status
    code: str
    message: str
    param: str | None = None


Reply = Alive | Piece | Done | Failed
REPLY: TypeAdapter[Reply] = TypeAdapter(Annotated[Reply, Field(discriminator="kind")])


class Chats:
    """The chats of all jobs of one Redis."""

    def __init__(self, redis: Any) -> None:
        self._redis = redis

    # ---- the broker's side ---------------------------------------------------------------------------------------

    async def ask(self, job_id: str, request: ChatRequest, max_waiting: int) -> str | None:
        """Send a request and return its entry; None when `max_waiting` others wait already."""
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
        """Withdraw a request. Return True if no rollout had taken it; then none will."""
        return bool(await self._redis.xdel(JobKeys(job_id).chats, entry))

    async def read(self, job_id: str, chat_id: str, after: str, timeout_s: float) -> list[tuple[str, Reply]]:
        """Return entries and replies after an entry (FIRST: all), if any came in time. Keep the answer wanted."""
        key = JobKeys(job_id).chat(chat_id)
        await self._redis.expire(key, WANTED_S)
        found = await self._redis.xread({key: after}, block=max(1, int(timeout_s * 1000)))
        entries = found[0][1] if found else []
        return [(entry.decode(), REPLY.validate_json(fields[b"reply"])) for entry, fields in entries]

    async def close(self, job_id: str, chat_id: str) -> None:
        """Delete the chat's stream: its answer is not wanted any more."""
        await self._redis.unlink(JobKeys(job_id).chat(chat_id))

    # ---- the rollout's side --------------------------------------------------------------------------------------

    async def take(self, job_id: str, timeout_s: float) -> ChatRequest | None:
        """Take the oldest request whose answer is still wanted; None if there is none or another rollout has it."""
        job = JobKeys(job_id)
        found = await self._redis.xread({job.chats: "0"}, count=1, block=max(1, int(timeout_s * 1000)))
        if not found:
            return None
        entry, fields = found[0][1][0]
        if not await self._redis.xdel(job.chats, entry):
            return None
        try:
            request = ChatRequest.model_validate_json(fields.get(b"request", b""))
        except ValidationError:  # it was not written by a broker
            return None
        return request if await self._redis.exists(job.chat(request.id)) else None

    async def say(self, job_id: str, chat_id: str, *replies: Reply) -> bool:
        """Send replies. Return False when the answer is not wanted any more."""
        pipeline = self._redis.pipeline(transaction=False)
        for reply in replies:
            pipeline.xadd(JobKeys(job_id).chat(chat_id), {"reply": reply.model_dump_json()}, nomkstream=True)
        return None not in await pipeline.execute()
