"""Prompts chosen by outcomes, with a real broker: the same choice by every one, its record, forks, the audit."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from onbeat.config import JobConfig
from onbeat.contracts.states import JobState, Verdict
from onbeat.streams.codec import PromptTask, RolloutGroup
from onbeat.streams.keys import JobKeys
from onbeat.streams.ledger import Ledger
from onbeat.streams.outcomes import Outcome
from onbeat.streams.records import read_iterations
from services.broker import auditor
from services.broker.auditor import run_audit
from services.broker.choice_audit import check_choices
from services.broker.datasets.choice import Choice, LedgerChooser
from services.broker.datasets.process import DatasetProcess
from tests.broker_fixtures import running_broker, submit
from tests.world import LEASE_S, World, make_group

DATA = {"type": "jsonl", "path": "rows.jsonl", "order": "difficulty", "difficulty": {"explore": 0.25}}
ROLLOUT = {"num_prompts_per_iteration": 4, "num_samples_per_prompt": 2}
NUM_ROWS, MIXED_ROWS = 40, range(0, 40, 4)


@pytest.fixture
def rows(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"row {number}", "answer": str(number)}) for number in range(NUM_ROWS)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def group_of(task: PromptTask) -> RolloutGroup:
    """Make the group of a prompt. The responses to some rows are always mixed, those to others never."""
    group = make_group(task)
    group.data_row = task.data_row
    for response in group.responses:
        response.reward = response.reward if task.data_row in MIXED_ROWS else 0.0
    return group


async def train(ledger: Ledger, job_id: str, epoch: str, iterations: range, *, is_late: bool = False) -> list[int]:
    """Be rollout and trainer. Return the rows in the order of the prompts; `is_late`: the groups arrive in reverse."""
    world, rows = World(ledger), []
    config = JobConfig.of_job(await ledger.jobs.fields(job_id))
    for iteration in iterations:
        await world.wait_open(job_id, iteration)
        claims = await world.claim_all(job_id)
        for claim in reversed(claims) if is_late else claims:
            group = group_of(claim.task)
            outcome = Outcome.of_group(config, group)
            assert await ledger.rollout.submit(job_id, claim.entry_id, group, outcome=outcome) is Verdict.ACCEPTED
        rows += [claim.task.data_row for claim in sorted(claims, key=lambda claim: claim.task.group_id)]
        assert await world.commit(job_id, epoch, iteration)
    return rows


async def run_job(broker: Any, ledger: Ledger, num_iterations: int, **how: Any) -> tuple[str, list[int]]:
    job_id = await submit(broker, data=DATA, rollout=ROLLOUT, schedule={"num_iterations": num_iterations})
    epoch = await World(ledger).start_training(job_id)
    rows = await train(ledger, job_id, epoch, range(num_iterations), **how)
    await ledger.jobs.move(job_id, JobState.SUCCEEDED, epoch=epoch)
    return job_id, rows


async def choices_of(ledger: Ledger, job_id: str, count: int) -> list[Choice]:
    return [Choice.from_json(choice) for choice, _ in await ledger.iterations.choices(job_id, range(count))]


@pytest.mark.usefixtures("rows")
async def test_rows_with_signal_come_again(broker, ledger):
    job_id, rows = await run_job(broker, ledger, 20)
    later = rows[len(rows) // 2 :]
    assert sum(row in MIXED_ROWS for row in later) / len(later) >= 0.5  # 0.25 of all rows
    assert len(set(rows)) > len(rows) / 3
    choices = await choices_of(ledger, job_id, 20)
    assert [pick.row for choice in choices for pick in choice.picks] == rows
    assert (await run_audit(ledger, job_id)).violation is None


@pytest.mark.usefixtures("rows")
async def test_choice_does_not_depend_on_arrival(broker, ledger):
    (_, rows), (_, later) = await run_job(broker, ledger, 8), await run_job(broker, ledger, 8, is_late=True)
    assert rows == later


@pytest.mark.usefixtures("rows")
async def test_another_broker_goes_on_with_the_same_choice(ledger, tmp_path):
    """The first broker ends after three iterations; the next one reads all of it from the ledger."""
    async with running_broker(ledger, tmp_path) as broker:
        _, uninterrupted = await run_job(broker, ledger, 7)
        job_id = await submit(broker, data=DATA, rollout=ROLLOUT, schedule={"num_iterations": 7})
        epoch = await World(ledger).start_training(job_id)
        rows = await train(ledger, job_id, epoch, range(3))
    async with running_broker(ledger, tmp_path):
        rows += await train(ledger, job_id, epoch, range(3, 7))
    assert rows == uninterrupted
    assert (await run_audit(ledger, job_id)).violation is None


@pytest.mark.usefixtures("rows")
async def test_record_says_what_was_chosen_and_why(broker, ledger):
    job_id, _ = await run_job(broker, ledger, 12)
    first, *_, last = await read_iterations(ledger, job_id, -1, 100)
    assert first.num_chosen == {"unseen": 4}
    assert (first.metrics["data/unseen_frac"], first.metrics["data/expected_signal"]) == (1.0, 0.5)
    assert last.num_chosen["signal"] >= 2
    assert sum(last.num_chosen.values()) == 4
    assert 0 < last.metrics["data/solved_before"] < 1
    answer = (await broker.get(f"/v1/jobs/{job_id}/iterations")).json()["iterations"]
    assert answer[0]["num_chosen"] == {"unseen": 4}
    choice = (await choices_of(ledger, job_id, 12))[11]
    groups = [(await broker.get(f"/v1/jobs/{job_id}/groups/11-{place}")).json() for place in range(4)]
    assert [group["chosen"] for group in groups] == [pick.words for pick in choice.picks]
    assert any("for its expected signal of" in group["chosen"] for group in groups)


@pytest.mark.usefixtures("rows")
async def test_outcomes_survive_the_groups(broker, ledger):
    job_id, _ = await run_job(broker, ledger, 6)
    stored = await ledger.iterations.choices(job_id, range(6))
    await ledger.redis.delete(JobKeys(job_id).rollouts, *(JobKeys(job_id).groups(number) for number in range(5)))
    assert await ledger.iterations.choices(job_id, range(6)) == stored
    assert all(len(outcomes) == 4 for _, outcomes in stored)
    await ledger.jobs.delete(job_id)
    assert await ledger.iterations.choices(job_id, range(6)) == [("", [])] * 6


@pytest.mark.usefixtures("rows")
async def test_fork_knows_what_its_parent_knew(broker, ledger, tmp_path):
    schedule = {"num_iterations": 9}
    parent = await submit(broker, data=DATA, rollout=ROLLOUT, schedule=schedule)
    epoch = await World(ledger).start_training(parent)
    rows = await train(ledger, parent, epoch, range(5))
    path = tmp_path / "checkpoints" / "iteration-000005"
    path.mkdir(parents=True)
    (path / "state.json").touch()
    await ledger.trainer.checkpointed(parent, epoch, 0, 5, str(path))
    rows += await train(ledger, parent, epoch, range(5, 9))
    await ledger.jobs.move(parent, JobState.SUCCEEDED, epoch=epoch)
    forked = {"fork": {"job": parent, "iteration": 5}, "rollout": ROLLOUT, "schedule": schedule}
    fork = await submit(broker, data=DATA, **forked)
    other = await submit(broker, data=DATA | {"path": "prompts.jsonl"}, **forked)
    await ledger.jobs.delete(parent)
    epoch = await ledger.trainer.claim_job(fork, "trainer-b", LEASE_S)
    assert epoch is not None
    await ledger.versions.announce(fork, epoch, 5, "127.0.0.1:1", "d5")
    assert await train(ledger, fork, epoch, range(5, 9)) == rows[20:]
    await ledger.jobs.move(fork, JobState.SUCCEEDED, epoch=epoch)
    assert (await run_audit(ledger, fork)).violation is None
    assert await ledger.iterations.outcomes_before(other) == ""  # other rows


@pytest.mark.usefixtures("rows")
async def test_bounded_choice_reads_committed_outcomes_only(ledger, tmp_path):
    """The outcomes of iteration t - 1 are not complete when iteration t opens, so no choice depends on them."""
    config = JobConfig.model_validate(
        {
            "name": "test",
            "model": {"path": "bundled:smollm2-135m-instruct"},
            "data": DATA,
            "reward": {"name": "exact"},
            "rollout": {**ROLLOUT, "max_response_tokens": 8},
            "schedule": {"mode": "bounded", "max_staleness": 1, "num_iterations": 9},
        }
    )
    choices = [await choice_with(ledger, tmp_path, config, last_solved) for last_solved in (0, 1)]
    assert choices[0][:3] == choices[1][:3]
    assert choices[0][3] != choices[1][3]


async def choice_with(ledger: Ledger, folder: Path, config: JobConfig, last_solved: int) -> Sequence[str]:
    """Return the choices of iterations 0 to 3, where one of iteration 1's groups had so many solved responses."""
    process, job_id = DatasetProcess(folder, 10.0, 2048), f"job-{last_solved}"
    keys, choices = JobKeys(job_id), []
    try:
        for iteration in range(4):
            chooser = LedgerChooser(ledger, process, job_id)
            _, choice = await chooser.choose(config, iteration)
            choices.append(choice)
            await ledger.redis.hset(keys.iteration(iteration), "choice", choice)
            for place, pick in enumerate(Choice.from_json(choice).picks):
                num_solved = last_solved if iteration == 1 else 0
                await ledger.redis.hset(keys.outcomes(iteration), f"{place}", str(Outcome(pick.row, num_solved, 2)))
    finally:
        await process.close()
    return choices


