"""The rollout loop against real Redis and real scoring processes: with a fake engine and fake weights, and for real."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from onbeat.contracts.records import WorkerRecord
from onbeat.contracts.states import EvaluationState, JobState
from onbeat.engines import EngineDied, GeneratedResponse, VersionSpan
from onbeat.machine.processor import Hardware
from onbeat.streams.codec import Message, Reward
from onbeat.streams.inspection import iteration_hashes
from onbeat.streams.keys import ROLLOUT_GROUP, JobKeys
from services.broker.doctor.explain import explain_job
from services.rollout import attach, claim_loop, puller, session
from services.rollout.worker import FIND_JOB_S
from tests.integration.rollout.rollout_rig import CONTEXT_TOKENS, G, Rig, serving_model
from tests.rollout_fakes import FakeEngine
from tests.tiny_models import build_tokenizer
from tests.world import World

# ---- the dtype of the job ------------------------------------------------------------------------------------------


async def test_a_rollout_without_bfloat16_serves_and_warns(rig):
    rig.start_worker(hardware=Hardware("Older", "AVX2, no bfloat16", "emulated"))
    await rig.open(0, rig.task(0, 0))
    await rig.drained(0)
    (warning,) = await rig.event_messages("job.warning")
    assert warning.startswith("w0 computes in the job's bfloat16 without instructions for it")
    (worker,) = await rig.ledger.workers.records(rig.pool)
    assert (worker.hardware, worker.bfloat16) == ("Older (AVX2, no bfloat16)", "emulated")


async def test_a_rollout_that_cannot_hold_the_dtype_leaves_the_job(rig):
    rig.start_worker(hardware=Hardware("T4", "compute capability 7.5", "missing"))
    await rig.open(0, rig.task(0, 0))
    await rig.until_told("job.warning")
    await asyncio.sleep(3 * FIND_JOB_S)  # it looks again, and says nothing again
    (warning,) = await rig.event_messages("job.warning")
    assert warning == (
        "w0 does not serve the job: its T4 (compute capability 7.5) cannot compute in the job's bfloat16; "
        "submit the job with model.dtype = auto or float32"
    )
    (worker,) = await rig.ledger.workers.records(rig.pool)
    assert (worker.state, worker.unsuited_for) == ("unsuited", [rig.job_id])
    rig.start_worker()
    (group,) = await rig.drained(0)
    assert group.worker_id == "w1"


async def test_rollout_reports_a_newer_versions_job_while_it_serves(rig):
    newer_id = rig.job_id
    config = json.loads((await rig.ledger.jobs.fields(newer_id))["config"]) | {"of_a_newer_version": 1}
    await rig.ledger.redis.hset(JobKeys(newer_id).job, "config", json.dumps(config))
    await rig.start_job()
    rig.start_worker()
    await rig.open(0, rig.task(0, 0))
    await rig.drained(0)

    async def is_reported() -> bool:
        (worker,) = await rig.ledger.workers.records(rig.pool)
        return (worker.job_id, worker.unsuited_for) == (rig.job_id, [newer_id])

    await rig.until(is_reported)


# ---- no reward -----------------------------------------------------------------------------------------------------


async def test_a_job_without_rewards_gets_responses_without_one(rig):
    """A teacher alone says what they are worth."""
    sections = {"reward": None, "objective": {"type": "distill"}, "teacher": {"path": "t"}}
    await rig.replace_job(**sections)
    rig.start_worker()
    await rig.open(0, rig.task(0, 0, reward=None))
    (group,) = await rig.drained(0)
    assert [response.has_no_reward for response in group.responses] == [True] * G
    assert not group.HasField("failure")


async def test_teachers_prompt_is_tokenised_as_the_policys(rig):
    """One that does not fit into the context with the longest response fails its group by name."""
    sections = {"reward": None, "objective": {"type": "distill"}, "data": {"type": "jsonl", "path": "rows.jsonl"}}
    await rig.replace_job(**sections, teacher={"path": "t", "prompt_field": "hint"})
    rig.start_worker()
    teachers = [[Message(role="user", content=text)] for text in ("2+2=4?", "9" * 9000)]
    await rig.open(0, *(rig.task(0, i, reward=None, teacher_messages=teachers[i]) for i in range(2)))
    hinted, failed = sorted(await rig.drained(0), key=lambda group: group.group_id)
    await rig.commit(0)
    await rig.open(1, rig.task(1, 0, reward=None, messages=teachers[0]))
    (as_policy,) = await rig.drained(1)
    assert list(hinted.teacher_prompt_token_ids) == list(as_policy.prompt_token_ids) != list(hinted.prompt_token_ids)
    assert not as_policy.teacher_prompt_token_ids
    assert failed.failure.kind == "prompt_too_long"
    assert failed.failure.message.startswith("the teacher's prompt (teacher.prompt_field): ")


# ---- the ordinary course -------------------------------------------------------------------------------------------


async def test_every_iteration_is_generated_by_exactly_its_weights(rig):
    rig.start_worker()
    for iteration in range(3):
        await rig.open(iteration, *(rig.task(iteration, index) for index in range(4)))
        for index, group in enumerate(await rig.drained(iteration)):
            assert group.group_id == f"{iteration}-{index}"
            assert group.policy_version == iteration
            assert not group.HasField("failure")
            assert [list(response.token_ids) for response in group.responses] == [[iteration] * 3] * G
            assert {span.policy_version for r in group.responses for span in r.version_spans} == {iteration}
            assert [response.reward for response in group.responses] == [1.0] * G
        await rig.commit(iteration)
    (engine,) = rig.engines
    assert engine.loads == [1, 2] or engine.loads == [1, 2, 3]  # the third may or may not be loaded yet
    assert [sampling.seed for _, _, sampling in engine.requests] == [100, 101, 102, 103] * 3
    assert {(sampling.temperature, sampling.max_response_tokens) for _, _, sampling in engine.requests} == {(0.5, 16)}


async def test_group_carries_what_trainer_and_people_need(rig):
    engine = FakeEngine(delay_s=0.2, text="!!!")
    engine.may_finish.clear()
    started = time.monotonic()
    rig.start_worker(engine)
    messages = [Message(role="system", content="Be brief."), Message(role="user", content="2+2=")]
    await rig.open(0, rig.task(0, 0, messages=messages, data_row=7), rig.task(0, 1, messages=[], text="2+2="))
    await rig.until(lambda: engine.num_in_flight == 2 * G)
    engine.may_finish.set()
    chat, plain = await rig.drained(0)
    rendered = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n"
    from tests.tiny_models import build_tokenizer

    assert list(chat.prompt_token_ids) == build_tokenizer()(rendered)["input_ids"]
    assert "".join(part.text for part in chat.prompt_parts) == rendered
    assert list(plain.prompt_token_ids) == build_tokenizer()("2+2=")["input_ids"]
    assert (chat.prompt_text, plain.prompt_text) == ("system: Be brief.\nuser: 2+2=", "2+2=")
    assert chat.worker_id == "w0"
    assert {(response.text, *response.token_lengths) for response in chat.responses} == {("!!!", 1, 1, 1)}
    assert (chat.data_row, plain.HasField("data_row")) == (7, False)
    assert await rig.ledger.iterations.lengths(rig.job_id, [7, 8]) == [3, None]
    assert 0.2 <= chat.timings.generate_s < time.monotonic() - started
    assert chat.timings.score_s > 0
    (hashes,) = await iteration_hashes(rig.ledger, rig.job_id, [0])
    sum_s = sum(group.timings.generate_s for group in (chat, plain))
    assert 0.2 <= hashes.busy_s["w0"] < sum_s  # both groups at once


class SlowStarter(FakeEngine):
    """Reads its model when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.is_starting, self.may_start = asyncio.Event(), asyncio.Event()

    async def start(self, model_dir, policy_version):
        self.is_starting.set()
        await self.may_start.wait()
        await super().start(model_dir, policy_version)


