"""`explain` says who waits for whom in every phase of a job, and the doctor what is wrong, on a real Redis."""

import asyncio
import os
import re
import sys
import threading
import time
from typing import Any

import pytest

from onbeat.config import JobConfig
from onbeat.contracts.deadlines import SILENT_S, STARTING_S
from onbeat.contracts.records import EpisodeWait, Finding, HostMemory, TrainerRecord, WorkerRecord
from onbeat.contracts.states import JobState
from onbeat.process.loop_thread import LoopThread
from onbeat.streams import keys
from onbeat.streams.connection import connect
from onbeat.streams.keys import JobKeys
from onbeat.streams.ledger import Ledger
from services.broker.deadlines import ARRIVAL_S
from services.broker.doctor.diagnosis import diagnose, examine_pools, explain_silence
from services.broker.doctor.explain import explain_job, explain_starting
from services.trainer.feed import GroupFeed
from services.trainer.job.lease import ClaimedJob, Lease
from services.trainer.job.presence import Presence
from services.trainer.job.session import JobSession
from tests.broker_fixtures import running_broker
from tests.conftest import free_port, own_redis, start_redis
from tests.waiting import eventually
from tests.world import World, failed_group, make_group, tasks_for

pytestmark = pytest.mark.slow

LATER_S = 30.0  # long enough for a slow machine


async def beat_trainer(ledger: Ledger, pool: str, trainer: str, state: str, job_id: str | None = None) -> None:
    await World(ledger).beat(pool, TrainerRecord(id=trainer, job_id=job_id, state=state))


async def beat_rollout(ledger: Ledger, pool: str, worker: str, state: str, **fields: Any) -> None:
    ago_s = fields.pop("ago_s", 0.0)
    await World(ledger).beat(pool, WorkerRecord(id=worker, state=state, **fields), ago_s)


async def open_iteration(ledger: Ledger, job_id: str, num_groups: int = 8) -> None:
    assert not await ledger.iterations.open(job_id, 0, 0, tasks_for(0, num_groups))


def sentence_of(finding: Finding) -> str:
    """Return the doctor's sentence with N in place of whole seconds: a machine may be slow."""
    return re.sub(r"\b\d+ s\b", "N s", finding.sentence)


def text_of(findings: list[Finding]) -> str:
    return "\n".join(map(sentence_of, findings))


def problems(findings: list[Finding]) -> list[str]:
    return [sentence_of(finding) for finding in findings if finding.is_problem]


# ---- pending -----------------------------------------------------------------------------------------------------


async def test_pending_job_without_trainers_says_what_to_start(ledger, world, pool):
    job_id = await world.create_job(pool=pool, schedule={"start_deadline_s": 5000})
    findings = await explain_job(ledger, job_id)
    assert findings[0].is_problem
    assert f"no trainer of pool {pool} has asked for jobs in the last N s; start one: " in sentence_of(findings[0])
    assert findings[0].waits_for == f"a trainer of pool {pool}"
    (deadline,) = [finding for finding in findings if finding.next == "the job fails"]
    assert deadline.deadline_s is not None
    assert 4900 < deadline.deadline_s <= 5000
    assert "no rollout is alive" in text_of(findings)
    await beat_trainer(ledger, pool, "trainer-z", "stopped")
    assert "(the last one, trainer-z, stopped N s ago)" in text_of(await explain_job(ledger, job_id))


async def test_pending_job_waits_its_turn_or_is_taken_next(ledger, world, pool):
    first, second = await world.create_job(pool=pool), await world.create_job(pool=pool)
    await beat_rollout(ledger, pool, "rollout-a", "idle")
    await beat_trainer(ledger, pool, "trainer-a", "training", "job-0")
    findings = await explain_job(ledger, second)
    assert f"trainer-a trains job-0; before it: 1 pending job of pool {pool}" in text_of(findings)
    assert problems(findings) == []
    await beat_trainer(ledger, pool, "trainer-b", "idle")
    assert "trainer-b asks for jobs and takes it next" in text_of(await explain_job(ledger, first))
    await ledger.redis.hset(JobKeys(first).job, "created_at", await ledger.now() - 60)
    assert "trainer-b asks for jobs but does not take it; see its log" in problems(await explain_job(ledger, first))[0]


