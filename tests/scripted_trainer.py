"""A trainer and two rollouts without a model: they commit an iteration of the oldest job every `STEP_S` seconds.

Runs inside a test (`train_jobs`) or as a process in place of `services.trainer` (`python -m tests.scripted_trainer`).
"""

import asyncio
import contextlib
import json
import os

from onbeat.contracts.errors import JobNotFound, LeaseLost
from onbeat.contracts.records import PublishedWeights, WeightsRecord, WeightUpdate
from onbeat.contracts.states import IterationState, JobState, Verdict
from onbeat.streams.connection import connect
from onbeat.streams.ledger import Ledger
from tests.world import LEASE_S, World, make_group

STEP_S = float(os.environ.get("SCRIPTED_STEP_S", "0.05"))
CHECKPOINT = "/somewhere/checkpoint"
RESPONSE = "[bold]\x1b[2J2"  # neither markup nor a control code, but text of a model
ROLLOUTS = ("rollout-0", "rollout-1")


async def train_jobs(ledger: Ledger) -> None:
    """Train the jobs of the default pool, one after the other, until it is cancelled."""
    while True:
        for job_id in await ledger.lists.waiting("default", 0, 1):
            with contextlib.suppress(JobNotFound, LeaseLost):  # it was deleted
                await train_job(ledger, job_id)
        await asyncio.sleep(0.01)


async def train_job(ledger: Ledger, job_id: str) -> None:
    epoch = await ledger.trainer.claim_job(job_id, "trainer-0", LEASE_S)
    assert epoch is not None
    num_iterations = int((await ledger.jobs.fields(job_id))["num_iterations"])
    await publish(ledger, job_id, epoch, 0)
    iteration = 0
    while await ledger.trainer.renew_job(job_id, epoch, LEASE_S) is not JobState.CANCELLING:
        await generate(ledger, job_id)
        is_drained = await ledger.iterations.state(job_id, iteration) is IterationState.DRAINED
        is_evaluated = await has_scores(ledger, job_id, iteration)
        if is_drained and is_evaluated:
            await publish(ledger, job_id, epoch, iteration + 1)
            assert await World(ledger).commit(job_id, epoch, iteration, **metrics_of(iteration))
            await ledger.trainer.checkpointed(job_id, epoch, iteration, iteration + 1, CHECKPOINT)
            iteration += 1
        elif iteration == num_iterations and is_evaluated:
            await ledger.jobs.move(job_id, JobState.SUCCEEDED)
            return
        await asyncio.sleep(STEP_S)
    await ledger.jobs.move(job_id, JobState.CANCELLED)


def metrics_of(iteration: int) -> dict[str, float]:
    """Return numbers that are easily computed by hand. Only the first two iterations have a loss."""
    metrics = {"num_responses": 4, "prompt_tokens": 40, "response_tokens": 60, "reward_mean": iteration / 10}
    return metrics | ({"train/loss": 1.5 - iteration / 4} if iteration < 2 else {})


async def publish(ledger: Ledger, job_id: str, epoch: str, version: int) -> None:
    """Publish the version, and be the rollouts that pull it."""
    record = weights_record(version, version / 10 or None)
    published = PublishedWeights.model_validate(record.model_dump())
    await ledger.versions.announce(job_id, epoch, version, "127.0.0.1:1", f"d{version}", published)
    for rollout, update in record.rollouts.items():
        await ledger.versions.engine_ready(job_id, version, rollout, update)


def weights_record(version: int, open_s: float | None = None) -> WeightsRecord:
    """Return 1000 bytes, of which two rollouts get 10 as a delta. They get the first version in full."""
    delta_bytes = 10 if version else None
    update = WeightUpdate(received_bytes=delta_bytes or 1000, pull_s=0.2, apply_s=0.1, load_s=0.3, open_s=open_s)
    sent = {"full_bytes": 1000, "delta_bytes": delta_bytes, "encode_s": 0.05, "publish_s": 0.4}
    return WeightsRecord(policy_version=version, rollouts=dict.fromkeys(ROLLOUTS, update), **sent)


async def generate(ledger: Ledger, job_id: str) -> None:
    """Answer all prompts that wait. The reward is a tenth of the policy version."""
    for claim in await World(ledger).claim_all(job_id, ROLLOUTS[0]):
        group = make_group(claim.task, ROLLOUTS[0])
        for response in group.responses:
            response.text, response.reward = RESPONSE, group.policy_version / 10
        assert await ledger.rollout.submit(job_id, claim.entry_id, group) is Verdict.ACCEPTED


async def has_scores(ledger: Ledger, job_id: str, version: int) -> bool:
    """Return whether all evaluations up to this version are over."""
    fields = await ledger.jobs.fields(job_id)
    if json.loads(fields["config"])["evaluation"] is None:
        return True
    return int(fields.get("next_evaluation", "0")) > version and not await ledger.evaluations.open_ones(job_id)


if __name__ == "__main__":
    asyncio.run(train_jobs(Ledger(connect(os.environ["ONBEAT_REDIS_URL"], retry_s=5))))