async def test_engine_starts_on_its_version_and_then_gets_the_newest(rig):
    engine = SlowStarter()
    rig.start_worker(engine)
    await rig.until(engine.is_starting.is_set)
    await rig.until(lambda: rig.trainer.num_watches == 1)  # it follows already
    for version in (1, 2):
        await rig.trainer.publish(version)
        await asyncio.sleep(0.1)
    assert rig.trainer.pulls == [0]  # one copy, which the engine reads
    engine.may_start.set()

    async def has_reported_both() -> bool:
        return set(await rig.ledger.versions.ready_times(rig.job_id)) == {0, 2}

    await rig.until(has_reported_both)
    assert (engine.version(), engine.loads) == (2, [2])
    assert rig.trainer.pulls == [0, 2]


async def test_heartbeat_reports_job_state_and_version(rig):
    engine = FakeEngine()
    engine.may_finish.clear()
    await World(rig.ledger).beat(rig.pool, WorkerRecord(id="long-dead", state="idle"), ago_s=2 * 86_400)
    rig.start_worker(engine, tensor_parallel_size=2)
    await rig.open(0, rig.task(0, 0))
    await rig.until_states("generating")
    (worker,) = await rig.ledger.workers.records(rig.pool)  # nobody else: the dead one is forgotten
    assert (worker.id, worker.job_id, worker.policy_version, worker.num_devices) == ("w0", rig.job_id, 0, 2)
    engine.may_finish.set()
    await rig.drained(0)
    await rig.until_states("idle")