async def test_lost_stream_is_a_problem_of_its_job_alone(ledger, world, pool, broker):
    job_id, other = await world.create_job(pool=pool), await world.create_job(pool=pool)
    await ledger.redis.delete(JobKeys(job_id).prompts)
    (finding,) = (await broker.get(f"/v1/jobs/{job_id}:explain")).json()["findings"]
    assert finding["sentence"].startswith(f"Redis refuses to read the streams of {job_id} (NOGROUP No such key ")
    findings = (await broker.get("/v1/doctor")).json()["findings"]
    assert [shown for shown in findings if shown["job_id"] == job_id] == [finding]
    assert f"streams of {other}: 0 prompts" in str(findings)
    assert "does not answer" not in str(findings)


# ---- starting ----------------------------------------------------------------------------------------------------


def test_starting_services_are_named_with_their_seconds():
    trainer = TrainerRecord(id="trainer-0", state="starting", last_seen_at=1000)
    rollout = WorkerRecord(id="rollout-0", state="starting", last_seen_at=1009)
    engine = WorkerRecord(id="rollout-1", state="starting", job_id="job-1", last_seen_at=1009)
    (finding,) = explain_starting([trainer, rollout, engine], now=1012)
    assert finding.sentence == "starting: trainer-0, 12 s; rollout-0, 3 s"
    assert not finding.is_problem


async def test_job_waits_for_starting_services_without_a_problem(ledger, world, pool):
    job_id = await world.create_job(pool=pool)
    for record in (TrainerRecord(id="trainer-0", state="starting"), WorkerRecord(id="rollout-0", state="starting")):
        await world.beat(pool, record, ago_s=2 * SILENT_S)
    findings = (await diagnose(ledger, is_conducting=True)).findings
    assert problems([finding for finding in findings if "0" in finding.who or finding.job_id == job_id]) == []
    assert [sentence_of(finding) for finding in findings if finding.sentence.startswith("starting")] == [
        "starting: trainer-0, N s; rollout-0, N s"
    ]
    assert f"{job_id} has been PENDING for N s: trainer-0 is starting" in text_of(findings)
    assert await ledger.workers.live(pool) == []


async def test_service_that_never_finishes_its_start_is_dead(ledger, world, pool):
    job_id = await world.create_job(pool=pool)
    await world.beat(pool, TrainerRecord(id="trainer-0", state="starting"), ago_s=STARTING_S + 1)
    assert "trainer-0 was last seen N s ago (starting) and did not sign off" in text_of(await examine_pools(ledger))
    assert "no trainer of pool" in problems(await explain_job(ledger, job_id))[0]


async def test_restarted_services_of_a_job_are_no_problem(ledger, world, pool):
    job_id, _ = await world.started_job(pool=pool)
    await open_iteration(ledger, job_id, num_groups=2)
    await world.claim_all(job_id, "rollout-a")
    await world.beat(pool, TrainerRecord(id="trainer-a", state="starting"), ago_s=2 * SILENT_S)
    await world.beat(pool, WorkerRecord(id="rollout-a", state="starting"), ago_s=2 * SILENT_S)
    assert problems(await explain_job(ledger, job_id)) == []
    await ledger.redis.hset(JobKeys(job_id).job, "lease_until", await ledger.now() - 5)
    findings = await explain_job(ledger, job_id)
    assert problems(findings) == []
    assert "its lease of" in text_of(findings)
    assert "trainer-a is starting" in text_of(findings)


async def test_doctor_names_a_trainer_until_it_has_loaded_pytorch(ledger, world, redis_url, pool, tmp_path):
    job_id = await world.create_job(pool=pool)
    await world.start_training(job_id, lease_s=600.0)  # the new trainer has nothing to do
    place = {"ONBEAT_REDIS_URL": redis_url, "ONBEAT_POOL": pool, "ONBEAT_DATA_DIR": str(tmp_path)}
    settings = {**place, "ONBEAT_TRAINER_ID": "trainer-0", "ONBEAT_DEVICE": "cpu"}
    command = (sys.executable, "-m", "services.trainer")
    process = await asyncio.create_subprocess_exec(*command, env=os.environ | settings)

    async def about_trainer() -> list[str]:
        return [sentence_of(finding) for finding in await explain_job(ledger, job_id) if "trainer-0" in finding.who]

    async def states() -> list[str]:
        return [trainer.state for trainer in await ledger.trainers.records(pool)]

    try:
        await eventually("it is starting", about_trainer, ["starting: trainer-0, N s"], LATER_S)
        await eventually("it is ready", states, ["idle"], 4 * LATER_S)
        assert await about_trainer() == []
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), LATER_S)


