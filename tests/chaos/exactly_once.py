"""Checks of a job whose processes were killed: every group once, a clean audit, the bits of an undisturbed pass."""

import asyncio
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from onbeat.config import JobConfig
from onbeat.contracts.states import JobState
from onbeat.streams.codec import RolloutGroup
from onbeat.streams.connection import connect
from onbeat.streams.keys import TRAINER_GROUP, JobKeys
from onbeat.streams.ledger import Ledger
from services.trainer.checkpoints.store import CheckpointStore, TrainState
from services.trainer.loop import TrainLoop
from services.trainer.model.model import load_model
from services.trainer.policy import Policy
from services.trainer.replay import RecordedJob, read_record
from tests.e2e.stack import RunningStack


def check_exactly_once(stack: RunningStack, job_id: str, scratch: Path) -> list[RolloutGroup]:
    """Check that every iteration has its fixed set once, and that the final weights are those without faults; return
    the groups."""
    job = stack.wait(job_id)
    assert job.state is JobState.SUCCEEDED, job.error
    report = stack.client.jobs.audit(job_id)
    assert report.is_clean, report.violation
    config = JobConfig.model_validate(job.config)
    if job.max_tokens_per_micro_batch is not None:  # a trainer has chosen it
        config = config.with_row_tokens(job.max_tokens_per_micro_batch)
    groups, micro_batches, num_left = asyncio.run(read_streams(stack, job_id, config.schedule.num_iterations))
    assert num_left == 0, f"{num_left} prompts or groups were never acknowledged"
    for record in stack.client.jobs.iterations(job_id):
        iteration = record.iteration
        num_groups = config.at(iteration).rollout.num_prompts_per_iteration + record.num_replaced
        expected = [f"{iteration}-{index}" for index in range(num_groups)]
        assert sorted(g.group_id for g in groups if g.iteration == iteration) == sorted(expected)
        assert sorted(i for batch in micro_batches[iteration] for i in batch) == sorted(expected)
    assert not [group.group_id for group in groups if group.HasField("failure")]
    commits = [event.data["iteration"] for event in stack.events(job_id, "iteration.committed")]
    assert commits == list(range(config.schedule.num_iterations))
    assert job.checkpoint is not None
    trained = load_file(Path(job.checkpoint) / "model.safetensors")
    expected_weights = undisturbed(config, groups, micro_batches, scratch)
    assert trained.keys() == expected_weights.keys()
    assert all(torch.equal(trained[name], value) for name, value in expected_weights.items())
    return groups


async def read_streams(stack: RunningStack, job_id: str, num_iterations: int):
    """Groups, micro-batches, and how many entries are still owed to somebody."""
    redis, job = connect(stack.redis_url), JobKeys(job_id)
    groups, micro_batches, _ = await read_record(Ledger(redis), job_id, 0, num_iterations - 1)
    pending: Any = await redis.xpending(job.rollouts, TRAINER_GROUP)
    num_left = await redis.xlen(job.prompts) + pending["pending"]
    await redis.aclose()
    return groups, micro_batches, num_left


def undisturbed(config: JobConfig, groups, micro_batches, scratch: Path) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    model = load_model(config.model.path, torch.float32, torch.device("cpu"))
    start = TrainState("job", config.model.path)
    recorded = RecordedJob(groups, micro_batches)
    checkpoints = CheckpointStore(scratch / "replay", keep=1)
    TrainLoop(recorded, config, Policy.create(model, config), start, checkpoints).run()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def accepted_at(stack: RunningStack, job_id: str, num_iterations: int) -> dict[str, float]:
    """Group id -> Unix time of its acceptance."""
    times = {}
    for iteration in range(num_iterations):
        for group_id, state in stack.redis.hgetall(JobKeys(job_id).groups(iteration)).items():
            times[group_id.decode()] = float(state.decode().removeprefix("accepted:").split("-")[0]) / 1000
    return times
