"""The seconds until a service that was killed, or paused for longer than its lease, is made up for: REPEATS times each.

The local stack runs a small job with the reference engine: each service once, or two trainers and two rollouts. One
is struck exactly where it has something to lose (tests/chaos/die_at.py); the supervisor of `onbeat up` starts it again,
one second later. All marks but those of a probe are read from the job's log, which has Redis' clock. After each repeat
every group was trained exactly once, to the bits of an undisturbed pass, or the script fails.
"""

import asyncio
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from harness import ROOT, command_line, note_redis, save, start, temporary_folder
from redis import Redis
from redis.exceptions import RedisError

from onbeat.local.supervisor import FIRST_DELAY_S, ServiceSpec
from onbeat.streams.connection import connect
from onbeat.streams.keys import ROLLOUT_GROUP, JobKeys
from onbeat.streams.ledger import Ledger
from tests.chaos.exactly_once import check_exactly_once
from tests.chaos.test_windows import ROLLOUT_LEASE_S, SMALL, TRAINER_LEASE_S, ChaosStack, obedient
from tests.e2e.stack import running
from tests.waiting import wait_until

REPEATS = 5
PAUSE_S = max(ROLLOUT_LEASE_S, TRAINER_LEASE_S) + 2
POOL = "default"
DEADLINE_S = 60.0
POLL_S = 0.02
SECTIONS: dict[str, Any] = {
    "rollout": SMALL | {"max_lost_rollouts": 1_000},  # rollouts are killed
    "schedule": {"num_iterations": 4},
    "checkpoint": {"every_iterations": 1},
}


@dataclass(frozen=True)
class Case:
    """One service struck at one point."""

    target: str
    action: str  # kill | pause
    point: str  # a point of tests/chaos/die_at.py; the second call of it
    marks: tuple[str, ...]  # some of MARKS
    has_standby: bool = False  # a second trainer and a second rollout run

    @property
    def name(self) -> str:
        return f"{self.action} {self.target}{', another one runs' if self.has_standby else ''}"


GENERATING, STEPPED = "TransformersEngine._sample.before", "TrainLoop.step.after"
OPENING, SUBMITTED = "Iterations.open.before", "RolloutSide.submit.after"
BROKER_MARKS, REDIS_MARKS = ("readyz", "next_iteration_opened"), ("ping", "next_group_accepted", "next_commit")
CASES = [
    case
    for action in ("kill", "pause")
    for case in (
        Case("rollout", action, GENERATING, ("own_next_group", "held_groups_accepted")),
        Case("trainer", action, STEPPED, ("next_commit",)),
        Case("broker", action, OPENING, BROKER_MARKS),
        Case("redis", action, SUBMITTED, REDIS_MARKS),
        Case("rollout", action, GENERATING, ("held_groups_accepted",), has_standby=True),
        Case("trainer", action, STEPPED, ("taken_over", "next_commit"), has_standby=True),
    )
]
MARKS = {
    "held_groups_accepted": "all groups that the rollout held are accepted, from whomever",
    "own_next_group": "a group of the struck rollout is accepted: its process, or the one started in its place",
    "taken_over": "another trainer has the job",
    "next_commit": "an iteration is committed; the struck trainer had not committed it",
    "readyz": "GET /readyz of the broker is answered with 200",
    "next_iteration_opened": "the iteration is open that the broker was about to open",
    "ping": "Redis answers PING",
    "next_group_accepted": "a group is accepted",
}


@dataclass(frozen=True)
class Struck:
    at: float  # Unix time
    victim: str  # name of the service
    held: set[str]  # group ids, of a rollout
    probed_at: float  # Unix time of the first answer; 0 where nothing is probed


