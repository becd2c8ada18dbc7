"""Any process is killed in mid-iteration: the job succeeds, no group is lost or trained twice, the bits are right."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from onbeat.config import JobConfig
from onbeat.streams.connection import connect
from onbeat.streams.ledger import Ledger
from onbeat.types import JobState
from services.trainer.checkpoint import CheckpointStore, TrainState
from services.trainer.loop import TrainLoop
from services.trainer.model import load_model
from services.trainer.policy import Policy
from services.trainer.replay import RecordedLink, read_record
from tests.e2e.stack import RunningStack, running, tiny_job

BIG = {"num_prompts_per_iteration": 12, "num_samples_per_prompt": 4, "max_response_tokens": 96}


def check_exactly_once(stack: RunningStack, job_id: str, tmp_path: Path) -> None:
    """Every iteration has its fixed set once; the final weights are those of one undisturbed pass over the stream."""
    job = stack.client.jobs.get(job_id)
    assert job.state is JobState.SUCCEEDED, job.error
    config = JobConfig.model_validate(job.config)
    groups, micro_batches = asyncio.run(read_stream(stack, job_id, config.schedule.num_iterations))
    for iteration in range(config.schedule.num_iterations):
        expected = [f"{iteration}-{index}" for index in range(config.rollout.num_prompts_per_iteration)]
        assert sorted(g.group_id for g in groups if g.iteration == iteration) == sorted(expected)
        assert sorted(i for batch in micro_batches[iteration] for i in batch) == sorted(expected)
    commits = [event.data["iteration"] for event in stack.events(job_id, "iteration.committed")]
    assert commits == list(range(config.schedule.num_iterations))
    assert job.checkpoint is not None
    trained = load_file(Path(job.checkpoint) / "model.safetensors")
    expected = undisturbed(config, groups, micro_batches, tmp_path)
    assert trained.keys() == expected.keys()
    assert all(torch.equal(trained[name], value) for name, value in expected.items())


async def read_stream(stack: RunningStack, job_id: str, num_iterations: int):
    redis = connect(stack.redis_url)
    groups, micro_batches, _ = await read_record(Ledger(redis), job_id, 0, num_iterations - 1)
    await redis.aclose()
    return groups, micro_batches


def undisturbed(config: JobConfig, groups, micro_batches, tmp_path: Path) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    model = load_model(config.model.path, torch.float32, torch.device("cpu"))
    start = TrainState.fresh("job", config.model.path)
    link = RecordedLink(config, groups, micro_batches)
    checkpoints = CheckpointStore(tmp_path / "replay", keep=1)
    TrainLoop(link, config, Policy.create(model, config), start, checkpoints, {}).run()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


BOUNDED = {"mode": "bounded", "max_staleness": 2, "num_iterations": 5}
KILLS = [("trainer", {}), ("broker", {}), ("rollout", {}), ("trainer", BOUNDED), ("rollout", BOUNDED)]


@pytest.mark.parametrize(("service", "schedule"), KILLS)
def test_killed_service_changes_nothing(service, schedule, tmp_path):
    with running(tmp_path) as stack:
        job = tiny_job(tmp_path, rollout=BIG, schedule=schedule, checkpoint={"every_iterations": 2})
        job_id = stack.client.jobs.create(job).id
        stack.wait_for_middle_of_iteration(job_id, 1, num_accepted=3)
        stack.kill(service)
        stack.wait(job_id)
        check_exactly_once(stack, job_id, tmp_path)


def test_killed_rollout_hands_its_groups_to_the_other(tmp_path):
    with running(tmp_path, num_rollouts=2) as stack:
        job_id = stack.client.jobs.create(tiny_job(tmp_path, rollout=BIG)).id
        stack.wait_for_middle_of_iteration(job_id, 1, num_accepted=2)
        stack.kill("rollout", worker_id="rollout-0")
        stack.wait(job_id)
        check_exactly_once(stack, job_id, tmp_path)


def test_killed_redis_comes_back_with_everything(tmp_path):
    with running(tmp_path) as stack:
        job_id = stack.client.jobs.create(tiny_job(tmp_path, rollout=BIG)).id
        stack.wait_for_middle_of_iteration(job_id, 1, num_accepted=3)
        kill_redis(stack)
        stack.wait(job_id)
        check_exactly_once(stack, job_id, tmp_path)


def kill_redis(stack: RunningStack) -> None:
    import psutil

    port = stack.redis_url.rpartition(":")[2].partition("/")[0]
    for process in psutil.process_iter(["name", "cmdline"]):
        command = " ".join(process.info["cmdline"] or [])
        is_server = process.info["name"].startswith("redis-server")
        if is_server and (f":{port}" in command or str(stack.data_dir) in command):
            process.kill()
            return
    raise AssertionError("found no Redis of this stack")


def test_trainer_killed_before_any_checkpoint_replays_from_the_start(tmp_path):
    with running(tmp_path) as stack:
        job_id = stack.client.jobs.create(tiny_job(tmp_path, rollout=BIG)).id
        stack.wait_for_middle_of_iteration(job_id, 2, num_accepted=3)
        stack.kill("trainer")
        stack.wait(job_id)
        check_exactly_once(stack, job_id, tmp_path)
        log = (stack.data_dir / "logs" / "trainer.log").read_text()
        assert "(replayed)" in log, json.dumps(log[-2000:])