async def test_end_of_a_job_stops_its_engine_and_frees_the_worker(rig):
    rig.start_worker()
    await rig.open(0, rig.task(0, 0))
    await rig.drained(0)
    await rig.ledger.jobs.move(rig.job_id, JobState.SUCCEEDED)
    await rig.until(lambda: rig.engines[0].stopped)
    assert await rig.until_told("worker.left") == await rig.event_messages("worker.joined") == ["w0"]
    rig.engines[0].stopped = False
    await rig.start_job()
    await rig.open(0, rig.task(0, 0))
    assert len(await rig.drained(0)) == 1


# ---- several versions at once --------------------------------------------------------------------------------------


async def test_iteration_opened_ahead_runs_beside_earlier_stragglers(rig):
    await rig.replace_job(max_staleness=1)
    engine = FakeEngine()
    engine.may_finish.clear()
    rig.start_worker(engine)
    await rig.open(0, rig.task(0, 0))
    await rig.until(lambda: engine.num_in_flight == G)
    await rig.open(1, rig.task(1, 0), version=0)
    await rig.until(lambda: engine.num_in_flight == 2 * G)
    engine.may_finish.set()
    for iteration in (0, 1):
        assert {group.policy_version for group in await rig.drained(iteration)} == {0}


async def test_evaluation_of_a_lost_version_is_recorded_and_skipped(rig):
    await rig.open(0, rig.task(0, 0))
    fields = {"is_evaluation": True, "num_samples": 1}
    tasks = [rig.task(0, index, group_id=f"eval-0-{index}", **fields) for index in range(2)]
    assert await rig.ledger.evaluations.open(rig.job_id, 0, 0, 1, tasks) == ""
    await rig.fail_and_commit(0)
    rig.trainer.refused = {0}  # the trainer holds version 1 alone
    await rig.open(1, rig.task(1, 0))
    started = time.monotonic()
    rig.start_worker()
    assert len((await rig.drained(1))[0].responses) == G
    await rig.until(lambda: rig.ledger.evaluations.state(rig.job_id, 0), EvaluationState.DRAINED)
    failed = await rig.ledger.evaluations.groups(rig.job_id, 0)
    assert {group.failure.kind for group in failed} == {"version_gone"}
    assert time.monotonic() - started < puller.PULL_DEADLINE_S / 2


async def test_evaluation_leaves_the_busy_time_of_its_iteration(rig):
    rig.start_worker()
    await rig.open(0, rig.task(0, 0))
    await rig.drained(0)
    (before,) = await iteration_hashes(rig.ledger, rig.job_id, [0])
    task = rig.task(0, 0, group_id="eval-0-0", is_evaluation=True, num_samples=1)
    assert await rig.ledger.evaluations.open(rig.job_id, 0, 0, 1, [task]) == ""
    await rig.until(lambda: rig.ledger.evaluations.state(rig.job_id, 0), EvaluationState.DRAINED)
    (after,) = await iteration_hashes(rig.ledger, rig.job_id, [0])
    assert after.busy_s == before.busy_s


# ---- failures that belong to one group -----------------------------------------------------------------------------


async def test_prompt_that_does_not_fit_is_recorded_with_its_numbers(rig):
    rig.start_worker()
    long = [Message(role="user", content="x" * CONTEXT_TOKENS)]
    await rig.open(0, rig.task(0, 0, messages=long), rig.task(0, 1))
    failed, good = await rig.drained(0)
    assert failed.failure.kind == "prompt_too_long"
    for number in (str(CONTEXT_TOKENS), "16 response tokens"):
        assert number in failed.failure.message
    assert len(good.responses) == G
    assert (await rig.iteration(0))["num_failed_groups"] == "1"
    assert len(rig.engines[0].requests) == 1


async def test_several_rewards_give_their_weighted_sum(rig):
    limits = {"timeout_s": 5.0, "memory_limit_mb": 512}
    anything, nothing = (json.dumps({"pattern": pattern}) for pattern in (".", "never"))
    rewards = [
        Reward(name="exact", weight=0.9, part="exact", max_attempts=1, **limits),
        Reward(name="regex", options_json=anything, weight=0.1, part="form", **limits),
        Reward(name="regex", options_json=nothing, weight=-1.0, part="never", **limits),
    ]
    rig.start_worker()
    await rig.open(0, rig.task(0, 0, reward=None, rewards=rewards))
    (group,) = await rig.drained(0)
    for response in group.responses:
        assert response.reward == 1.0
        assert dict(response.reward_parts) == {"exact": 1.0, "form": 1.0, "never": 0.0}


async def test_empty_or_broken_engine_output_is_refused_here(rig):
    engine = FakeEngine()
    engine._response = lambda: FakeEngine._response(engine).__class__([], [], "stop", [], "")  # type: ignore[method-assign]
    rig.start_worker(engine)
    await rig.open(0, rig.task(0, 0))
    (failed,) = await rig.drained(0)
    assert failed.failure.kind == "generation_failed"
    assert "0 tokens" in failed.failure.message