def measure(chaos: ChaosStack, case: Case, key: str, scratch: Path) -> dict[str, float]:
    """Return mark -> seconds since the strike. Raises AssertionError when the job came to harm."""
    chaos.orders.withdraw()
    names = ready_services(chaos)
    action = "hold" if case.target == "redis" else {"kill": "kill", "pause": "stop"}[case.action]
    chaos.orders.give(case.point, action, nth=2)
    job_id = chaos.submit(key, **SECTIONS)
    struck = strike(chaos, case, job_id, names)
    check_exactly_once(chaos.stack, job_id, scratch)
    log = audit_log(chaos, job_id)
    return {mark: round(time_of(mark, chaos, job_id, log, struck) - struck.at, 3) for mark in case.marks}


def ready_services(chaos: ChaosStack) -> dict[int, str]:
    """Wait until all services are there, with rollouts and trainers just reported idle; return process id -> name."""

    def idle_ones() -> set[str]:
        async def read() -> set[str]:
            redis = connect(chaos.stack.redis_url)
            ledger = Ledger(redis)
            heartbeats = [*await ledger.workers.records(POOL), *await ledger.trainers.records(POOL)]
            await redis.aclose()
            return {record.id for record in heartbeats if record.state == "idle" and record.last_seen_at > asked_at}

        return asyncio.run(read())

    asked_at = time.time()
    specs = [service.spec for service in chaos.stack.services]
    ids = {spec.env.get("ONBEAT_WORKER_ID") or spec.env.get("ONBEAT_TRAINER_ID") for spec in specs} - {None}
    wait_until(lambda: ids <= idle_ones(), "all are idle", DEADLINE_S)
    processes = {spec.name: chaos.stack.process(spec.name) for spec in specs}
    return {process.pid: name for name, process in processes.items() if process is not None}


def strike(chaos: ChaosStack, case: Case, job_id: str, names: dict[int, str]) -> Struck:
    pid = chaos.wait_for_taken(case.point)
    at = (chaos.orders.folder / f"{case.point}.taken").stat().st_mtime  # written right before the signal
    victim = names[pid]
    held = held_by(chaos, job_id, victim) if case.target == "rollout" else set()
    if case.target == "redis":
        at = time.time()
        assert chaos.stack.signal("redis", signal.SIGKILL if case.action == "kill" else signal.SIGSTOP)
        chaos.orders.withdraw()
    if case.action == "pause":
        time.sleep(max(0.0, at + PAUSE_S - time.time()))
        if case.target == "redis":
            chaos.stack.signal("redis", signal.SIGCONT)
        else:
            os.kill(pid, signal.SIGCONT)
    probe = {"broker": is_ready, "redis": answers}.get(case.target)
    if probe:
        wait_until(lambda: probe(chaos), f"{case.target} answers", DEADLINE_S, POLL_S)
    return Struck(at, victim, held, time.time() if probe else 0.0)


def is_ready(chaos: ChaosStack) -> bool:
    try:
        return httpx.get(f"{chaos.stack.url}/readyz", timeout=0.5, trust_env=False).is_success
    except httpx.TransportError:
        return False


def answers(chaos: ChaosStack) -> bool:
    try:
        with Redis.from_url(chaos.stack.redis_url, socket_timeout=0.2, socket_connect_timeout=0.2, retry=None) as redis:
            return bool(redis.ping())
    except (RedisError, OSError):
        return False


# ---- the job's log -------------------------------------------------------------------------------------------------

Words = list[str]  # words of a line of the audit log


def audit_log(chaos: ChaosStack, job_id: str) -> list[tuple[float, Words]]:
    """Return (Unix time, words) of each line."""

    async def read() -> list[tuple[float, Words]]:
        redis = connect(chaos.stack.redis_url)
        entries = await Ledger(redis).audit_log.entries(job_id, count=100_000)
        await redis.aclose()
        return [(int(entry.id.split("-")[0]) / 1000, entry.line.split("\t")) for entry in entries]

    return asyncio.run(read())


