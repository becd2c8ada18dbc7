"""The scripts of the ledger. They are atomic in Redis: a process that dies half-way or wakes up late breaks no rule."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any, TypeVar

from redis.exceptions import NoScriptError

from onbeat.contracts.errors import LeaseLost
from onbeat.streams.codec import PromptTask, RolloutGroup
from onbeat.streams.keys import ROLLOUT_GROUP, TRAINER_GROUP, JobKeys

GROUPS_AT_ONCE = 16  # read from Redis and decoded, before other work of the process gets its turn

MessageT = TypeVar("MessageT", PromptTask, RolloutGroup)


@functools.cache
def load_script(name: str) -> str:
    folder = resources.files("onbeat.streams") / "scripts"
    return (folder / "prelude.lua").read_text("utf-8") + (folder / f"{name}.lua").read_text("utf-8")


class LedgerPart:
    """The ledger or a part of it: the calls of one kind of caller, or about one kind of thing."""

    def __init__(self, redis: Any) -> None:  # redis-py types answers as unions over both protocols
        self.redis = redis

    async def now(self) -> float:
        """Return Unix seconds by the Redis clock, the source of all times in the ledger."""
        seconds, microseconds = await self.redis.time()
        return float(seconds) + float(microseconds) / 1e6

    async def _run(self, name: str, job: JobKeys, more_keys: Sequence[str], *args: Any) -> Any:
        script = self.redis.register_script(load_script(name))
        keys = [job.job, job.events, *more_keys, job.audit]
        try:
            return await self.redis.evalsha(script.sha, len(keys), *keys, *args)
        except NoScriptError:  # SCRIPT LOAD and the next command may reach two servers, when Redis fails over
            return await self.redis.eval(script.script, len(keys), *keys, *args)

    async def _run_as_owner(self, name: str, job: JobKeys, more_keys: Sequence[str], epoch: str, *args: Any) -> Any:
        """Run a script that answers nil to a trainer which no longer owns the job. Raise LeaseLost then."""
        answer = await self._run(name, job, more_keys, epoch, *args)
        if answer is None:
            raise LeaseLost(job.job_id)
        return answer

    async def _own_entries(
        self, job: JobKeys, stream: str, decode: Callable[[bytes], MessageT], payloads: Mapping[bytes, bytes]
    ) -> dict[bytes, MessageT]:
        """Return the messages at those entries of the prompts or rollouts stream that the ledger has, by entry.

        Another program wrote the others: they are removed and counted, and an event reports them.
        """
        group, state = (ROLLOUT_GROUP, b"waiting:") if stream == job.prompts else (TRAINER_GROUP, b"accepted:")
        messages: dict[bytes, MessageT] = {}
        for entry, payload in payloads.items():
            with contextlib.suppress(ValueError):
                messages[entry] = decode(payload)
        states = await group_states(self.redis, [place_of(job, message) for message in messages.values()])
        pairs = zip(messages.items(), states, strict=True)
        accepted = {entry: message for (entry, message), listed in pairs if listed == state + entry}
        if foreign := [entry for entry in payloads if entry not in accepted]:
            await self._run("drop_foreign", job, [stream], group, *foreign)
        return accepted

    async def _texts(self, key: str) -> dict[str, str]:
        """Return a hash as text; empty when there is none."""
        return as_text(await self.redis.hgetall(key))


def as_text(fields: dict[bytes, bytes]) -> dict[str, str]:
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, value in fields.items()}


def place_of(job: JobKeys, unit: PromptTask | RolloutGroup) -> tuple[str, str]:
    """Return the key of the group's ledger and its name there."""
    groups = job.evaluation_groups if unit.is_evaluation else job.groups
    return groups(unit.iteration), unit.group_id


async def group_states(redis: Any, places: list[tuple[str, str]]) -> list[bytes | None]:
    """Return the state of each group in its ledger."""
    pipeline = redis.pipeline(transaction=False)
    for key, group_id in places:
        pipeline.hget(key, group_id)
    return list(await pipeline.execute()) if places else []