async def test_group_is_given_up_after_its_attempts_with_last_reason(rig, monkeypatch):
    monkeypatch.setattr(claim_loop, "RETRY_DELAY_S", 0.05)
    engine = FakeEngine()
    engine.generate_errors = [RuntimeError(f"hiccup {number}") for number in range(3)]
    rig.start_worker(engine)
    await rig.open(0, rig.task(0, 0))
    (failed,) = await rig.drained(0)
    assert failed.failure.kind == "generation_failed"
    assert "3 attempts" in failed.failure.message
    assert "hiccup 2" in failed.failure.message
    assert len(engine.requests) == 3
    released = await rig.event_messages("group.released")
    assert [message.split(", on w0: ")[0] for message in released[:3]] == [f"0-0, attempt {n}" for n in (1, 2, 3)]
    assert "RuntimeError: hiccup 0" in released[0]


async def test_group_that_misses_its_deadline_is_attempted_again(rig, monkeypatch):
    monkeypatch.setattr(claim_loop, "RETRY_DELAY_S", 0.05)
    engine = FakeEngine()
    rig.start_worker(engine)
    await rig.open(0, rig.task(0, 0))
    await rig.drained(0)  # the process of the reward has started
    await rig.commit(0)
    engine.may_finish.clear()
    await rig.open(1, rig.task(1, 0, deadline_s=3.0))
    await rig.until(lambda: len(engine.requests) == 3)
    engine.may_finish.set()
    assert len((await rig.drained(1))[0].responses) == G
    assert "not ready 3 s after its claim" in (await rig.event_messages("group.released"))[0]


async def test_refused_request_fails_its_group_and_spares_the_engine(rig):
    engine = FakeEngine()
    engine.generate_errors = [ValueError("temperature 0.001 is below 0.01")] * 8  # more than break an engine
    worker = rig.start_worker(engine)
    await rig.open(0, *(rig.task(0, index) for index in range(8)))
    failed = await rig.drained(0)
    assert {group.failure.kind for group in failed} == {"generation_failed"}
    assert "the engine refuses the request: temperature 0.001 is below 0.01" in failed[0].failure.message
    assert len(engine.requests) == 8  # one attempt each
    await rig.commit(0)
    await rig.open(1, rig.task(1, 0))
    assert len((await rig.drained(1))[0].responses) == G
    assert worker.job_id == rig.job_id


# ---- failures of engine, trainer and workers -----------------------------------------------------------------------


async def test_engine_that_keeps_failing_ends_the_process(rig, monkeypatch):
    monkeypatch.setattr(claim_loop, "RETRY_DELAY_S", 0.01)
    engine = FakeEngine()
    engine.generate_errors = [RuntimeError("the core is dead")] * 20
    rig.start_worker(engine)
    await rig.open(0, *(rig.task(0, index) for index in range(4)))
    assert "the core is dead" in await rig.broken()
    assert engine.stopped
    assert await rig.ledger.workers.records(rig.pool) == []
    rig.start_worker()  # the supervisor's new process
    assert len(await rig.drained(0)) == 4


async def test_dead_engine_ends_the_process_and_costs_one_attempt(rig):
    engine = FakeEngine()
    engine.generate_errors = [EngineDied("its core was killed")] * 3
    rig.start_worker(engine)
    await rig.open(0, rig.task(0, 0))
    await rig.broken()
    assert len(engine.requests) == 1
    assert "attempt 1" in (await rig.event_messages("group.released"))[0]
    (claim,) = await rig.ledger.rollout.claim(rig.job_id, "other", 1, lease_s=30.0)
    assert claim.attempt == 2


async def test_engine_that_owes_all_answers_ends_the_process(rig, monkeypatch):
    monkeypatch.setattr(claim_loop, "RETRY_DELAY_S", 0.01)
    monkeypatch.setattr(claim_loop, "MAX_ENGINE_ERRORS", 2)
    engine = FakeEngine()
    engine.may_finish.clear()
    rig.start_worker(engine)
    await rig.open(0, *(rig.task(0, index, deadline_s=2.0) for index in range(2)))
    assert "DeadlineExceeded: not ready 2 s after its claim" in await rig.broken()
    rig.start_worker()  # the supervisor's new process
    assert [len(group.responses) for group in await rig.drained(0)] == [G, G]


async def test_engine_that_dies_while_it_is_idle_ends_the_process(rig, monkeypatch):
    class Mortal(FakeEngine):
        is_dead = False

    engine = Mortal()
    rig.start_worker(engine)
    await rig.open(0, rig.task(0, 0))
    await rig.drained(0)
    engine.is_dead = True
    assert "the engine has died while it was idle" in await rig.broken()


