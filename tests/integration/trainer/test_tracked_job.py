"""Curves of a real ledger: those of REST, each point once, whoever trains."""

import asyncio
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from onbeat.config import JobConfig
from onbeat.contracts.states import JobState
from onbeat.streams.ledger import Ledger
from onbeat.streams.records import metric_series, read_iterations
from services.trainer.job.lease import ClaimedJob
from services.trainer.trackers.follow import LeasedJob, tracking
from tests.world import World


async def test_two_trainers_in_turn_leave_the_curves_of_rest(
    ledger: Ledger, world: World, lease_of, tmp_path: Path, monkeypatch
) -> None:
    def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
        events.Reload()
        return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}

    async def train_iteration(ledger: Ledger, job_id: str, epoch: str, iteration: int) -> None:
        values = {"reward_mean": iteration / 4, "prompt_tokens": 30.0, "response_tokens": 70.0, "train/grad_norm": 1.5}
        await World(ledger).run_iteration(job_id, epoch, iteration, **values)

    monkeypatch.setattr("services.trainer.trackers.follow.LOOK_S", 0.05)
    job_id, epoch = await world.started_job(schedule={"num_iterations": 9})
    config = JobConfig.of_job(await ledger.jobs.fields(job_id))
    lease = lease_of(ClaimedJob(job_id, epoch, config, 30.0))
    for iterations in (range(3), range(3, 5)):
        trackers = tracking(LeasedJob(lease), job_id, config, tmp_path)
        await asyncio.to_thread(trackers.__enter__)
        for iteration in iterations:
            await train_iteration(ledger, job_id, epoch, iteration)
        await ledger.evaluations.fail(job_id, 0, 10, "no room")  # an evaluation without a score: nothing to draw
        await asyncio.to_thread(trackers.__exit__, None, None, None)
    job = LeasedJob(lease)
    assert await asyncio.to_thread(job.has_succeeded) is None
    await ledger.jobs.move(job_id, JobState.FAILED, "stopped")
    assert await asyncio.to_thread(job.has_succeeded) is False
    tracked = curves(tmp_path / "tensorboard")
    tokens_per_s = tracked.pop("iteration/tokens_per_s")
    series = metric_series(await read_iterations(ledger, job_id, -1, 100))
    assert tracked.keys() == series.keys()
    for name, points in series.items():
        assert tracked[name] == [(step, pytest.approx(value, rel=1e-6)) for step, value in points], name
    walls = dict(series["iteration/wall_s"])
    assert [step for step, _ in tokens_per_s] == list(range(5))
    assert abs(tokens_per_s[4][1] * walls[4] / 100 - 1) < 1e-3
