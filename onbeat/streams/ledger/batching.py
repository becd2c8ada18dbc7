"""Batching of script calls: calls made while an earlier one is on its way share the next round trip."""

import asyncio
from collections.abc import Sequence
from typing import Any

from redis.exceptions import NoScriptError

MAX_BATCH = 32  # calls per round trip


Call = tuple[Sequence[str], Sequence[Any], asyncio.Future[Any]]  # keys, arguments, its result


class BatchedScript:
    def __init__(self, redis: Any, script: Any) -> None:
        self._redis, self._script = redis, script
        self._waiting: list[Call] = []
        self._sender: asyncio.Task[None] | None = None

    async def __call__(self, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Return the script's result. Calls take effect in their order; a cancelled one may take effect."""
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
                if answer.done():  # the caller was cancelled
                    continue
                if isinstance(outcome, BaseException):
                    answer.set_exception(outcome)
                else:
                    answer.set_result(outcome)

    async def _run(self, batch: Sequence[Call]) -> list[Any]:
        """Return a result or an error for each call."""
        try:
            outcomes = await self._try(batch, "EVALSHA", self._script.sha)
            unknown = [index for index, outcome in enumerate(outcomes) if isinstance(outcome, NoScriptError)]
            if unknown:  # Redis has just been started, or another server is the primary now
                again = await self._try([batch[index] for index in unknown], "EVAL", self._script.script)
                for index, outcome in zip(unknown, again, strict=True):
                    outcomes[index] = outcome
            return outcomes
        except Exception as error:  # noqa: BLE001  whatever it is: it is the callers', who would wait for ever
            return [error] * len(batch)

    async def _try(self, batch: Sequence[Call], command: str, script: str) -> list[Any]:
        pipeline = self._redis.pipeline(transaction=False)
        for keys, args, _ in batch:
            pipeline.execute_command(command, script, len(keys), *keys, *args)
        return list(await pipeline.execute(raise_on_error=False))
