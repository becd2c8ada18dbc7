"""The broker's times for the requests of a dashboard, on a job of 1,000 iterations with 100,000 responses.

The job is written through the ledger's own scripts, then a real broker serves it over loopback. Each request is made
REPEATS times in turn with the others; figures are those of the client, and `bytes` is the size of the answer. A second
job has one iteration of 10,000 responses: the largest page of samples and the largest timeline. Figures of the stream
are how large its messages are, and how soon the first ones come.
"""

import asyncio
import os
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from harness import command_line, note_redis, save, start, temporary_folder

from onbeat.config import JobConfig
from onbeat.contracts.records import PublishedWeights, WeightUpdate
from onbeat.contracts.states import JobState
from onbeat.streams.codec import PromptTask, Response, RolloutGroup, Timings, VersionSpan
from onbeat.streams.connection import connect
from onbeat.streams.ledger import Ledger
from tests.broker_fixtures import broker_process
from tests.conftest import EMBEDDED, own_redis

NUM_ITERATIONS, NUM_GROUPS, NUM_RESPONSES, NUM_TOKENS = 1000, 10, 10, 200
NUM_LARGE_GROUPS = 1000
NUM_EPOCH = 10  # iterations
NUM_MICRO_BATCHES = 20
NUM_METRICS = 20  # metrics in addition to those that a record names
REPEATS = 20
JOB = {
    "name": "bench",
    "model": {"path": "bundled:smollm2-135m-instruct"},
    "data": {"type": "reasoning_gym", "task": "chain_sum"},
    "reward": {"name": "reasoning_gym"},
    "rollout": {
        "num_prompts_per_iteration": NUM_GROUPS,
        "num_samples_per_prompt": NUM_RESPONSES,
        "max_response_tokens": NUM_TOKENS,
    },
}


# ---- the jobs ----------------------------------------------------------------------------------------------------


