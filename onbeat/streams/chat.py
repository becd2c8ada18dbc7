"""Chats with a job's policy, on their way between broker and rollouts. The ledger holds nothing of them.

    broker   ask   --> `chats`, a stream per job     --> take   a rollout: only one gets it
             read  <-- `chat:ID`, a stream per chat  <-- say    the answer as the client gets it, whole or in chunks
             close

The stream of a chat exists while its answer is wanted: the broker closes it when its client hangs up, and it expires by
itself when the broker has died. Replies are never written to a stream that does not exist.
"""

from typing import Any

from pydantic import ValidationError

from onbeat.contracts.completions import ChatFailed, CompletionRequest
from onbeat.contracts.records import Record
from onbeat.streams.keys import JobKeys

MAX_WAIT_S = 60  # an unclaimed request is dropped after this time
WANTED_S = 30  # an answer counts as wanted for this long after its broker's last read
FIRST = "0-1"  # the entry that creates the stream of a chat


class Reply(Record):
    """A part of an answer. One without a body shows, about every second, that a rollout works on the answer."""

    status: int = 200  # HTTP status; with another one the body is the error
    policy_version: int | None = None  # version of the body
    body: str = ""  # JSON as the client gets it: the whole answer or, of a stream, a chunk
    is_last: bool = False

    @classmethod
    def of_error(cls, error: ChatFailed) -> "Reply":
        return cls(status=error.status, body=error.to_body().model_dump_json(), is_last=True)


class Chats:
    """The chats of a job."""

    def __init__(self, redis: Any, job_id: str) -> None:
        self._redis, self._job = redis, JobKeys(job_id)
        self.job_id = job_id

    # ---- the broker's side ---------------------------------------------------------------------------------------

    async def ask(self, chat_id: str, request: CompletionRequest, max_waiting: int) -> str | None:
        """Send a request and return its entry; None when `max_waiting` others wait already."""
        job, fields = self._job, {"id": chat_id, "request": request.model_dump_json(exclude_none=True)}
        seconds, _ = await self._redis.time()
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.xadd(job.chat(chat_id), {"asked": ""}, id=FIRST)
        pipeline.expire(job.chat(chat_id), WANTED_S)
        pipeline.xadd(job.chats, fields, minid=(int(seconds) - MAX_WAIT_S) * 1000, approximate=False)
        pipeline.expire(job.chats, MAX_WAIT_S)
        pipeline.xlen(job.chats)
        _, _, entry, _, num_waiting = await pipeline.execute()
        if num_waiting <= max_waiting:
            return str(entry.decode())
        await self.withdraw(entry)
        await self.close(chat_id)
        return None

    async def withdraw(self, entry: str) -> bool:
        """Withdraw a request. Return True if no rollout had taken it; then none will."""
        return bool(await self._redis.xdel(self._job.chats, entry))

    async def read(self, chat_id: str, after: str, timeout_s: float) -> list[tuple[str, Reply]]:
        """Return entries and replies after an entry (FIRST: all), if any came in time. Keep the answer wanted."""
        key = self._job.chat(chat_id)
        await self._redis.expire(key, WANTED_S)
        answer = await self._redis.xread({key: after}, block=max(1, int(timeout_s * 1000)))
        entries = answer[0][1] if answer else []
        return [(entry.decode(), Reply.model_validate_json(fields[b"reply"])) for entry, fields in entries]

    async def close(self, chat_id: str) -> None:
        """Delete the chat's stream: its answer is not wanted any more."""
        await self._redis.unlink(self._job.chat(chat_id))

    # ---- the rollout's side --------------------------------------------------------------------------------------

    async def take(self, timeout_s: float) -> tuple[str, CompletionRequest] | None:
        """Take the oldest request whose answer is still wanted, and return its chat's id and the request; None if there
        is none or another rollout has it."""
        answer = await self._redis.xread({self._job.chats: "0"}, count=1, block=max(1, int(timeout_s * 1000)))
        if not answer:
            return None
        entry, fields = answer[0][1][0]
        if not await self._redis.xdel(self._job.chats, entry):
            return None
        chat_id = fields.get(b"id", b"").decode()
        try:
            request = CompletionRequest.model_validate_json(fields.get(b"request", b""))
        except ValidationError:  # it was not written by a broker
            return None
        return (chat_id, request) if await self._redis.exists(self._job.chat(chat_id)) else None

    async def say(self, chat_id: str, reply: Reply) -> bool:
        """Send a reply. Return False when the answer is not wanted any more."""
        fields = {"reply": reply.model_dump_json(exclude_defaults=True)}
        return await self._redis.xadd(self._job.chat(chat_id), fields, nomkstream=True) is not None
