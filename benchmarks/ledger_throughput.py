"""The groups accepted per second by the submission script, and taken by the trainer; the cost of ledger and audit log.

One iteration of N groups is opened on a real Redis (core 0) and submitted by one client, or by eight (core 1), as
rollouts do it: a stream of finished groups, several in flight at a time. Then one trainer takes them all. The floor is
a bare XADD of the same bytes by the same client; latency is that of one submission at a time, in a random
order with a bare XADD and with the script without its audit line.
"""

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from harness import command_line, medians, note_redis, save, start, temporary_folder

from onbeat.local.redis_choice import embedded_server
from onbeat.streams.codec import PromptTask, Response, RolloutGroup, VersionSpan, encode_group
from onbeat.streams.connection import connect
from onbeat.streams.keys import JobKeys
from onbeat.streams.ledger import Claim, Ledger
from onbeat.streams.ledger.batching import BatchedScript
from onbeat.streams.ledger.scripts import load_script

PORT = 7391
URL = f"redis://127.0.0.1:{PORT}"
LEASE_S = 600.0
NUM_RESPONSES = 8
WINDOW = 64  # submissions in flight at a time
SIZES = {256: 4000, 2048: 1000}  # tokens of a response -> groups
REPEATS = 3
AUDIT_CALL = "  record('accepted'"  # a line of submit_group.lua


@contextmanager
def redis_server(*options: str) -> Iterator[None]:
    (server,) = embedded_server()
    note_redis(server)
    with temporary_folder() as folder:
        command = [server.path, "--port", str(PORT), "--bind", "127.0.0.1", "--dir", str(folder), *options]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        os.sched_setaffinity(process.pid, {0})
        try:
            yield
        finally:
            process.terminate()
            process.wait(30)


async def open_job(ledger: Ledger, num_groups: int) -> str:
    job_id = f"bench-{random.randrange(1 << 40):x}"
    await ledger.jobs.create(job_id, {"name": "bench", "pool": "bench"}, 1, 0)
    epoch = await ledger.trainer.claim_job(job_id, "trainer", LEASE_S)
    assert epoch is not None
    await ledger.versions.announce(job_id, epoch, 0, "127.0.0.1:1", "d0")
    tasks = [PromptTask(group_id=f"0-{index}", iteration=0, text="prompt") for index in range(num_groups)]
    assert await ledger.iterations.open(job_id, 0, 0, tasks) == ""
    return job_id