def make_group(task: PromptTask, worker: str, dice: random.Random) -> RolloutGroup:
    group = RolloutGroup(
        group_id=task.group_id,
        iteration=task.iteration,
        policy_version=task.policy_version,
        prompt_token_ids=[dice.randrange(49152) for _ in range(64)],
        prompt_text="a prompt " * 20 + str(prompt_number(task)),
        worker_id=worker,
        timings=Timings(generate_s=0.004, score_s=0.001, worker_busy_s=0.004),
    )
    tokens = [dice.randrange(49152) for _ in range(NUM_TOKENS)]
    text = "some words " * (NUM_TOKENS // 3)
    lengths = [len(text) // NUM_TOKENS] * NUM_TOKENS
    lengths[-1] += len(text) - sum(lengths)
    logprobs = [-dice.random() for _ in range(NUM_TOKENS)]
    for _ in range(NUM_RESPONSES):
        group.responses.append(
            Response(
                token_ids=tokens,
                rollout_logprobs=logprobs,
                version_spans=[VersionSpan(policy_version=task.policy_version, start=0, end=NUM_TOKENS)],
                finish_reason="stop",
                reward=dice.random(),
                reward_parts={"right": dice.random(), "form": dice.random()},
                text=text,
                token_lengths=lengths,
            )
        )
    return group


def prompt_number(task: PromptTask) -> int:
    """Return the number of the prompt: every prompt comes again in each tenth iteration."""
    return int(task.group_id.split("-")[1]) + NUM_LARGE_GROUPS * (task.iteration % NUM_EPOCH)


def report(dice: random.Random) -> dict[str, Any]:
    """Make the report of an iteration, as a trainer commits it."""
    named = {"num_responses": 100, "prompt_tokens": 6400, "response_tokens": 20_000, "train_s": 0.01}
    named |= {"reward_mean": dice.random(), "reward_std": dice.random(), "mismatch_mean": 0.01, "mismatch_max": 0.1}
    spans = [("micro_batch", time.time() - 0.001 * index, 0.001) for index in range(NUM_MICRO_BATCHES, 0, -1)]
    return named | {f"train/metric_{index}": dice.random() for index in range(NUM_METRICS)} | {"spans": spans}


async def create(ledger: Ledger, job_id: str, num_iterations: int) -> str:
    config = JobConfig.model_validate(JOB | {"schedule": {"num_iterations": num_iterations}})
    await ledger.jobs.create(job_id, config.model_dump(mode="json"), num_iterations, 0)
    epoch = await ledger.trainer.claim_job(job_id, "trainer", 86_400)
    assert epoch is not None
    await ledger.versions.announce(job_id, epoch, 0, "127.0.0.1:1", "d0")
    return epoch


async def make_iteration(ledger: Ledger, job_id: str, epoch: str, iteration: int, num_groups: int) -> None:
    dice = random.Random(iteration)
    tasks = [PromptTask(group_id=f"{iteration}-{i}", iteration=iteration, text="prompt") for i in range(num_groups)]
    assert await ledger.iterations.open(job_id, iteration, iteration, tasks) == ""
    update = WeightUpdate(received_bytes=10, pull_s=0.01, apply_s=0.01, load_s=0.01, held_s=0.01)
    for worker in ("w1", "w2"):
        await ledger.versions.engine_ready(job_id, iteration, worker, update)
        claims = await ledger.rollout.claim(job_id, worker, num_groups // 2, 600)
        await asyncio.gather(
            *(ledger.rollout.submit(job_id, c.entry_id, make_group(c.task, worker, dice)) for c in claims)
        )
    digest, published = f"d{iteration + 1}", PublishedWeights(full_bytes=10, encode_s=0.1, publish_s=0.1)
    await ledger.versions.announce(job_id, epoch, iteration + 1, "127.0.0.1:1", digest, published)
    advantages = {task.group_id: [round(dice.random(), 4) for _ in range(NUM_RESPONSES)] for task in tasks}
    place = (job_id, epoch, iteration, iteration + 1, digest)
    await ledger.trainer.commit(*place, report(dice), "used", advantages=advantages)


async def write_jobs(ledger: Ledger, num_iterations: int) -> None:
    epoch = await create(ledger, "long", num_iterations)
    for iteration in range(num_iterations):
        await make_iteration(ledger, "long", epoch, iteration, NUM_GROUPS)
    epoch = await create(ledger, "wide", 1)
    await make_iteration(ledger, "wide", epoch, 0, NUM_LARGE_GROUPS)
    for job_id in ("long", "wide"):
        await ledger.jobs.move(job_id, JobState.SUCCEEDED)


@contextmanager
def broker(redis_url: str, folder: Path) -> Iterator[tuple[str, int]]:
    """Start a broker; yield its URL and its process id."""
    with broker_process(folder, redis_url, REQUESTS_PER_S="10000", REQUEST_BURST="100000") as (url, process):
        yield url, process.pid


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---- requests ----------------------------------------------------------------------------------------------------


def requests(num_iterations: int) -> dict[str, str]:
    last = num_iterations - 1
    return {
        "jobs": "/v1/jobs",
        "job": "/v1/jobs/long",
        "explain": "/v1/jobs/long:explain",
        "iterations, all": "/v1/jobs/long/iterations",
        "iterations, the last 10": f"/v1/jobs/long/iterations?after={last - 10}",
        "metrics, all": "/v1/jobs/long/metrics",
        "metrics, the last 10": f"/v1/jobs/long/metrics?after={last - 10}",
        "samples, 16 of the newest iteration": "/v1/jobs/long/samples",
        "samples, 100 of an old iteration": "/v1/jobs/long/samples?iteration=3&limit=100",
        "samples, 16 of 10,000": "/v1/jobs/wide/samples?limit=16&offset=5000",
        "samples, 1000 of 10,000": "/v1/jobs/wide/samples?limit=1000",
        "samples, the best 100 of 10,000": "/v1/jobs/wide/samples?limit=100&min_reward=0.9",
        "group, 10 responses token by token": f"/v1/jobs/long/groups/{last}-0",
        "timeline, 5 iterations": "/v1/jobs/long/timeline?iterations=5",
        "timeline, 20 iterations": "/v1/jobs/long/timeline?iterations=20",
        "timeline, 1 iteration of 1,000 groups": "/v1/jobs/wide/timeline?iterations=1",
        "events, a page of 500": "/v1/jobs/long/events",
    }


async def measure_requests(client: httpx.AsyncClient, paths: dict[str, str]) -> dict[str, dict[str, float]]:
    took: dict[str, list[float]] = {name: [] for name in paths}
    sizes: dict[str, int] = {}
    for _ in range(REPEATS + 1):
        for name, path in paths.items():
            started = time.perf_counter()
            answer = await client.get(path)
            took[name].append(1000 * (time.perf_counter() - started))
            assert answer.status_code == 200, answer.text
            sizes[name] = len(answer.content)
    return {
        name: {
            "first_ms": round(times[0], 1),
            "median_ms": round(statistics.median(times[1:]), 1),
            "max_ms": round(max(times[1:]), 1),
            "bytes": sizes[name],
        }
        for name, times in took.items()
    }


# ---- the stream --------------------------------------------------------------------------------------------------


async def measure_stream(client: httpx.AsyncClient) -> dict[str, Any]:
    """Measure the stream of the long job from its beginning to its end."""
    sizes: dict[str, list[int]] = {}
    started, first_s, kind, size = time.perf_counter(), 0.0, "comment", 0
    async with client.stream("GET", "/v1/jobs/long/stream", timeout=60) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            size += len(line.encode()) + 1
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            if not line:  # the end of a message
                first_s = first_s or time.perf_counter() - started
                sizes.setdefault(kind, []).append(size)
                kind, size = "comment", 0
    return {
        "first_message_ms": round(1000 * first_s, 1),
        "all_messages_ms": round(1000 * (time.perf_counter() - started), 1),
        "messages": {kind: {"num": len(s), "bytes_median": statistics.median(s)} for kind, s in sizes.items()},
    }


async def run(num_iterations: int) -> dict[str, Any]:
    note_redis(EMBEDDED)
    with temporary_folder() as folder, own_redis(folder) as redis_url:
        redis = connect(redis_url)
        ledger = Ledger(redis)
        await write_jobs(ledger, num_iterations)
        with broker(redis_url, folder) as (url, _):
            async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
                answers = await measure_requests(client, requests(num_iterations))
                whole = await measure_stream(client)
        size_bytes = int((await redis.info("memory"))["used_memory"])
        await redis.aclose()
    return {
        "num_iterations": num_iterations,
        "num_responses": num_iterations * NUM_GROUPS * NUM_RESPONSES,
        "tokens_of_a_response": NUM_TOKENS,
        "redis_bytes": size_bytes,
        "requests": answers,
        "stream_of_the_whole_job": whole,
    }


if __name__ == "__main__":
    start(command_line(__doc__))
    save("dashboard_api", asyncio.run(run(NUM_ITERATIONS)))