# ---- running -----------------------------------------------------------------------------------------------------


async def test_trainer_that_loads_the_model_is_what_the_job_waits_for(ledger, world, pool):
    job_id = await world.create_job(pool=pool)
    epoch = await ledger.trainer.claim_job(job_id, "trainer-a", 30)
    assert epoch
    await ledger.trainer.renew_job(job_id, epoch, 30, "loading the model")
    await beat_rollout(ledger, pool, "rollout-a", "idle")
    findings = await explain_job(ledger, job_id)
    unpublished = "iteration 0 is not open: it needs policy version 0, and trainer trainer-a has published none"
    assert unpublished in text_of(findings)
    trainer, lease = [finding for finding in findings if finding.who == "trainer-a"]
    assert sentence_of(trainer) == "trainer-a is loading the model (N s)"
    assert (trainer.waits_for, trainer.is_detail) == ("loading the model", False)
    assert sentence_of(lease) == f"trainer-a holds {job_id}: its lease runs out in N s, unless renewed"
    assert (lease.waits_for, lease.is_detail) == ("", True)
    assert problems(findings) == []
    await ledger.versions.announce(job_id, epoch, 0, "127.0.0.1:1", "d0")
    preparing = "iteration 0 is not open yet: a broker has been preparing its prompts"
    assert preparing in text_of(await explain_job(ledger, job_id))


async def test_open_iteration_says_where_every_group_is(ledger, world, pool):
    job_id, _ = await world.started_job(pool=pool, schedule={"iteration_deadline_s": 3000})
    await open_iteration(ledger, job_id)
    await beat_rollout(ledger, pool, "rollout-a", "generating", job_id=job_id)
    claims = await world.claim_all(job_id, "rollout-a", 6)
    await world.submit_groups(job_id, claims[:3], "rollout-a")
    await ledger.rollout.release(job_id, "rollout-a", [claims[3].entry_id], is_attempt=True)
    assert await ledger.rollout.submit(job_id, claims[4].entry_id, make_group(claims[4].task, "rollout-z")) == "lost"
    findings = await explain_job(ledger, job_id)
    (unit,) = [finding for finding in findings if finding.who == "iteration 0"]
    assert sentence_of(unit).startswith(
        "iteration 0 (policy version 0): 3 of 8 groups accepted; "
        "2 with rollout-a (claimed or renewed N s ago, attempt 1 at most); "
        "1 handed back and free again (attempt 1 at most); 2 waiting for "
    )
    assert ": every rollout is at capacity; 1 submissions were refused because another" in sentence_of(unit)
    assert unit.waits_for == "5 groups"
    assert f"{job_id} is served by 1 rollout: 1 generating" in text_of(findings)
    (deadline,) = [finding for finding in findings if finding.next == "the job fails"]
    assert deadline.deadline_s is not None
    assert 2900 < deadline.deadline_s <= 3000
    assert problems(findings) == []
    await beat_rollout(ledger, pool, "rollout-a", "starting", job_id=job_id, doing="starting the engine")
    (unit,) = [finding for finding in await explain_job(ledger, job_id) if finding.who == "iteration 0"]
    assert "attempt 1 at most; starting the engine); 1 handed back" in unit.sentence


async def test_open_iteration_says_which_groups_do_not_count(ledger, world, pool):
    rollout = {"num_prompts_per_iteration": 2, "max_prompts_per_iteration": 3}
    job_id, _ = await world.started_job(pool=pool, rollout=rollout)
    tasks = tasks_for(0, 3)
    assert await ledger.iterations.open(job_id, 0, 0, tasks[:2], tasks[2:]) == ""
    for claim in await world.claim_all(job_id, count=2):
        assert await ledger.rollout.submit(job_id, claim.entry_id, failed_group(claim.task)) == "accepted"
    (unit,) = [finding for finding in await explain_job(ledger, job_id) if finding.who == "iteration 0"]
    assert unit.sentence.startswith("iteration 0 (policy version 0): 2 of 3 groups accepted; 1 waiting")
    assert unit.sentence.endswith(
        "2 of the accepted groups failed and are not trained; "
        "1 of the accepted groups without signal, replaced by other prompts; "
        "1 of the accepted groups without signal, not replaced: all prompts are used up"
    )