async def test_endless_load_ends_the_process_and_returns_its_groups(rig):
    engine = FakeEngine()
    worker = rig.start_worker(engine, engine_load_s=1.0)
    await rig.open(0, rig.task(0, 0))
    await rig.drained(0)
    engine.hangs_in = {"load"}
    await rig.commit(0)
    await rig.open(1, *(rig.task(1, index) for index in range(3)))
    await rig.until(lambda: worker._record().num_in_flight == 3)
    message = "the load of policy version 1 into the engine did not end within 1 s (ONBEAT_ENGINE_LOAD_S)"
    assert message in await rig.broken()
    claims = await rig.ledger.rollout.claim(rig.job_id, "next", 3, lease_s=30.0)
    assert [claim.attempt for claim in claims] == [1, 1, 1]


async def test_tokens_of_another_version_end_the_process_at_no_attempt(rig, monkeypatch):
    monkeypatch.setattr(claim_loop, "RETRY_DELAY_S", 0.01)
    engine = FakeEngine()
    engine.stamp = 7
    rig.start_worker(engine)
    await rig.open(0, rig.task(0, 0))
    await rig.broken()
    assert (await rig.iteration(0))["num_stale"] == str(claim_loop.MAX_ENGINE_ERRORS)
    assert await rig.groups(0) == []
    rig.start_worker()
    assert len((await rig.drained(0))[0].responses) == G


@pytest.mark.parametrize("max_group_attempts", [1, 2])
async def test_version_unavailable_for_long_costs_the_group_no_attempt(rig, monkeypatch, max_group_attempts):
    monkeypatch.setattr(puller.WeightsPuller.obtain, "__defaults__", (0.01,))
    monkeypatch.setattr(claim_loop, "RETRY_DELAY_S", 0.01)
    monkeypatch.setattr(claim_loop, "MISSING_VERSION_S", 0.01)
    await rig.replace_job(max_group_attempts=max_group_attempts)
    await rig.restart_trainer_behind(3)
    rig.start_worker()
    await rig.open(3, rig.task(3, 0))
    released = await rig.until_told("group.released", times=4)
    assert {message.split(", on")[0] for message in released} == {"3-0, attempt 1"}
    for version in (1, 2, 3):
        await rig.trainer.publish(version)
    assert [list(r.token_ids) for r in (await rig.drained(3))[0].responses] == [[3] * 3] * G


async def test_worker_waits_for_a_trainer_that_is_not_there_yet(rig):
    rig.trainer.is_up = False
    impatient, _ = rig.start_worker(drain_s=60.0), rig.start_worker()
    await rig.open(0, rig.task(0, 0))
    await rig.until_states("starting", "starting")
    impatient.stop()  # it can be stopped while it waits
    await asyncio.wait_for(rig.running[0][1], timeout=20)
    rig.trainer.is_up = True
    assert [group.worker_id for group in await rig.drained(0)] == ["w1"]


async def test_slow_group_keeps_its_lease_and_is_generated_once(rig):
    for _ in range(2):
        rig.start_worker(FakeEngine(delay_s=5.0), lease_s=4.0)  # a lease is renewed in time even after a halt of 2 s
    await rig.open(0, rig.task(0, 0))
    await rig.drained(0)
    assert sum(len(engine.requests) for engine in rig.engines) == 1


class SlowToCancel(FakeEngine):
    """Requests that are cancelled end when they may."""

    def __init__(self) -> None:
        super().__init__()
        self.is_cancelled, self.may_end = asyncio.Event(), asyncio.Event()

    async def generate(self, *arguments, **options):
        try:
            return await super().generate(*arguments, **options)
        except asyncio.CancelledError:
            self.is_cancelled.set()
            await self.may_end.wait()
            raise


async def test_prompt_that_returns_while_cancelled_is_generated_soon(rig):
    engine, prompts = SlowToCancel(), JobKeys(rig.job_id).prompts
    rig.start_worker(engine, lease_s=15.0)
    await rig.open(0, rig.task(0, 0))
    await rig.drained(0)  # the process of the reward has started
    await rig.commit(0)
    engine.may_finish.clear()
    await rig.open(1, rig.task(1, 0))
    await rig.until(lambda: engine.num_in_flight == G)
    entry = (await rig.ledger.redis.xrange(prompts))[-1][0].decode()
    await rig.ledger.redis.xclaim(prompts, ROLLOUT_GROUP, "thief", 0, [entry], idle=0)
    await asyncio.wait_for(engine.is_cancelled.wait(), timeout=15)
    await rig.ledger.rollout.release(rig.job_id, "thief", [entry])

    async def is_back() -> bool:
        (pending,) = await rig.ledger.redis.xpending_range(prompts, ROLLOUT_GROUP, "-", "+", 1)
        return pending["consumer"] == b"w0"

    await rig.until(is_back)
    engine.may_finish.set()
    engine.may_end.set()
    await rig.drained(1, timeout_s=10.0)


