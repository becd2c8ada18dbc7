"""`python -m benchmarks.ledger_clock SERVICE` runs the real service and times each call of its ledger.

The calls are wrapped from outside; production code knows nothing of it. Each becomes a line of JSON in the folder
LEDGER_CLOCK: `call`, `began` (Unix time), `s`. A submission has `bare_s` as well: the same group sent to the same Redis
by a bare XADD and XACK in one round trip, right before or right after it, by the toss of a coin. So has a claim: a bare
XREADGROUP of as many prompts, right after it. There may be only one rollout: the bare streams have one reader.
"""

import functools
import importlib
import json
import os
import random
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onbeat.streams.codec import RolloutGroup, encode_group
from onbeat.streams.keys import ROLLOUT_GROUP
from onbeat.streams.ledger import Claim, scripts, trainer_side
from onbeat.streams.ledger.rollout_side import RolloutSide
from onbeat.types import Verdict

BARE_PROMPTS, BARE_ROLLOUTS = "bench:bare:prompts", "bench:bare:rollouts"
DIGESTS = {"services.trainer": ["services.trainer.stats:group_digest", "services.trainer.publisher:used_digest"]}


class Clock:
    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)
        self._coin = random.Random(os.getpid())
        self._has_bare_streams = False
        self._bare_entries: dict[str, bytes] = {}  # group id -> its prompt in the bare stream

    def note(self, call: str, began: float, s: float, **more: Any) -> None:
        self._file.write(json.dumps({"call": call, "began": began, "s": s, **more}) + "\n")

    def function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any) -> Any:
            began, start = time.time(), time.perf_counter()
            result = function(*args)
            self.note(function.__name__, began, time.perf_counter() - start)
            return result

        return timed

    def method(self, method: Callable[..., Any], call_of: Callable[..., str]) -> Callable[..., Any]:
        """Time a method. `call_of` gives the name of a call from its arguments, '' for one that is timed elsewhere."""

        @functools.wraps(method)
        async def timed(*args: Any) -> Any:
            began, start = time.time(), time.perf_counter()
            result = await method(*args)
            if call := call_of(*args):
                self.note(call, began, time.perf_counter() - start)
            return result

        return timed

    def claims(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Time claims, each with a bare XREADGROUP of as many prompts right after it."""

        @functools.wraps(method)
        async def timed(*args: Any) -> list[Claim]:
            began, start = time.time(), time.perf_counter()
            claims: list[Claim] = await method(*args)
            took_s = time.perf_counter() - start
            bare_s = await self._claim_bare(args[0].redis, [claim.task.group_id for claim in claims])
            more = {"bare_s": bare_s, "measuring_s": time.time() - began - took_s}
            self.note("claim_groups", began, took_s, group_ids=[claim.task.group_id for claim in claims], **more)
            return claims

        return timed

    def submission(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        async def timed(ledger: RolloutSide, job_id: str, entry_id: str, group: RolloutGroup) -> Verdict:
            began = time.time()
            entry = self._bare_entries.pop(group.group_id, b"0-1")
            is_bare_first = self._coin.random() < 0.5
            bare_s = await bare_submission(ledger.redis, entry, group) if is_bare_first else 0.0
            before_s = time.time() - began  # spent on measuring, before the submission
            start = time.perf_counter()
            verdict: Verdict = await method(ledger, job_id, entry_id, group)
            took_s = time.perf_counter() - start
            ended = time.time()
            if not is_bare_first:
                bare_s = await bare_submission(ledger.redis, entry, group)
            more = {"group_id": group.group_id, "verdict": verdict, "bare_s": bare_s, "ended": ended}
            more |= {"before_s": before_s, "measuring_s": time.time() - began - took_s}
            self.note("submit_group", began, took_s, **more)
            return verdict

        return timed

    async def _claim_bare(self, redis: Any, group_ids: list[str]) -> float:
        """Return the seconds of a bare claim. Its entries stay pending until the bare submission acknowledges them."""
        if not self._has_bare_streams:
            self._has_bare_streams = True
            await redis.delete(BARE_PROMPTS, BARE_ROLLOUTS)
            await redis.xgroup_create(BARE_PROMPTS, ROLLOUT_GROUP, mkstream=True)
        for group_id in group_ids:
            await redis.xadd(BARE_PROMPTS, {"task": group_id})
        start = time.perf_counter()
        answer = await redis.xreadgroup(ROLLOUT_GROUP, "w", {BARE_PROMPTS: ">"}, count=len(group_ids) or 1)
        took_s = time.perf_counter() - start
        for entry, fields in answer[0][1] if answer else []:
            self._bare_entries[fields[b"task"].decode()] = entry
        return took_s


async def bare_submission(redis: Any, entry: bytes, group: RolloutGroup) -> float:
    """Return the seconds of a bare XADD and XACK."""
    start = time.perf_counter()
    pipeline = redis.pipeline(transaction=False)
    pipeline.xadd(BARE_ROLLOUTS, {"group": encode_group(group)})
    pipeline.xack(BARE_PROMPTS, ROLLOUT_GROUP, entry)
    await pipeline.execute()
    return time.perf_counter() - start


def main() -> None:
    service = sys.argv[1]
    clock = Clock(Path(os.environ["LEDGER_CLOCK"]))
    wrapped: Any = RolloutSide
    wrapped.claim, wrapped.submit = clock.claims(RolloutSide.claim), clock.submission(RolloutSide.submit)
    shared: Any = scripts
    run = scripts.Scripts.run
    shared.Scripts.run = clock.method(run, lambda _, script, *args: "" if script == "claim_groups" else script)
    if service == "services.trainer":  # a rollout's are part of its claims
        states = clock.method(scripts.group_states, lambda _, places: "states of groups" if places else "")
        shared.group_states = trainer_side.group_states = states
    for place in DIGESTS.get(service, []):
        module, _, name = place.partition(":")
        owner = importlib.import_module(module)
        setattr(owner, name, clock.function(getattr(owner, name)))
    sys.argv = [service]
    runpy.run_module(service, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