def time_of(mark: str, chaos: ChaosStack, job_id: str, log: list[tuple[float, Words]], struck: Struck) -> float:
    """Return the Unix time of a mark after the strike."""
    if mark in ("readyz", "ping"):
        return struck.probed_at
    if mark == "taken_over":
        taken_over = chaos.events(job_id, "job.taken_over")
        return next(float(event.time) for event in taken_over if event.time > struck.at)
    if mark == "held_groups_accepted":
        times = [time_s for time_s, words in log if words[0] == "accepted" and words[2] in struck.held]
        assert len(times) == len(struck.held) > 0, f"{len(times)} of {len(struck.held)} held groups were accepted"
        return max(times)
    kind = {"next_commit": "committed", "next_iteration_opened": "opened"}.get(mark, "accepted")
    lines = [(time_s, words) for time_s, words in log if time_s > struck.at and words[0] == kind]
    return next(time_s for time_s, words in lines if mark != "own_next_group" or words[4] == struck.victim)


def held_by(chaos: ChaosStack, job_id: str, worker: str) -> set[str]:
    """Return the ids of groups that a dead or stopped rollout has claimed, read before its lease runs out."""

    async def read() -> set[str]:
        redis, prompts = connect(chaos.stack.redis_url), JobKeys(job_id).prompts
        pending = await redis.xpending_range(prompts, ROLLOUT_GROUP, "-", "+", 100, consumername=worker)
        entries: list[Any] = [
            await redis.xrange(prompts, entry["message_id"], entry["message_id"]) for entry in pending
        ]
        await redis.aclose()
        return {fields[b"group_id"].decode() for ((_, fields),) in entries}

    return asyncio.run(read())


# ---- all cases -----------------------------------------------------------------------------------------------------


def changed(folder: Path, has_standby: bool) -> Callable[[list[ServiceSpec]], list[ServiceSpec]]:
    def change(specs: list[ServiceSpec]) -> list[ServiceSpec]:
        (trainer,) = [spec for spec in specs if spec.name == "trainer"]
        standby = replace(trainer, name="trainer-1", env={**trainer.env, "ONBEAT_TRAINER_ID": "trainer-1"})
        return [obedient(spec, folder, str(ROOT)) for spec in [*specs, *([standby] if has_standby else [])]]

    return change


def run(cases: list[Case], repeats: int, has_standby: bool) -> dict[str, dict[str, dict[str, float]]]:
    """Run the cases; return case -> mark -> seconds."""
    table = {}
    with temporary_folder() as folder:
        (folder / "orders").mkdir()
        note_redis()
        with running(folder, num_rollouts=1 + has_standby, change=changed(folder / "orders", has_standby)) as stack:
            chaos = ChaosStack(stack, folder)
            for case in cases:
                runs = []
                for repeat in range(repeats):
                    with tempfile.TemporaryDirectory() as scratch:
                        runs.append(measure(chaos, case, f"{case.name} {repeat}", Path(scratch)))
                    print(f"{case.name}: { ({mark: round(s, 2) for mark, s in runs[-1].items()}) }", flush=True)
                table[case.name] = {mark: summary([run[mark] for run in runs]) for mark in case.marks}
    return table


def summary(times: list[float]) -> dict[str, float]:
    return {"median_s": round(statistics.median(times), 2), "max_s": round(max(times), 2)}


def main() -> None:
    table: dict[str, dict[str, dict[str, float]]] = {}
    for has_standby in (False, True):
        table |= run([case for case in CASES if case.has_standby is has_standby], REPEATS, has_standby)
    settings = {
        "rollout_lease_s": ROLLOUT_LEASE_S,
        "trainer_lease_s": TRAINER_LEASE_S,
        "restart_delay_s": FIRST_DELAY_S,
        "pause_s": PAUSE_S,
        "probe_interval_s": POLL_S,
    }
    save("recovery", {"repeats": REPEATS, "settings": settings, "marks": MARKS, "since the strike": table})


if __name__ == "__main__":
    start(command_line(__doc__))
    main()