async def test_two_workers_share_an_iteration(rig, monkeypatch):
    monkeypatch.setattr(session, "FOLLOW_S", 0.1)
    workers = [rig.start_worker(FakeEngine(capacity=64, delay_s=0.3)) for _ in range(2)]

    def know_each_other() -> bool:
        loops = [worker._session and worker._session._parts and worker._session._parts.loop for worker in workers]
        return all(loop is not None and loop.num_workers == 2 for loop in loops)

    await rig.until(know_each_other)
    await rig.open(0, *(rig.task(0, index) for index in range(4)))
    assert sorted(group.worker_id for group in await rig.drained(0)) == ["w0", "w0", "w1", "w1"]


async def test_stop_returns_unstarted_groups_and_finishes_the_rest(rig):
    await rig.replace_job(max_staleness=1)
    engine = FakeEngine()
    worker = rig.start_worker(engine, drain_s=60.0)
    await rig.open(0, rig.task(0, 0))
    await rig.drained(0)
    engine.may_finish.clear()
    await rig.open(1, rig.task(1, 0), version=0)
    await rig.until(lambda: engine.num_in_flight == G)
    await rig.commit(0)
    await rig.open(2, rig.task(2, 0), version=1)  # waits until the engine is free of version 0
    await rig.until(lambda: len(worker._session._parts.loop.flights) == 2)
    worker.stop()
    taken = []

    async def is_free() -> bool:
        taken.extend(await rig.ledger.rollout.claim(rig.job_id, "other", 2, lease_s=30.0))
        return bool(taken)

    await rig.until(is_free)
    assert [(claim.task.group_id, claim.attempt) for claim in taken] == [("2-0", 1)]
    assert engine.num_in_flight == G
    engine.may_finish.set()
    await asyncio.wait_for(rig.running[0][1], timeout=30)
    assert [group.worker_id for group in await rig.groups(1)] == ["w0"]
    assert engine.stopped
    assert await rig.ledger.workers.records(rig.pool) == []


@pytest.mark.parametrize("drain_s", [0.0, 0.3])
async def test_group_not_ready_in_the_drain_time_is_handed_back(rig, drain_s):
    """The return does not count as an attempt."""
    await rig.replace_job(max_group_attempts=1)
    engine = FakeEngine()
    engine.may_finish.clear()
    worker = rig.start_worker(engine, drain_s=drain_s)
    await rig.open(0, rig.task(0, 0))
    await rig.until(lambda: engine.num_in_flight == G)
    worker.stop()
    await asyncio.wait_for(rig.running[0][1], timeout=10)
    rig.start_worker()
    assert [len(group.responses) for group in await rig.drained(0)] == [G]


async def test_group_that_fails_during_a_stop_has_used_its_attempt(rig, monkeypatch):
    """Else a group that breaks every engine would do so for ever."""
    monkeypatch.setattr(claim_loop, "MAX_ENGINE_ERRORS", 1)
    await rig.replace_job(max_group_attempts=1)
    engine = FakeEngine()
    engine.generate_errors = [RuntimeError("the core is dead")] * 2  # both requests fail; the first ends the process
    rig.start_worker(engine)
    await rig.open(0, rig.task(0, 0), rig.task(0, 1))
    await rig.broken()
    rig.start_worker()
    assert [group.failure.kind for group in await rig.drained(0)] == ["generation_failed"] * 2


async def test_cancelled_job_drops_its_groups_and_leaves_the_engine(rig):
    engine = FakeEngine()
    engine.may_finish.clear()
    rig.start_worker(engine)
    await rig.open(0, rig.task(0, 0))
    await rig.until(lambda: engine.num_in_flight == G)
    await rig.ledger.jobs.move(rig.job_id, JobState.CANCELLING)
    await rig.until(lambda: engine.stopped)
    assert not rig.running[0][1].done()


# ---- whole processes -----------------------------------------------------------------------------------------------


class Process:
    """`python -m services.rollout` with the reference engine. `patch`: Python that is run before."""

    def __init__(
        self, redis_url: str, pool: str, worker_id: str, drain_s: float = 60.0, patch: str = "", **more: str
    ) -> None:
        settings = {
            "ONBEAT_REDIS_URL": redis_url,
            "ONBEAT_POOL": pool,
            "ONBEAT_WORKER_ID": worker_id,
            "ONBEAT_ENGINE": "transformers",
            "ONBEAT_LEASE_S": "1.5",
            "ONBEAT_DRAIN_S": str(drain_s),
            "OMP_NUM_THREADS": "1",
        } | more
        script = f"{patch}\nimport sys; from services.rollout.__main__ import main; sys.exit(main())"
        command = [sys.executable, "-c", script]
        self.process = subprocess.Popen(command, env=os.environ | settings, stderr=subprocess.PIPE, text=True)