async def test_wait_for_a_tool_says_when_its_episode_is_given_up(ledger, world, pool):
    job_id, _ = await world.started_job(pool=pool)
    await open_iteration(ledger, job_id)
    await ledger.rollout.claim(job_id, "rollout-a", 2, lease_s=30.0)
    place = {"group_id": "0-5", "episode": 5}
    wait = EpisodeWait(**place, waits_for="tool `search`", waited_s=41.0, left_s=19.0)
    known = {"job_id": job_id, "doing": "in other words"}
    await beat_rollout(ledger, pool, "rollout-a", "generating", waiting_episode=wait, **known)
    loading = EpisodeWait(**place, waits_for="environment shop (being loaded)", waited_s=12.0)
    await beat_rollout(ledger, pool, "rollout-b", "generating", job_id=job_id, waiting_episode=loading)
    elsewhere = EpisodeWait(**place, waits_for="tool `other`", waited_s=99.0)
    await beat_rollout(ledger, pool, "rollout-c", "generating", job_id="another", waiting_episode=elsewhere)
    findings = await explain_job(ledger, job_id)
    (of_tool,) = [finding for finding in findings if finding.who == "rollout-a"]
    assert re.fullmatch(
        r"group 0-5: rollout-a waits for tool `search` of episode 5 for 4[1-9] s; "
        r"the episode is given up in 1\d s \(environment.timeout_s\)",
        of_tool.sentence,
    )
    assert (of_tool.waits_for, of_tool.next, of_tool.is_problem) == ("tool `search`", "the episode is given up", False)
    assert of_tool.since_s is not None
    assert of_tool.deadline_s is not None
    assert of_tool.since_s + of_tool.deadline_s == pytest.approx(60.0)
    text = text_of(findings)
    assert "group 0-5: rollout-b waits for environment shop (being loaded) of episode 5 for N s\n" in text
    assert "in other words" not in text
    assert "`other`" not in text


@pytest.mark.parametrize(
    ("rollouts", "reason"),
    [
        ([("rollout-a", "starting", True)], "rollout-a is starting"),
        ([("rollout-a", "updating", True), ("rollout-b", "generating", True)], "rollout-a is updating"),
        ([("rollout-a", "generating", False)], "no rollout serves this job; rollout-a serves job-other"),
        ([], "no rollout is alive"),
    ],
)
async def test_unclaimed_prompts_say_why(ledger, world, pool, rollouts, reason):
    job_id, _ = await world.started_job(pool=pool)
    await open_iteration(ledger, job_id)
    for worker, state, is_ours in rollouts:
        await beat_rollout(ledger, pool, worker, state, job_id=job_id if is_ours else "job-other")
    findings = await explain_job(ledger, job_id)
    (unit,) = [finding for finding in findings if finding.who == "iteration 0"]
    assert sentence_of(unit).endswith(f": {reason}")
    assert bool(problems(findings)) is not bool(rollouts)


async def test_silent_rollout_is_named_with_what_it_holds(ledger, world, pool):
    job_id, _ = await world.started_job(pool=pool)
    await open_iteration(ledger, job_id)
    await world.claim_all(job_id, "rollout-gone", 1)
    *_, handed_back = await world.claim_all(job_id, "rollout-b", 4)
    await ledger.rollout.release(job_id, "rollout-b", [handed_back.entry_id])
    await beat_rollout(ledger, pool, "rollout-a", "generating", job_id=job_id)
    await beat_rollout(ledger, pool, "rollout-b", "generating", job_id=job_id, ago_s=14, lease_s=1000)
    named, gone = (await explain_job(ledger, job_id))[:2]
    assert sentence_of(named) == "rollout-b was last seen N s ago (generating); others take over its 3 prompts in N s"
    assert named.since_s is not None
    assert named.since_s >= 14
    assert named.deadline_s is not None
    assert 900 < named.deadline_s <= 1000
    lost = "rollout-gone is no longer listed; others take over its 1 prompt when their leases run out"
    assert sentence_of(gone) == lost