# ---- the audit ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("rows")
async def test_audit_of_a_running_job_finds_nothing(broker, ledger, monkeypatch):
    """A group is accepted after the audit has read the log and the groups, and before it reads outcomes."""
    job_id = await submit(broker, data=DATA, rollout=ROLLOUT, schedule={"num_iterations": 2})
    await World(ledger).start_training(job_id)
    await World(ledger).wait_open(job_id, 0)
    config, claims = JobConfig.of_job(await ledger.jobs.fields(job_id)), await World(ledger).claim_all(job_id)

    async def accept() -> None:
        claim = claims.pop()
        group = group_of(claim.task)
        await ledger.rollout.submit(job_id, claim.entry_id, group, outcome=Outcome.of_group(config, group))

    async def accept_and_check(*arguments: Any) -> None:
        await accept()
        await check_choices(*arguments)

    await accept()
    monkeypatch.setattr(auditor, "check_choices", accept_and_check)
    assert (await run_audit(ledger, job_id)).violation is None
    assert len(claims) == 2


@pytest.mark.usefixtures("rows")
async def test_audit_sees_a_changed_choice(broker, ledger):
    job_id, _ = await run_job(broker, ledger, 4)
    key, (*_, choice) = JobKeys(job_id).iteration(3), await choices_of(ledger, job_id, 4)
    changed = choice.to_json().replace(f'"row": {choice.picks[0].row},', '"row": 39,', 1)
    await ledger.redis.hset(key, "choice", changed)
    violation = (await run_audit(ledger, job_id)).violation
    assert violation == "iteration 3: the record of its choice of prompts is not that of the log"


@pytest.mark.usefixtures("rows")
async def test_audit_sees_a_changed_outcome(broker, ledger):
    job_id, rows = await run_job(broker, ledger, 4)
    await ledger.redis.hset(JobKeys(job_id).outcomes(2), "2-0", str(Outcome(rows[8], 2, 2)))
    violation = (await run_audit(ledger, job_id)).violation
    assert violation == "iteration 2: its recorded outcomes are not those of its groups"


@pytest.mark.usefixtures("rows")
async def test_audit_sees_a_choice_that_does_not_follow(broker, ledger, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("services.broker.datasets.difficulty.REST", 40)  # a broker of somebody else's
        patched.setattr("services.broker.datasets.difficulty.FADING", 0.1)
        job_id, _ = await run_job(broker, ledger, 8)
    violation = (await run_audit(ledger, job_id)).violation
    assert violation is not None
    assert violation.endswith("its prompts are not those that follow from the outcomes before")
