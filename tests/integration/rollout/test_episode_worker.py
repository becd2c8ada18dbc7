"""Jobs with an environment on a whole rollout: claimed, played over HTTP, submitted, or given back and recorded."""

import asyncio
import sys
from types import SimpleNamespace

import pytest

from onbeat.environments import Outcome
from onbeat.streams.codec import Environment
from services.rollout import claim_loop
from tests.episode_rig import InProcess
from tests.integration.rollout.rollout_rig import Rig
from tests.rollout_fakes import FakeEngine

ENVIRONMENT = Environment(name="test", options_json='{"level": 2}', max_turns=4, timeout_s=30.0, memory_limit_mb=512)


@pytest.fixture
async def rig(ledger):
    rig = Rig(ledger)
    yield rig
    await rig.stop()


async def start(
    rig, monkeypatch, run, num_prompts: int = 1, num_groups: int = 8, deadline_s: float = 300.0, **settings
) -> InProcess:
    """Start a job whose episodes are played by this function, `num_groups` groups at a time."""
    environments = install_environments(monkeypatch, run, num_groups)
    environment = {"name": "test", "max_attempts": 1}
    await rig.start_job(num_prompts=num_prompts, reward=None, environment=environment, **settings)
    options = {"environment": ENVIRONMENT, "reward": None, "deadline_s": deadline_s}
    await rig.open(0, *(rig.task(0, index, **options) for index in range(num_prompts)))
    return environments


def install_environments(monkeypatch, run, num_groups: int) -> InProcess:
    environments = InProcess(run, num_groups)
    module = SimpleNamespace(EnvironmentProcesses=lambda *limits: environments)
    monkeypatch.setitem(sys.modules, "services.rollout.environments", module)
    return environments


async def test_group_whose_environment_keeps_failing_is_recorded(rig, monkeypatch):
    async def run(task, policy):
        raise RuntimeError("no such level")

    await start(rig, monkeypatch, run, max_group_attempts=2)
    rig.start_worker()
    (group,) = await rig.drained(0)
    assert (group.failure.kind, dict(group.failed_episodes)) == ("environment_failed", {"raised": 4})
    assert "no such level" in group.failure.message
    released = await rig.event_messages("group.released")
    assert len(released) == 2
    assert "EnvironmentFailed" in released[0]


def sources() -> list[dict[str, object]]:
    sums = {"type": "reasoning_gym", "task": "chain_sum"}
    environment = {"name": "test", "max_attempts": 2}
    return [sums | {"name": "sums"}, sums | {"name": "games", "environment": environment}]


async def test_one_rollout_plays_and_answers_the_prompts_of_a_job(rig, monkeypatch):
    """Episodes and responses of one turn in turns, one group of episodes at a time; each episode fails once."""
    num_playing, most_playing, num_tries = 0, 0, 0

    async def run(task, policy):
        nonlocal num_playing, most_playing, num_tries
        num_playing, num_tries = num_playing + 1, num_tries + 1
        most_playing = max(most_playing, num_playing)
        try:
            await policy.chat(task.messages)
            await asyncio.sleep(0.1)
            if len(environments.requests) % 2:
                raise RuntimeError("it fails the first time")
            return Outcome(0.25)
        finally:
            num_playing -= 1

    environments = install_environments(monkeypatch, run, 1)
    await rig.start_job(num_prompts=6, max_group_attempts=1, data=sources())
    played = {"environment": ENVIRONMENT, "reward": None, "source": "games"}
    played["environment"].max_attempts = 2
    await rig.open(0, *(rig.task(0, index, **(played if index % 2 else {"source": "sums"})) for index in range(6)))
    rig.start_worker()
    groups = await rig.drained(0)
    assert [group.source for group in groups] == ["sums", "games"] * 3
    for group in groups:
        rewards = [(response.reward, len(response.turns)) for response in group.responses]
        assert rewards == ([(1.0, 0)] * 2 if group.source == "sums" else [(0.25, 1)] * 2)
        assert dict(group.failed_episodes) == ({} if group.source == "sums" else {"raised": 2})
    assert (most_playing, num_tries) == (2, 12)


@pytest.mark.parametrize("timeout_s", [0.5, 30.0])
async def test_engine_that_owes_all_answers_ends_the_process(rig, monkeypatch, timeout_s):
    """Either the environment's time is over first, or that of the group."""
    monkeypatch.setattr(claim_loop, "RETRY_DELAY_S", 0.01)
    monkeypatch.setattr(claim_loop, "MAX_ENGINE_ERRORS", 2)

    async def run(task, policy):
        async with asyncio.timeout(timeout_s):
            await policy.chat(task.messages)
        return Outcome(0.0)

    await start(rig, monkeypatch, run, deadline_s=2.0)
    engine = FakeEngine()
    engine.may_finish.clear()
    rig.start_worker(engine)
    assert "errors in a row" in await rig.broken()


async def test_more_groups_are_claimed_while_episodes_wait(rig, monkeypatch):
    may_end = asyncio.Event()

    async def run(task, policy):
        await policy.chat(task.messages)
        await may_end.wait()
        return Outcome(0.0)

    environments = await start(rig, monkeypatch, run, num_prompts=6, num_groups=5)
    rig.start_worker(FakeEngine(capacity=2))  # one group fits, and one more waits for its place
    await rig.until(lambda: len(environments.requests) == 5)
    await asyncio.sleep(1.5)
    assert len(environments.requests) == 5
    may_end.set()
    assert len(await rig.drained(0)) == 6


async def test_next_version_waits_for_the_episodes_of_this_one(rig, monkeypatch):
    may_end = asyncio.Event()

    async def run(task, policy):
        await policy.chat(task.messages)
        await may_end.wait()
        await policy.chat(task.messages)
        return Outcome(0.0)

    await start(rig, monkeypatch, run)
    engine = FakeEngine()
    rig.start_worker(engine)
    await rig.until(lambda: len(engine.requests) == 2)
    await rig.trainer.publish(1)
    await rig.announce()
    await asyncio.sleep(0.3)
    assert engine.loads == []
    may_end.set()
    (group,) = await rig.drained(0)
    assert {version for version, _, _ in engine.requests} == {0}
    assert all(len(response.turns) == 2 for response in group.responses)