async def test_machine_without_memory_is_named_to_its_job(ledger, world, pool):
    job_id, _ = await world.started_job(pool=pool)
    for worker, state, served in (
        ("rollout-a", "generating", job_id),
        ("rollout-b", "generating", "job-x"),
        ("c", "idle", None),
    ):
        host = HostMemory(name=f"box of {worker}", available_bytes=200_000_000, total_bytes=8_000_000_000)
        await beat_rollout(ledger, pool, worker, state, job_id=served, host=host)
    (low,) = [sentence for sentence in problems(await explain_job(ledger, job_id)) if "memory left" in sentence]
    assert low.startswith("box of rollout-a has 0.2 of 8.0 GB of memory left, so rollout-a may become very slow")
    (low,) = [sentence for sentence in problems(await examine_pools(ledger)) if "memory left" in sentence]
    assert low.startswith("box of c has")


async def test_drained_iteration_waits_for_the_trainer(ledger, world, pool):
    job_id, epoch = await world.started_job(pool=pool)
    await open_iteration(ledger, job_id, num_groups=2)
    await world.drain(job_id)
    await ledger.trainer.renew_job(job_id, epoch, 30, "training iteration 0")
    findings = await explain_job(ledger, job_id)
    (unit,) = [finding for finding in findings if finding.who == "iteration 0"]
    start = "iteration 0 (policy version 0): 2 of 2 groups accepted, the last one N s ago; trainer-a has to train"
    assert sentence_of(unit).startswith(start)
    assert unit.waits_for == "trainer-a"
    assert "trainer-a holds " in text_of(findings)
    await world.commit(job_id, epoch, 0)
    assert "iteration 1 is not open yet" in text_of(await explain_job(ledger, job_id))


async def test_job_after_its_last_iteration_waits_for_its_evaluation(ledger, world, pool):
    job_id, epoch = await world.started_job(pool=pool, schedule={"num_iterations": 1})
    await open_iteration(ledger, job_id, num_groups=2)
    await world.drain(job_id)
    await world.commit(job_id, epoch, 0)
    tasks = tasks_for(1)
    for task in tasks:
        task.is_evaluation = True
    await ledger.evaluations.fail(job_id, 0, 1, "no prompts")
    assert not await ledger.evaluations.open(job_id, 1, 1, 2, tasks)
    await ledger.trainer.renew_job(job_id, epoch, 30, "waiting for the last evaluation")
    text = text_of(await explain_job(ledger, job_id))
    assert "all 1 iterations are committed, but trainer-a has not finished the job yet" in text
    assert "trainer-a is waiting for the last evaluation (N s)" in text
    assert "evaluation 1 (policy version 1): 0 of 2 groups accepted; 2 waiting for N s" in text
    assert "evaluation 1 is given up in N s if nothing arrives" in text
    assert "the job fails" not in text
    await ledger.evaluations.fail(job_id, 1, 1, "given up")
    assert "if nothing arrives" not in text_of(await explain_job(ledger, job_id))  # the last checkpoint may take long
    await ledger.trainer.renew_job(job_id, epoch, -ARRIVAL_S)
    assert "the job fails in N s if nothing arrives" in text_of(await explain_job(ledger, job_id))


async def test_lost_trainer_is_named_with_who_takes_over(ledger, world, pool):
    job_id = await world.create_job(pool=pool)
    await ledger.trainer.claim_job(job_id, "trainer-dead", 0.0)
    sentence = problems(await explain_job(ledger, job_id))[0]
    lost = f"trainer-dead stopped, died or lost its connection: its lease of {job_id} ran out N s ago; no trainer"
    assert sentence.startswith(lost)
    await beat_trainer(ledger, pool, "trainer-b", "idle")
    assert problems(await explain_job(ledger, job_id))[0].endswith("; trainer-b takes over")
    await beat_trainer(ledger, pool, "trainer-b", "training", "job-0")
    text = text_of(await explain_job(ledger, job_id))
    assert "; the first one that is free takes over: trainer-b trains job-0" in text
    assert "the job fails in" not in text  # it waits its turn
    await beat_trainer(ledger, pool, "trainer-dead", "training", "job-0")
    left = f"trainer-dead has left the job: its lease of {job_id} ran out N s ago; the first one that is free"
    assert left in text_of(await explain_job(ledger, job_id))
    assert not any("trainer-dead" in problem for problem in problems(await explain_job(ledger, job_id)))
    for owner in ("trainer-b", "trainer-c"):
        assert await ledger.trainer.claim_job(job_id, owner, 0.0)
    assert problems(await explain_job(ledger, job_id))[0].startswith(
        "2 trainers in a row ended without committing iteration 0; the job fails after 10 (schedule.max_lost_trainers)"
    )
    await ledger.event_log.emit(job_id, "trainer.failed", "trainer-c ends: cannot listen on :8801: its port is taken")
    assert "trainer-c ends: cannot listen on :8801: its port is taken" in problems(await explain_job(ledger, job_id))


