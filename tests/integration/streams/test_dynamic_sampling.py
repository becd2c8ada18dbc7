"""Dynamic sampling in the ledger: an accepted group whose rewards are equal is replaced by the next spare prompt, once.

That this holds in any order of calls is checked in tests/model.
"""

import pytest

from onbeat.contracts.records import IterationRecord
from onbeat.contracts.states import IterationState, Verdict
from onbeat.streams.codec import PromptTask, RolloutGroup, decode_task
from onbeat.streams.keys import JobKeys
from onbeat.streams.ledger import Ledger
from onbeat.streams.records import read_iterations
from onbeat.streams.signal import Signal
from services.broker.auditor import run_audit
from services.trainer.replay import read_record
from tests.world import World, failed_group, make_group, tasks_for

BY_REWARD = Signal()
ROLLOUT = {"num_prompts_per_iteration": 2, "max_prompts_per_iteration": 4}


async def open_job(ledger: Ledger) -> tuple[str, str]:
    """Iteration 0 has two groups and two spare prompts; returns (job id, epoch)."""
    job_id, epoch = await World(ledger).started_job(rollout=ROLLOUT)
    tasks = tasks_for(0, 4)
    assert await ledger.iterations.open(job_id, 0, 0, tasks[:2], tasks[2:]) == ""
    return job_id, epoch


def equal_group(task: PromptTask) -> RolloutGroup:
    group = make_group(task)
    for response in group.responses:
        response.reward = 1.0
    return group


def group_of_one_opinion(task: PromptTask) -> RolloutGroup:
    group = make_group(task)
    for response in group.responses[1:]:
        response.reward, response.has_no_reward = 0.0, True
    return group


async def submit_next(ledger: Ledger, job_id: str, make: object, signal: Signal = BY_REWARD) -> str:
    """Be a rollout for one group; returns its id."""
    (claim,) = await World(ledger).claim_all(job_id, count=1)
    assert callable(make)
    assert await ledger.rollout.submit(job_id, claim.entry_id, make(claim.task), signal) is Verdict.ACCEPTED
    return claim.task.group_id


async def fields_of(ledger: Ledger, job_id: str) -> tuple[str, str, str]:
    fields = await ledger.iterations.fields(job_id, 0)
    return fields["state"], fields["num_groups"], fields["num_replaced"]


@pytest.mark.parametrize("make", [equal_group, failed_group, group_of_one_opinion])
async def test_group_without_other_rewards_is_replaced_by_the_next(ledger, world, make):
    job_id, epoch = await open_job(ledger)
    assert await submit_next(ledger, job_id, make) == "0-0"
    assert await fields_of(ledger, job_id) == (IterationState.OPEN, "3", "1")
    assert (await ledger.iterations.groups(job_id, 0))["0-2"].startswith("waiting:")
    assert await submit_next(ledger, job_id, make_group) == "0-1"
    assert await submit_next(ledger, job_id, make_group) == "0-2"
    assert await fields_of(ledger, job_id) == (IterationState.DRAINED, "3", "1")
    assert not await ledger.redis.exists(JobKeys(job_id).spares(0))
    assert await world.commit(job_id, epoch, 0)
    report = await run_audit(ledger, job_id)
    assert (report.is_clean, report.num_groups) == (True, 3)
    groups, _, _ = await read_record(ledger, job_id, 0, 0)
    assert [group.group_id for group in groups] == ["0-0", "0-1", "0-2"]


@pytest.mark.parametrize(("num_equal", "missing"), [(4, "2 groups"), (3, "1 group")])
async def test_used_up_prompts_end_the_iteration_with_an_event(ledger, num_equal, missing):
    job_id, _ = await open_job(ledger)
    for number in range(4):
        await submit_next(ledger, job_id, equal_group if number < num_equal else make_group)
    assert await fields_of(ledger, job_id) == (IterationState.DRAINED, "4", "2")
    (event,) = [event for event in await ledger.event_log.read(job_id) if event.kind == "iteration.short"]
    assert event.message.startswith(f"iteration 0 has used all of its prompts, and is {missing} with signal short")
    (record,) = await read_iterations(ledger, job_id, -1, 1)
    assert (record.num_replaced, record.num_not_replaced) == (2, num_equal - 2)
    assert (await run_audit(ledger, job_id)).is_clean


async def test_job_without_spare_prompts_keeps_its_groups(ledger, world):
    job_id, _ = await world.started_job()
    assert await ledger.iterations.open(job_id, 0, 0, tasks_for(0)) == ""
    for _ in range(2):
        await submit_next(ledger, job_id, equal_group)
    fields = await ledger.iterations.fields(job_id, 0)
    assert (fields["state"], fields["num_groups"]) == (IterationState.DRAINED, "2")
    assert "iteration.short" not in {event.kind for event in await ledger.event_log.read(job_id)}
    assert (await run_audit(ledger, job_id)).is_clean


async def test_evaluation_takes_no_spare_prompt(ledger, world):
    job_id, _ = await open_job(ledger)
    task = PromptTask(group_id="eval-0-0", iteration=0, is_evaluation=True, text="held out")
    assert await ledger.evaluations.open(job_id, 0, 0, 1, [task]) == ""
    claims = await world.claim_all(job_id)
    (of_evaluation,) = [claim for claim in claims if claim.task.is_evaluation]
    group = equal_group(of_evaluation.task)
    assert await ledger.rollout.submit(job_id, of_evaluation.entry_id, group) is Verdict.ACCEPTED
    assert await ledger.redis.llen(JobKeys(job_id).spares(0)) == 4
    assert await fields_of(ledger, job_id) == (IterationState.OPEN, "2", "0")