def make_group(num_tokens: int) -> RolloutGroup:
    dice = random.Random(num_tokens)
    group = RolloutGroup(prompt_token_ids=[dice.randrange(49152) for _ in range(64)], prompt_text="a prompt " * 20)
    for _ in range(NUM_RESPONSES):
        group.responses.append(
            Response(
                token_ids=[dice.randrange(49152) for _ in range(num_tokens)],
                rollout_logprobs=[-dice.random() for _ in range(num_tokens)],
                version_spans=[VersionSpan(policy_version=0, start=0, end=num_tokens)],
                finish_reason="stop",
                reward=dice.random(),
                text="some words " * (num_tokens // 3),
            )
        )
    return group


def groups_of(claims: list[Claim], worker: str, num_tokens: int) -> list[RolloutGroup]:
    model = make_group(num_tokens)
    groups = []
    for claim in claims:
        group = RolloutGroup()
        group.CopyFrom(model)
        group.group_id, group.worker_id = claim.task.group_id, worker
        groups.append(group)
    return groups


async def in_window(work: Iterator[Awaitable[Any]]) -> None:
    """Await all of it, WINDOW at a time."""

    async def lane() -> None:
        for call in work:
            await call

    await asyncio.gather(*(lane() for _ in range(WINDOW)))


# ---- throughput --------------------------------------------------------------------------------------------------


async def client(job_id: str, worker: str, num_groups: int, num_tokens: int) -> None:
    """Claim, print `ready`, wait for the start, submit; print when the submissions began and ended."""
    redis = connect(URL)
    ledger = Ledger(redis)
    claims = await ledger.rollout.claim(job_id, worker, num_groups, LEASE_S)
    pairs = list(zip(claims, groups_of(claims, worker, num_tokens), strict=True))
    print("ready", flush=True)
    sys.stdin.readline()
    started = time.monotonic()
    await in_window(ledger.rollout.submit(job_id, claim.entry_id, group) for claim, group in pairs)
    print(started, time.monotonic(), flush=True)
    await redis.aclose()


def start_client(job_id: str, worker: str, num_groups: int, num_tokens: int) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--client", job_id, worker, str(num_groups), str(num_tokens)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    os.sched_setaffinity(process.pid, {1})
    return process


async def throughput(num_clients: int, num_tokens: int, num_groups: int) -> dict[str, float]:
    redis = connect(URL)
    ledger = Ledger(redis)
    job_id = await open_job(ledger, num_groups)
    share = num_groups // num_clients
    clients = [start_client(job_id, f"w{index}", share, num_tokens) for index in range(num_clients)]
    assert [process.stdout.readline() for process in clients if process.stdout] == ["ready\n"] * num_clients
    for process in clients:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    times = [process.communicate(timeout=300)[0].split() for process in clients]
    in_s = max(float(ended) for _, ended in times) - min(float(started) for started, _ in times)
    os.sched_setaffinity(0, {1})
    started, num_taken = time.monotonic(), 0
    while num_taken < share * num_clients:
        num_taken += len(await ledger.trainer.take(job_id, "rank-0", 64, 1.0))
    out_s = time.monotonic() - started
    payload = encode_group(make_group(num_tokens))
    started = time.monotonic()
    bare = [redis.xadd("onbeat:bench:bare", {"group": payload}) for _ in range(num_groups)]
    await in_window(iter(bare))
    bare_s = time.monotonic() - started
    os.sched_setaffinity(0, {0, 1})
    await redis.flushdb()  # the server is this script's own
    await redis.aclose()
    total = share * num_clients
    return {
        "in_per_s": total / in_s,
        "out_per_s": total / out_s,
        "bare_xadd_in_per_s": num_groups / bare_s,
        "group_bytes": len(payload),
    }


# ---- latency -----------------------------------------------------------------------------------------------------


async def latency(num_tokens: int, num_groups: int) -> dict[str, float]:
    """Return the median microseconds of one submission at a time; the three ways come in a random order."""
    os.sched_setaffinity(0, {1})
    redis = connect(URL)
    full, without_audit = Ledger(redis), Ledger(redis)
    text = load_script("submit_group")
    without_audit.rollout._submission = BatchedScript(redis, redis.register_script(cut_audit(text)))
    job_id = await open_job(full, num_groups)
    claims = await full.rollout.claim(job_id, "w0", num_groups, LEASE_S)
    groups = groups_of(claims, "w0", num_tokens)
    payload = encode_group(groups[0])
    ways: list[Callable[[int], Awaitable[Any]]] = [
        lambda index: full.rollout.submit(job_id, claims[index].entry_id, groups[index]),
        lambda index: without_audit.rollout.submit(job_id, claims[index].entry_id, groups[index]),
        lambda index: redis.xadd(JobKeys(job_id).rollouts + ":bare", {"group": payload}),
    ]
    taken: list[list[float]] = [[], [], []]
    dice = random.Random(0)
    for index in range(num_groups):
        way = dice.randrange(3)
        started = time.perf_counter()
        await ways[way](index)
        taken[way].append(1e6 * (time.perf_counter() - started))
    os.sched_setaffinity(0, {0, 1})
    await redis.flushdb()
    await redis.aclose()
    with_audit, ledger_only, bare = map(statistics.median, taken)
    return {"submit_us": with_audit, "submit_without_audit_us": ledger_only, "bare_xadd_us": bare}


def cut_audit(script: str) -> str:
    """Return the submission script without the line that appends to the audit log."""
    lines = script.splitlines()
    assert sum(line.startswith(AUDIT_CALL) for line in lines) == 1
    return "\n".join(line for line in lines if not line.startswith(AUDIT_CALL))


def median_of_runs(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(median, 1) for name, median in medians(runs).items()}


async def measure() -> dict[str, Any]:
    results = []
    for num_tokens, num_groups in SIZES.items():
        entry: dict[str, Any] = {"tokens": f"{NUM_RESPONSES} x {num_tokens}", "num_groups": num_groups}
        for num_clients in (1, 8):
            runs = [await throughput(num_clients, num_tokens, num_groups) for _ in range(REPEATS)]
            entry[f"clients_{num_clients}"] = median_of_runs(runs)
        took = median_of_runs([await latency(num_tokens, num_groups) for _ in range(REPEATS)])
        entry["latency"] = took | {
            "audit_adds": round(took["submit_us"] / took["submit_without_audit_us"] - 1, 3),
            "ledger_and_audit_add_us": round(took["submit_us"] - took["bare_xadd_us"], 1),
        }
        results.append(entry)
    return {"repeats": REPEATS, "results": results}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--client", nargs=4, help=argparse.SUPPRESS)
    arguments = start(parser)
    if arguments.client:
        job_id, worker, num_groups, num_tokens = arguments.client
        asyncio.run(client(job_id, worker, int(num_groups), int(num_tokens)))
        return
    with redis_server("--save", ""):
        time.sleep(1.0)
        result = asyncio.run(measure())
    save("ledger_throughput", result)


if __name__ == "__main__":
    main()