async def test_job_that_is_near_its_deadline_is_a_problem(ledger, world, pool):
    job_id, _ = await world.started_job(pool=pool, schedule={"iteration_deadline_s": 1000})
    await open_iteration(ledger, job_id)
    await beat_rollout(ledger, pool, "rollout-a", "generating", job_id=job_id)
    assert problems(await explain_job(ledger, job_id)) == []
    await ledger.redis.hset(JobKeys(job_id).job, "progress_at", await ledger.now() - 600)
    (late,) = problems(await explain_job(ledger, job_id))
    assert late == "no progress for N s; the job fails in N s if nothing arrives (schedule.iteration_deadline_s)"


async def test_deadlines_after_a_downtime_are_those_of_the_broker(ledger, world, pool):
    running = await world.create_job(pool=pool, schedule={"iteration_deadline_s": 1000})
    await world.start_training(running)
    await ledger.redis.hset(JobKeys(running).job, "progress_at", await ledger.now() - 50_000)
    pending = await world.create_job(pool=pool, schedule={"start_deadline_s": 2000})
    await ledger.redis.hset(JobKeys(pending).job, "created_at", await ledger.now() - 50_000)
    for job_id, within_s, words in ((running, 1000.0, "nothing arrives"), (pending, ARRIVAL_S, "no trainer comes")):
        (deadline,) = [finding for finding in await explain_job(ledger, job_id) if finding.next == "the job fails"]
        assert f"the job fails within {within_s:.0f} s if {words}" in deadline.sentence
        assert deadline.deadline_s == within_s


# ---- paused, ending, ended ---------------------------------------------------------------------------------------


async def test_paused_cancelling_and_final_jobs_explain_themselves(ledger, world, pool):
    job_id, epoch = await world.started_job(pool=pool)
    await ledger.jobs.move(job_id, JobState.PAUSED)
    findings = await explain_job(ledger, job_id)
    assert "and stays paused without a limit: `onbeat jobs resume" in sentence_of(findings[0])
    assert problems(findings) == []
    await ledger.jobs.move(job_id, JobState.CANCELLING)
    findings = await explain_job(ledger, job_id)
    ending = "trainer-a has to stop at its next safe point; otherwise the broker ends the job in N s"
    assert ending in sentence_of(findings[0])
    assert findings[0].deadline_s is not None
    assert 60 < findings[0].deadline_s <= 120
    await ledger.trainer.renew_job(job_id, epoch, 0.0)
    assert "no trainer holds it, so the broker ends it within a second" in text_of(await explain_job(ledger, job_id))
    await ledger.jobs.move(job_id, JobState.FAILED, "the disk is full")
    (end,) = await explain_job(ledger, job_id)
    assert end.is_problem
    assert sentence_of(end) == f"{job_id} failed N s ago, after 0 of 3 iterations: the disk is full"


# ---- the API -------------------------------------------------------------------------------------------------


async def test_api_explains_one_job_and_the_whole_installation(world, pool, broker):
    job_id = await world.create_job(pool=pool)
    answer = (await broker.get(f"/v1/jobs/{job_id}:explain")).json()
    assert answer["is_healthy"] is False
    assert answer["findings"][0]["job_id"] == job_id
    assert (await broker.get("/v1/jobs/job-none:explain")).status_code == 404
    assert (await broker.get(f"/v1/jobs/{job_id}")).json()["id"] == job_id  # the route of a job is still its own
    report = (await broker.get("/v1/doctor")).json()
    sentences = "\n".join(finding["sentence"] for finding in report["findings"])
    for expected in (
        "the broker answers, and its control loop runs",
        "the clocks of broker and Redis differ by 0.0 s",
        "Redis keeps no append-only file",
        f"pool {pool}: 0 trainers alive, 0 rollouts alive",
        f"streams of {job_id}: 0 prompts waiting, 0 being answered; 0 groups kept",
        f"no trainer of pool {pool} has asked for jobs",
    ):
        assert expected in sentences
    order = [finding["is_problem"] for finding in report["findings"]]
    assert order == sorted(order, reverse=True)


