"""Calls of one script that are made while an earlier one is on its way share the next round trip."""

import asyncio
from collections.abc import Sequence
from typing import Any

from redis.exceptions import NoScriptError, RedisError

MAX_BATCH = 32  # calls of one round trip


class BatchedScript:
    def __init__(self, redis: Any, script: Any) -> None:
        self._redis, self._script = redis, script
        self._waiting: list[tuple[Sequence[str], Sequence[Any], asyncio.Future[Any]]] = []
        self._sender: asyncio.Task[None] | None = None

    async def __call__(self, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """The script's answer. Calls take effect in their order; a cancelled one may take effect."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((keys, args, answer))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())
        return await answer

    async def _send(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
            outcomes = await self._run(batch)
            for (_, _, answer), outcome in zip(batch, outcomes, strict=True):
                if answer.done():  # its caller was cancelled
                    continue
                if isinstance(outcome, BaseException):
                    answer.set_exception(outcome)
                else:
                    answer.set_result(outcome)

    async def _run(self, batch: Sequence[tuple[Sequence[str], Sequence[Any], Any]]) -> list[Any]:
        """An answer or an error of each."""
        pipeline = self._redis.pipeline(transaction=False)
        for keys, args, _ in batch:
            pipeline.evalsha(self._script.sha, len(keys), *keys, *args)
        try:
            outcomes: list[Any] = await pipeline.execute(raise_on_error=False)
            if any(isinstance(outcome, NoScriptError) for outcome in outcomes):  # a Redis that has just been started
                await self._redis.script_load(self._script.script)
                return await self._run(batch)
            return outcomes
        except RedisError as error:
            return [error] * len(batch)