async def test_audit_sees_spare_prompts_out_of_order(ledger, world):
    job_id, _ = await world.started_job(rollout=ROLLOUT)
    tasks = tasks_for(0, 4)
    assert await ledger.iterations.open(job_id, 0, 0, tasks[:2], [tasks[3], tasks[2]]) == ""
    await submit_next(ledger, job_id, equal_group)
    violation = (await run_audit(ledger, job_id)).violation
    assert violation is not None
    assert violation.endswith("0-3 took its place, 0-2 is the next prompt")


@pytest.mark.parametrize(
    ("make", "lie", "num_later", "violation"),
    [
        (make_group, False, 0, "group 0-0 was replaced although its rewards differ"),
        (equal_group, True, 0, "group 0-0 was not replaced although its rewards are equal"),
        (equal_group, True, 3, "group 0-0 was not replaced although its rewards are equal"),  # then no prompt is left
    ],
)
async def test_audit_sees_a_group_that_was_replaced_against_the_rule(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, make: object, lie: bool, num_later: int, violation: str
) -> None:
    job_id, _ = await open_job(ledger)
    with monkeypatch.context() as patched:
        patched.setattr(Signal, "is_in", lambda signal, group: lie)  # a rollout of somebody else's
        await submit_next(ledger, job_id, make)
    for _ in range(num_later):
        await submit_next(ledger, job_id, equal_group)
    assert (await run_audit(ledger, job_id)).violation == violation


def wrong_group(task: PromptTask) -> RolloutGroup:
    """Make a group whose responses are wrong, and differ in their length alone."""
    group = make_group(task)
    for response in group.responses:
        response.reward_parts.update({"right": 0.0, "short": response.reward})
    return group


def right_group(task: PromptTask) -> RolloutGroup:
    group = wrong_group(task)
    group.responses[0].reward_parts["right"] = 1.0
    return group


async def test_groups_without_the_jobs_signal_are_replaced(ledger: Ledger, world: World) -> None:
    parts = [{"name": "exact", "part": "right"}, {"name": "regex", "options": {"pattern": "x"}, "part": "short"}]
    sections = {"rollout": ROLLOUT, "reward": parts, "objective": {"signal": "part:right"}}
    job_id, epoch = await world.started_job(**sections)
    tasks = tasks_for(0, 4)
    assert await ledger.iterations.open(job_id, 0, 0, tasks[:2], tasks[2:]) == ""
    for make in (wrong_group, right_group, right_group):
        await submit_next(ledger, job_id, make, Signal("part:right"))
    assert await fields_of(ledger, job_id) == (IterationState.DRAINED, "3", "1")
    assert await world.commit(job_id, epoch, 0)
    assert (await run_audit(ledger, job_id)).is_clean
    groups, _, _ = await read_record(ledger, job_id, 0, 0)
    assert [Signal("part:right").is_in(group) for group in groups] == [False, True, True]


async def test_audit_sees_groups_replaced_by_another_signal(ledger: Ledger, world: World) -> None:
    job_id, _ = await world.started_job(rollout=ROLLOUT, solved_at=1.0, objective={"signal": "solved"})
    tasks = tasks_for(0, 4)
    assert await ledger.iterations.open(job_id, 0, 0, tasks[:2], tasks[2:]) == ""
    await submit_next(ledger, job_id, wrong_group, Signal("part:right"))
    violation = "group 0-0 was replaced although it has signal (objective.signal = solved)"
    assert (await run_audit(ledger, job_id)).violation == violation


async def test_each_iteration_has_its_own_prompts(broker, ledger, world):
    """Iteration 0 has the first four of five rows, iteration 1 the fifth and the first three; two are spare."""
    job_id = await world.create_job(rollout=ROLLOUT, data={"order": "in_order"})
    epoch = await world.start_training(job_id)
    seen = {}
    for iteration in range(2):
        await world.wait_open(job_id, iteration)
        await submit_next(ledger, job_id, equal_group if iteration == 0 else make_group)
        tasks = [decode_task(fields[b"task"]) for _, fields in await ledger.redis.xrange(JobKeys(job_id).prompts)]
        seen |= {task.group_id: task.messages[-1].content for task in tasks}
        for _ in tasks:
            await submit_next(ledger, job_id, make_group)
        assert await world.commit(job_id, epoch, iteration)
    text = (await broker.get("/metrics")).text
    assert f'onbeat_replaced_groups_total{{job_id="{job_id}"}} 1.0' in text
    assert f'onbeat_groups_total{{job_id="{job_id}",outcome="accepted"}} 5.0' in text
    assert 'outcome="replaced"' not in text
    assert seen == {"0-1": "say 1", "0-2": "say 2", "1-1": "say 0"}
    answer = (await broker.get(f"/v1/jobs/{job_id}/iterations")).json()["iterations"]
    records = [IterationRecord.model_validate(record) for record in answer]
    assert [(record.num_groups, record.num_replaced) for record in records[:2]] == [(3, 1), (2, 0)]