async def test_doctor_reports_what_redis_lets_it_know(tmp_path):
    port = free_port()
    process = start_redis(port, str(tmp_path))
    redis = connect(f"redis://127.0.0.1:{port}", retry_s=1)
    admin, ledger = Ledger(redis), Ledger(connect(f"redis://weak:pw@127.0.0.1:{port}", retry_s=1))
    try:
        healthy = await diagnose(admin, is_conducting=True)
        assert healthy.is_healthy, healthy
        await redis.config_set("appendonly", "yes")
        await redis.config_set("appendfsync", "always")
        durable = await diagnose(admin, is_conducting=True)
        assert "keeps an append-only file (appendfsync always)" in text_of(durable.findings)
        await redis.config_set("maxmemory-policy", "allkeys-lru")
        await redis.config_set("maxmemory", str(10**9))
        evicting = await diagnose(admin, is_conducting=True)
        assert "maxmemory-policy is allkeys-lru; set it to noeviction" in problems(evicting.findings)[0]
        await redis.execute_command("ACL", "SETUSER", "weak", "on", ">pw", "~onbeat:*", "+@all", "-info", "-config")
        refused = await diagnose(ledger, is_conducting=True)
        assert refused.is_healthy, refused
        assert "this user may not run INFO" in text_of(refused.findings)
        ended = await diagnose(ledger, is_conducting=False)
        assert problems(ended.findings) == [
            "the control loop of the broker has ended: no iteration will be opened; see its log and start it again"
        ]
        process.kill()
        process.wait(10)
        gone = await diagnose(ledger, is_conducting=True)
        assert f"Redis at 127.0.0.1:{port}/0 does not answer" in problems(gone.findings)[0]
    finally:
        process.kill()
        await redis.aclose()
        await ledger.redis.aclose()


async def test_password_that_was_changed_is_named_as_such(tmp_path):
    with own_redis(tmp_path) as url:
        ledger = Ledger(connect(url.replace("//", "//:before@"), retry_s=60))
        admin = connect(url, retry_s=1)
        await admin.config_set("requirepass", "before")
        await ledger.now()
        await admin.config_set("requirepass", "after")
        await admin.client_kill_filter(_type="normal", skipme=True)
        diagnosis = await diagnose(ledger, is_conducting=True)
        (finding,) = [finding for finding in diagnosis.findings if finding.who == "redis"]
        assert "refuses the user or the password" in finding.sentence
        assert "correct ONBEAT_REDIS_PASSWORD_FILE or ONBEAT_REDIS_URL" in finding.sentence
        assert "before" not in finding.sentence
        await admin.aclose()
        await ledger.redis.aclose()


async def test_job_that_cannot_learn_is_a_problem(ledger, world, pool):
    """The job's groups all had equal rewards, and all its responses were cut."""
    job_id, epoch = await world.started_job(pool=pool, schedule={"num_iterations": 5})
    dull = {"rollout/uniform_groups": 2.0, "rollout/solved_none_frac": 1.0, "rollout/truncated_frac": 1.0}
    for iteration in range(5):
        await world.run_iteration(job_id, epoch, iteration, reward_mean=0.0, **dull)
    for has_ended in (False, True):
        if has_ended:
            await ledger.jobs.move(job_id, JobState.SUCCEEDED)
        text = "\n".join(problems(await explain_job(ledger, job_id)))
        assert f"{job_id} learns nothing: in the last 5 iterations" in text
        assert "raise rollout.max_response_tokens above 8" in text


# ---- what trainers tell --------------------------------------------------------------------------------------


async def connect_to(redis_url: str) -> Ledger:
    """Connect on the loop that is to use the ledger."""
    return Ledger(connect(redis_url))


async def test_idle_trainer_is_listed_until_it_stops_then_forgotten(ledger, world, redis_url, pool):
    await world.beat(pool, TrainerRecord(id="trainer-old", state="idle"), ago_s=2 * 86400)
    background = LoopThread("trainer")
    ledger_of_thread = background.run(connect_to(redis_url))
    presence = Presence(background, ledger_of_thread, (pool, "trainer-a"))

    async def trainers():
        return [(trainer.id, trainer.state) for trainer in await ledger.trainers.records(pool)]

    await eventually("idle", trainers, [("trainer-a", "idle")], LATER_S)
    presence.job_id = "job-1"
    await eventually("training", trainers, [("trainer-a", "training")], LATER_S)
    await asyncio.to_thread(presence.close)
    assert await trainers() == [("trainer-a", "stopped")]
    background.close(ledger_of_thread.redis.aclose())