@pytest.fixture
async def served_rig(ledger, tmp_path):
    """Run a job whose weights come from a real model over real gRPC."""
    rig = Rig(ledger)
    async with serving_model(rig, tmp_path):
        yield rig


async def test_killed_rollout_loses_no_group_and_sigterm_ends_cleanly(served_rig, redis_url):
    rig = served_rig
    doomed = Process(redis_url, rig.pool, "doomed").process
    heir = None
    try:
        tasks = [rig.task(0, index, max_response_tokens=300) for index in range(6)]
        await rig.open(0, *tasks)
        await rig.until_states("generating", timeout_s=60)
        doomed.kill()
        heir = Process(redis_url, rig.pool, "heir").process
        groups = [*await rig.drained(0, timeout_s=60)]
        assert [group.group_id for group in groups] == [f"0-{index}" for index in range(6)]
        assert "heir" in {group.worker_id for group in groups}
        await rig.commit(0)
        await rig.open(1, rig.task(1, 0))
        (group,) = await rig.drained(1)
        assert {span.policy_version for r in group.responses for span in r.version_spans} == {1}
        heir.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(heir.wait, 20) == 0
        assert [worker.id for worker in await rig.ledger.workers.records(rig.pool)] == [
            "doomed"
        ]  # it could not say farewell
    finally:
        for process in filter(None, (doomed, heir)):
            process.kill()
            process.communicate()


async def test_process_asked_twice_to_stop_returns_everything_at_once(served_rig, redis_url):
    rig = served_rig
    process = Process(redis_url, rig.pool, "hasty", drain_s=600.0).process
    try:
        await rig.open(0, *(rig.task(0, index, max_response_tokens=300) for index in range(6)))
        await rig.until_states("generating", timeout_s=60)
        process.send_signal(signal.SIGTERM)
        await rig.until_states("draining", timeout_s=60)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 60) == 0
        num_accepted = len(await rig.groups(0))
        claims = await rig.ledger.rollout.claim(rig.job_id, "next", 6, lease_s=3600.0)
        assert len(claims) == 6 - num_accepted > 0
        assert {claim.attempt for claim in claims} == {1}
    finally:
        process.kill()
        process.communicate()


STUCK_THREAD = """
import time
import services.rollout.__main__ as service
from services.rollout.engines.transformers_engine import TransformersEngine

TransformersEngine._read_model = lambda self, model_dir: time.sleep(3600)
service.EXIT_DEADLINE_S = 2.0
"""


async def test_process_whose_engine_thread_is_stuck_ends_anyway(served_rig, redis_url):
    rig = served_rig
    process = Process(redis_url, rig.pool, "stuck", patch=STUCK_THREAD, ONBEAT_ENGINE_START_S="1").process
    try:
        _, log = await asyncio.to_thread(process.communicate, timeout=60)
        assert process.returncode == 1
        assert "EngineBroken: the start of the engine did not end within 1 s (ONBEAT_ENGINE_START_S)" in log
        (failed,) = await rig.event_messages("worker.failed")
        assert failed.startswith("stuck ends: EngineBroken: the start of the engine did not end within 1 s")
    finally:
        process.kill()
        process.communicate()


async def test_rollout_that_cannot_reach_the_weights_says_so(rig, monkeypatch):
    """The doctor has it, and so the error of a job that fails for it; an event follows when it lasts."""
    monkeypatch.setattr(attach, "REPORT_FAILURE_S", 0.5)
    rig.trainer.is_up = False
    rig.start_worker()
    await rig.open(0, rig.task(0, 0))
    reason = "w0 cannot get the model from the trainer: nobody answers at trainer:1"
    assert await rig.until_told("job.warning") == [reason]
    findings = await explain_job(rig.ledger, rig.job_id)
    assert any(f"w0 is starting ({reason.removeprefix('w0 ')})" in finding.sentence for finding in findings)
    rig.trainer.is_up = True
    await rig.drained(0)


async def test_group_that_no_rollout_survives_is_given_up_with_names(rig):
    """The limit of attempts is 1: deaths are no attempts."""
    await rig.replace_job(max_group_attempts=1)
    await rig.open(0, rig.task(0, 0))
    for name in ("spot-1", "spot-2", "spot-1", *(f"spot-{number}" for number in range(3, 10)), "last"):
        (claim,) = await rig.ledger.rollout.claim(rig.job_id, name, 1, lease_s=0.001)
        await asyncio.sleep(0.01)
    await rig.ledger.rollout.release(rig.job_id, "last", [claim.entry_id])
    rig.start_worker()
    (failed,) = await rig.drained(0)
    assert "10 rollouts died or fell silent with it (rollout.max_lost_rollouts)" in failed.failure.message
    assert "spot-1 (2 times), spot-2, spot-3" in failed.failure.message


