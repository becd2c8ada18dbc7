"""The cost of a broker with many pending jobs: time of every read that looks at jobs, and processor time when idle.

The jobs are written through the ledger, then a real broker serves them from a real Redis over loopback, with no trainer
and no rollout. Goals: every read within READ_MS, less than IDLE_SHARE of a core without requests. The exit code says
whether they were reached.
"""

import asyncio
import sys
import time
from typing import Any

import httpx
from dashboard_api import JOB, broker, measure_requests, processor_s
from harness import command_line, note_redis, save, start, temporary_folder

from onbeat.config import JobConfig
from onbeat.streams.connection import connect
from onbeat.streams.ledger import Ledger
from tests.conftest import EMBEDDED, own_redis

NUM_JOBS = 10_000
READ_MS, IDLE_SHARE = 200, 0.01
IDLE_S = 60.0
CREATED_AT_ONCE = 50


async def create_jobs(ledger: Ledger, num_jobs: int) -> list[str]:
    config = JobConfig.model_validate(JOB | {"schedule": {"num_iterations": 10}}).model_dump(mode="json")
    job_ids = [f"job-{index:06}" for index in range(num_jobs)]
    for first in range(0, num_jobs, CREATED_AT_ONCE):
        batch = job_ids[first : first + CREATED_AT_ONCE]
        await asyncio.gather(*(ledger.jobs.create(job_id, config, 10, 0) for job_id in batch))
    return job_ids


def reads(job_ids: list[str]) -> dict[str, str]:
    last = job_ids[-1]
    return {
        "livez": "/livez",
        "readyz": "/readyz",
        "metrics": "/metrics",
        "pool": "/v1/pools/default",
        "doctor": "/v1/doctor",
        "jobs, 20": "/v1/jobs?limit=20",
        "jobs, 200": "/v1/jobs",
        "jobs, 500": "/v1/jobs?limit=500",
        "jobs, 200 pending": "/v1/jobs?state=PENDING",
        "jobs, 200 running": "/v1/jobs?state=RUNNING",
        "jobs, 200 failed": "/v1/jobs?state=FAILED",
        "the last job": f"/v1/jobs/{last}",
        "explain the last job": f"/v1/jobs/{last}:explain",
        "events of the last job": f"/v1/jobs/{last}/events",
        "workers": "/v1/workers",
        "models": "/v1/models",
    }


async def measure_idle(ledger: Ledger, pid: int) -> dict[str, float]:
    async def num_commands() -> int:
        return int((await ledger.redis.info("stats"))["total_commands_processed"])

    spent_s, commands, started = processor_s(pid), await num_commands(), time.monotonic()
    await asyncio.sleep(IDLE_S)
    took_s = time.monotonic() - started
    return {
        "processor_share": round((processor_s(pid) - spent_s) / took_s, 4),
        "redis_commands_per_s": round((await num_commands() - commands) / took_s, 1),
        "redis_connections": len(await ledger.redis.client_list()),
    }


async def run(num_jobs: int) -> dict[str, Any]:
    note_redis(EMBEDDED)
    with temporary_folder() as folder, own_redis(folder) as redis_url:
        async with connect(redis_url) as redis:  # all connections end with the block
            job_ids = await create_jobs(Ledger(redis), num_jobs)
        redis = connect(redis_url)
        ledger = Ledger(redis)
        with broker(redis_url, folder) as (url, pid):
            async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
                await asyncio.sleep(5)
                idle = await measure_idle(ledger, pid)
                answers = await measure_requests(client, reads(job_ids))
        await redis.aclose()
    return {"num_jobs": num_jobs, "idle": idle, "reads": answers}


def main() -> int:
    result = asyncio.run(run(NUM_JOBS))
    slow = [name for name, times in result["reads"].items() if times["max_ms"] > READ_MS]
    is_good = not slow and result["idle"]["processor_share"] < IDLE_SHARE
    save("waiting_jobs", result | {"reads_over_the_goal": slow, "is_within_the_goals": is_good})
    return 0 if is_good else 1


if __name__ == "__main__":
    start(command_line(__doc__))
    sys.exit(main())