async def test_trainer_reports_what_it_does_with_its_lease(ledger, world, redis_url, pool):
    job_id, epoch = await world.started_job(pool=pool)
    config = JobConfig.model_validate_json((await ledger.jobs.fields(job_id))["config"])
    background, stop = LoopThread("trainer"), threading.Event()
    ledger_of_thread = background.run(connect_to(redis_url))
    job = JobSession(Lease(background, ledger_of_thread, ClaimedJob(job_id, epoch, config, 30.0), stop))

    async def doing():
        return (await ledger.jobs.fields(job_id)).get("doing")

    try:
        await eventually("it begins", doing, "loading the model", LATER_S)
        await open_iteration(ledger, job_id, num_groups=2)
        feed = (await asyncio.to_thread(GroupFeed, job, config, 0)).micro_batches(0, ["0-0", "0-1"])
        micro_batch = asyncio.create_task(asyncio.to_thread(next, feed))
        await eventually("it waits", doing, "waiting for groups of iteration 0: 2 missing", LATER_S)
        await world.drain(job_id)
        await micro_batch
        await eventually("it trains", doing, "training iteration 0", LATER_S)
    finally:
        stop.set()  # every waiter for groups ends by this
        await asyncio.to_thread(job.close)
        background.close(ledger_of_thread.redis.aclose())


async def test_trainer_that_does_not_leave_a_job_that_is_over_hangs(ledger, world, pool):
    job_id, waiting = await world.create_job(pool=pool), await world.create_job(pool=pool)
    await beat_trainer(ledger, pool, "trainer-a", "training", job_id)
    await ledger.jobs.move(job_id, JobState.CANCELLED)
    hangs = f"trainer-a still works on {job_id}, which has been CANCELLED for N s: it hangs; kill it"
    assert hangs not in text_of((await diagnose(ledger, is_conducting=True)).findings)
    await ledger.redis.hset(JobKeys(job_id).job, "finished_at", await ledger.now() - 200)
    assert hangs in "\n".join(problems((await diagnose(ledger, is_conducting=True)).findings))
    assert f"{waiting} has been PENDING" in text_of(await explain_job(ledger, waiting))


async def test_unreadable_heartbeat_is_named_and_stops_nobody(ledger, world, pool, tmp_path):
    job_id, _ = await world.started_job(pool=pool)
    await beat_rollout(ledger, pool, "good", "generating", job_id=job_id)
    await beat_trainer(ledger, pool, "trainer-a", "training", job_id)
    for name in (keys.workers(pool), keys.trainers(pool)):
        await ledger.redis.hset(name, mapping={"evil": "not json", "of-a-later-version": '{"id": 7}'})
    assert [worker.id for worker in await ledger.workers.records(pool)] == ["good"]
    assert [trainer.id for trainer in await ledger.trainers.records(pool)] == ["trainer-a"]
    async with running_broker(ledger, tmp_path) as broker:
        findings = (await broker.get("/v1/doctor")).json()["findings"]
        complaint = [finding["sentence"] for finding in findings if "cannot be read" in finding["sentence"]]
        assert len(complaint) == 1
        unreadable = f"4 heartbeats of pool {pool} cannot be read, and are left out (evil, of-a-later-version"
        assert complaint[0].startswith(unreadable)
        assert len((await broker.get(f"/v1/workers?pool={pool}")).json()["workers"]) == 1
        assert (await broker.get(f"/v1/pools/{pool}")).json()["num_rollouts"] == 1
        assert 'onbeat_unreadable_records{kind="heartbeat"} 4.0' in (await broker.get("/metrics")).text
    for processes in (ledger.trainers, ledger.workers):
        await processes.forget_old(pool)
    assert await ledger.redis.hkeys(keys.workers(pool)) == [b"good"]
    assert await ledger.redis.hkeys(keys.trainers(pool)) == [b"trainer-a"]


def test_silence_is_told_from_a_stop_and_a_long_absence():
    now = time.time()

    def complaint(ago_s, state="generating"):
        finding = explain_silence(WorkerRecord(id="rollout-a", state=state, last_seen_at=now - ago_s), now)
        return finding.sentence if finding else ""

    assert complaint(1) == complaint(3600) == complaint(30, "stopped") == ""
    assert complaint(30).startswith("rollout-a was last seen 30 s ago (generating) and did not sign off")