class RefusingEngine(FakeEngine):
    """An engine that cannot load the model while `refusal` is set."""

    refusal: Exception | None = ValueError("head_dim 7 is not supported")

    async def start(self, model_dir, policy_version):
        if self.refusal is not None:
            raise RuntimeError("cannot build the model") from self.refusal
        await super().start(model_dir, policy_version)


async def test_rollout_whose_engine_cannot_load_a_model_lives_on(rig):
    """It reports the cause, does not try that job again in the same epoch, and serves others."""
    engine = RefusingEngine()
    worker = rig.start_worker(engine)
    (message,) = await rig.until_told("worker.model_failed")
    assert message == "w0: the engine cannot load the model: ValueError: head_dim 7 is not supported"
    refused_id = rig.job_id

    async def reported() -> tuple:
        (record,) = await rig.ledger.workers.records(rig.pool)
        causes = {job_id: failure.cause for job_id, failure in record.engine_failures.items()}
        return record.job_id, record.state, causes

    await rig.until(reported, (None, "unsuited", {refused_id: "ValueError: head_dim 7 is not supported"}))
    assert engine.stopped
    engine.refusal = None
    await asyncio.sleep(3 * FIND_JOB_S)
    assert len(await rig.event_messages("worker.joined")) == 1
    await rig.start_job()
    await rig.open(0, rig.task(0, 0))
    assert [group.worker_id for group in await rig.drained(0)] == ["w0"]
    await rig.ledger.jobs.move(refused_id, JobState.FAILED)
    await rig.ledger.jobs.move(rig.job_id, JobState.SUCCEEDED)
    await rig.until(reported, (None, "idle", {}))
    assert worker.job_id is None


async def test_refused_model_is_tried_again_in_the_next_epoch(rig):
    engine = RefusingEngine()
    rig.start_worker(engine)
    await rig.until_told("worker.model_failed")
    engine.refusal = None
    await rig.ledger.jobs.move(rig.job_id, JobState.FAILED)
    await rig.ledger.jobs.resume(rig.job_id, JobState.FAILED)
    rig.epoch = await rig.ledger.trainer.claim_job(rig.job_id, "trainer", 60)
    await rig.announce()
    await rig.open(0, rig.task(0, 0))
    assert [group.worker_id for group in await rig.drained(0)] == ["w0"]


async def test_engine_that_died_in_its_start_refuses_no_model(rig):
    """A lack of memory kills it: the process ends, and another one tries again."""
    engine = RefusingEngine()
    engine.start = never_loaded
    rig.start_worker(engine)
    assert "died while it started" in await rig.broken()
    assert await rig.event_messages("worker.model_failed") == []


async def never_loaded(model_dir, policy_version):
    raise EngineDied("vLLM's engine core died while it started")


# ---- stops -----------------------------------------------------------------------------------------------------------


async def test_end_of_the_templates_turn_becomes_a_stop(rig):
    tokenizer = json.loads(rig.trainer.files["tokenizer_config.json"]) | {"eos_token": "<|endoftext|>"}
    rig.trainer.files = rig.trainer.files | {"tokenizer_config.json": json.dumps(tokenizer).encode()}
    rig.start_worker()
    await rig.open(0, rig.task(0, 0))
    await rig.drained(0)
    (message,) = await rig.event_messages("rollout.stop_added")
    assert message.startswith("w0: the chat template ends an answer with <|im_end|> (token 258)")
    (engine,) = rig.engines
    assert {sampling.stop_token_ids for _, _, sampling in engine.requests} == {(258,)}


class TalkativeEngine(FakeEngine):
    """It knows no stops, and goes on after the answer."""

    def _response(self) -> GeneratedResponse:
        token_ids = build_tokenizer()("4\nQ: 5+5=")["input_ids"]
        spans = [VersionSpan(self._version, 0, len(token_ids))]
        return GeneratedResponse(token_ids, [-0.5] * len(token_ids), "length", spans, "4\nQ: 5+5=")


async def test_rewards_see_the_text_before_the_stop(rig):
    rig.start_worker(TalkativeEngine())
    await rig.open(0, rig.task(0, 0, stop=["\nQ:"]))
    (group,) = await rig.drained(0)
    for response in group.responses:
        assert (response.text, response.reward, response.finish_reason) == ("4", 1.0, "stop")
        assert list(response.token_ids) == build_tokenizer()("4\nQ:")["input_ids"]
        assert list(response.token_lengths) == [1, 0, 0, 0]
