"""Curves and tables of a real ledger: those of REST, each point once, whoever trains."""

import asyncio
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from onbeat.config import JobConfig
from onbeat.contracts.records import Sample
from onbeat.contracts.states import JobState
from onbeat.streams.codec import PromptTask
from onbeat.streams.ledger import Ledger
from onbeat.streams.records import metric_series, read_iterations
from services.trainer.job.lease import ClaimedJob
from services.trainer.trackers.follow import LeasedJob, tracking
from services.trainer.trackers.points import Point
from services.trainer.trackers.samples import MAX_ROWS, read_rows
from tests.world import World, tasks_for


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


# ---- tables of samples ---------------------------------------------------------------------------------------------


async def test_first_prompts_of_an_iteration_are_a_table_while_kept(ledger: Ledger, world: World) -> None:
    job_id, epoch = await world.started_job(schedule={"num_iterations": 9})
    assert await ledger.iterations.open(job_id, 0, 0, tasks_for(0, MAX_ROWS + 4)) == ""
    await world.drain(job_id)
    assert await world.commit(job_id, epoch, 0)
    await world.run_iteration(job_id, epoch, 1)
    rows = await read_rows(ledger, job_id, Point(0, 1.0, {}))
    assert rows == [(0, f"prompt of 0-{place}", "response 0", 0.0, False, "") for place in range(MAX_ROWS)]
    assert await read_rows(ledger, job_id, Point(1, 1.0, {})) == [], "not each iteration has a table"
    await ledger.trainer.checkpointed(job_id, epoch, 1, 2, "/c/2")
    assert await ledger.iterations.trim(job_id, 0, 1)
    assert await read_rows(ledger, job_id, Point(0, 1.0, {})) == []


async def test_kept_samples_of_an_evaluation_are_a_table(ledger: Ledger, world: World) -> None:
    job_id, _ = await world.started_job()
    tasks = [PromptTask(group_id="eval-0-0", is_evaluation=True, text="p")]
    assert await ledger.evaluations.open(job_id, 0, 0, 3, tasks) == ""
    point = Point(0, 1.0, {}, is_evaluation=True)
    assert await read_rows(ledger, job_id, point) == [], "it is not over"
    await world.drain(job_id)
    place = {"iteration": 0, "group_id": "eval-0-0", "policy_version": 0, "num_tokens": 8, "finish_reason": "length"}
    parts = {"format": 0.5, "answer": 1.0}
    sample = Sample(**place, prompt="2 + 2", response="4 is", reward=1.5, reward_parts=parts)
    assert await ledger.evaluations.finish(job_id, 0, "", {"reward_mean": 1.5}, [sample])
    assert await read_rows(ledger, job_id, point) == [(0, "2 + 2", "4 is", 1.5, True, "answer 1, format 0.5")]
