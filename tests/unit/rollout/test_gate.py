"""The version gate and the puller: no token of the wrong version, no load under running requests, no needless pull."""

import asyncio
from pathlib import Path

import pytest

from onbeat.contracts.errors import WeightsError
from onbeat.engines import EngineBroken, Sampling
from onbeat.weights.host import full_plan
from onbeat.weights.wire import Peer
from services.rollout import gate as gate_module
from services.rollout import puller as puller_module
from services.rollout.gate import GateLimits, PolicyMoved, VersionGate
from services.rollout.puller import WeightsPuller
from tests.rollout_fakes import FakeEngine, FakeSource, FakeTrainer, manifest_of, weights_of
from tests.waiting import until

SAMPLING = Sampling(max_response_tokens=4, temperature=1.0, seed=0)


class Rig:
    """An engine on version 0, a trainer, and what is between."""

    def __init__(self, staging_dir: Path, is_kept: bool = True) -> None:
        self.staging_dir = staging_dir
        self.trainer = FakeTrainer()
        self.address = self.trainer.address
        self.engine = FakeEngine()
        self.puller = WeightsPuller(self.trainer.connect, self.find_address, Peer(worker_id="worker"), is_kept=is_kept)
        self.ready: list[int] = []
        self.following: asyncio.Task[None] | None = None
        self.gate = VersionGate(self.engine, self.puller, self.on_loaded, manifest_of(0), GateLimits(load_s=60.0))

    async def find_address(self) -> str:
        return self.address

    async def on_loaded(self, pull, load_s) -> None:
        self.ready.append(pull.version)

    async def start(self) -> None:
        (self.staging_dir / "config.json").touch()
        (self.staging_dir / "model.safetensors").write_bytes(weights_of(0))
        await self.engine.start(self.staging_dir, 0)
        pull = await self.puller.obtain(0)
        await pull.complete()
        self.puller.mark_read(pull)
        self.trainer.pulls.clear()

    async def heard_of(self, version: int) -> None:
        await until(lambda: self.puller.announcements.newest == version)

    async def pulled(self, *versions: int) -> None:
        await until(lambda: self.trainer.pulls == list(versions))

    def follow(self) -> None:
        """Let the puller hear of new versions."""
        self.following = asyncio.create_task(self.puller.announcements.follow())

    def generate(self, version: int) -> asyncio.Task[list[int]]:
        async def pinned() -> list[int]:
            async with self.gate.pinned(version):
                return (await self.engine.generate([1], 1, SAMPLING, expected_version=version))[0].token_ids

        return asyncio.create_task(pinned())


@pytest.fixture
async def rig(tmp_path):
    rig = Rig(tmp_path)
    await rig.start()
    yield rig
    if rig.following is not None:
        rig.following.cancel()
    await rig.puller.close()


async def settle(seconds: float = 0.05) -> None:
    """Let pending work run before a check that an event has not happened; for events that must, the test waits."""
    await asyncio.sleep(seconds)


def move_clock(seconds: float) -> None:
    """Let the loop's clock jump: a test that sleeps past a limit fails when its process stands still before it."""
    loop = asyncio.get_running_loop()
    time = loop.time
    loop.time = lambda: time() + seconds  # type: ignore[method-assign]


async def test_new_version_is_loaded_after_the_drain_once_for_all(rig):
    rig.trainer.newest = 1
    rig.engine.may_finish.clear()
    old = [rig.generate(0) for _ in range(3)]
    await until(lambda: rig.engine.num_in_flight == 3)
    new = [rig.generate(1) for _ in range(4)]
    await rig.pulled(1)
    await settle()
    assert rig.engine.loads == []  # three are still generating
    rig.engine.may_finish.set()
    assert await asyncio.gather(*old, *new) == [[0] * 3] * 3 + [[1] * 3] * 4
    assert rig.engine.loads == rig.ready == [1]


async def test_latecomers_of_the_old_version_do_not_starve_the_new_one(rig):
    rig.trainer.newest = 1
    rig.engine.may_finish.clear()
    first = rig.generate(0)
    await settle()
    new = rig.generate(1)
    await settle()
    late = rig.generate(0)
    await settle()
    rig.engine.may_finish.set()
    assert await new == [1, 1, 1]
    assert [await first, await late] == [[0] * 3, [0] * 3]
    assert [version for version, _, _ in rig.engine.requests] == [0, 1, 0]


async def test_copy_that_is_not_kept_is_pulled_again_when_asked_for(tmp_path):
    rig = Rig(tmp_path, is_kept=False)
    await rig.start()
    rig.trainer.newest = 1
    assert await rig.generate(1) == [1, 1, 1]
    assert rig.puller.versions() == []
    assert [await rig.generate(version) for version in (0, 1)] == [[0] * 3, [1] * 3]
    assert rig.trainer.pulls == [1, 0, 1]
    await rig.puller.close()


async def test_one_failed_pull_answers_everybody_who_waited_for_it(rig, monkeypatch, calls_of):
    monkeypatch.setattr(WeightsPuller.obtain, "__defaults__", (0.2,))
    started = calls_of(WeightsPuller, "start")
    waiting = [rig.generate(7) for _ in range(10)]
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(result, WeightsError) for result in results)
    assert [version for _, version, *_ in started] == [7]
    assert await rig.generate(0) == [0, 0, 0]


@pytest.mark.parametrize("num_errors", [1, 2])
async def test_failed_load_is_repeated_once_then_breaks_the_engine(rig, num_errors):
    rig.trainer.newest = 1
    rig.engine.load_errors = [RuntimeError("half a file")] * num_errors
    if num_errors == 1:
        assert await rig.generate(1) == [1, 1, 1]
    else:
        with pytest.raises(EngineBroken, match="policy version 1 could not be loaded: half a file"):
            await rig.generate(1)
        assert rig.engine.version() is None
    assert rig.engine.loads == [1, 1]
    assert rig.trainer.pulls == [1]


async def test_endless_load_breaks_the_engine_for_latecomers_too(rig):
    rig.trainer.newest = 1
    rig.engine.hangs_in = {"load"}
    rig.gate._limits = GateLimits(load_s=0.2)
    impatient, patient = rig.generate(1), rig.generate(1)
    await settle(0.1)
    impatient.cancel()
    message = r"the load of policy version 1 into the engine did not end within 0 s \(ONBEAT_ENGINE_LOAD_S\)"
    with pytest.raises(EngineBroken, match=message):
        await patient
    with pytest.raises(EngineBroken, match=message):
        await rig.generate(1)
    assert rig.engine.loads == [1]


async def test_time_of_a_load_begins_when_its_weights_are_here(rig, monkeypatch):
    async def pull_slowly(self, key, *limits):
        yield full_plan(manifest_of(key.policy_version), key.shard)
        await until(lambda: rig.engine.loads == [1])
        move_clock(2 * rig.gate._limits.load_s)
        await settle()
        yield memoryview(weights_of(key.policy_version))

    monkeypatch.setattr(FakeSource, "pull", pull_slowly)
    rig.trainer.newest = 1
    assert await rig.generate(1) == [1, 1, 1]


async def test_cancelled_waiter_does_not_abandon_a_load_half_way(rig):
    rig.trainer.newest = 1
    impatient = rig.generate(1)
    async with asyncio.timeout(10.0):
        while rig.engine.version() is not None:
            await settle(0.001)
    impatient.cancel()
    assert await rig.generate(1) == [1, 1, 1]
    assert rig.engine.loads == [1]


async def test_older_group_moves_the_engine_back_and_newer_ones_onward(rig):
    rig.trainer.newest = 2
    rig.follow()
    assert await rig.generate(2) == [2, 2, 2]
    rig.engine.may_finish.clear()
    running = rig.generate(2)
    await settle()
    behind, ahead = rig.generate(1), rig.generate(2)  # a dead worker's group, taken over by one that has moved on
    await settle()
    assert rig.engine.loads == [2]  # not under the running one
    rig.engine.may_finish.set()
    assert await asyncio.gather(running, behind, ahead) == [[2] * 3, [1] * 3, [2] * 3]
    assert rig.engine.loads == [2, 1, 2]


async def test_newer_versions_do_not_displace_one_not_read_yet(rig):
    rig.follow()
    rig.engine.may_finish.clear()
    running = rig.generate(0)
    await until(lambda: rig.engine.num_in_flight == 1)
    await rig.trainer.publish(1)
    await rig.pulled(1)
    waiting = rig.generate(1)  # a group that waits behind the running one
    for version in (2, 3):
        await rig.trainer.publish(version)
        await rig.heard_of(version)
        await settle()
    assert rig.trainer.pulls == [1]
    rig.engine.may_finish.set()
    assert await asyncio.gather(running, waiting) == [[0] * 3, [1] * 3]
    await rig.pulled(1, 3)  # now that the copy is free; nobody has asked for 2


async def test_version_that_is_held_is_tried_again_behind_a_newer_one(rig, monkeypatch):
    """The held version is that of an evaluation, while training has gone on."""
    rig.trainer.newest = 2
    rig.follow()
    await rig.pulled(2)
    itinerary = FakeSource.itinerary

    async def refuse_once(self, version, base_version=None):
        monkeypatch.setattr(FakeSource, "itinerary", itinerary)
        raise WeightsError("UNAVAILABLE: connection reset")

    monkeypatch.setattr(FakeSource, "itinerary", refuse_once)
    assert await rig.generate(1) == [1, 1, 1]


async def test_idle_advance_never_goes_back(rig):
    rig.trainer.newest = 3
    await rig.gate.advance(3)
    await rig.gate.advance(2)
    assert rig.engine.version() == 3
    assert rig.engine.loads == [3]


async def test_missing_version_does_not_block_the_pull_of_an_older_one(rig):
    rig.trainer.newest = 20
    rig.follow()
    await rig.pulled(20)
    assert not rig.puller.announcements.has_reached(45)
    with pytest.raises(WeightsError):
        await (await rig.puller.obtain(45, deadline_s=0)).complete()
    await rig.trainer.publish(21)
    await rig.pulled(20, 21)
    assert await rig.generate(21) == [21, 21, 21]
    await rig.trainer.publish(45)
    await rig.pulled(20, 21, 45)
    assert rig.puller.announcements.has_reached(45)


async def test_what_the_trainer_announced_is_forgotten_when_it_is_gone(rig):
    rig.trainer.newest = 45
    rig.follow()
    await until(lambda: rig.puller.announcements.has_reached(45))
    rig.trainer.newest = 20  # restarted from a checkpoint
    await rig.trainer.break_watches("trainer:2")  # the job still names the old address
    await until(lambda: not rig.puller.announcements.has_reached(45))
    assert not rig.puller.announcements.has_reached(20)
    rig.address = "trainer:2"
    await until(lambda: rig.puller.announcements.has_reached(20))
    assert not rig.puller.announcements.has_reached(45)


async def test_silent_server_is_left_when_the_job_names_a_new_address(rig, monkeypatch):
    monkeypatch.setattr(puller_module, "ADDRESS_CHECK_S", 0.05)
    rig.follow()
    await rig.heard_of(0)
    rig.trainer.address = rig.address = "trainer:2"  # the old one says nothing, not even goodbye
    await until(lambda: rig.trainer.num_watches == 2)
    await settle(0.2)
    assert rig.trainer.num_watches == 2


async def test_server_that_never_answers_is_given_up_after_a_deadline(rig, monkeypatch, caplog):
    monkeypatch.setattr(puller_module, "ADDRESS_CHECK_S", 0.02)
    monkeypatch.setattr(puller_module, "FIRST_ANSWER_S", 0.05)
    rig.trainer.newest = -1  # nothing to announce
    rig.follow()
    await until(lambda: rig.trainer.num_watches > 1)
    assert "no answer" in caplog.text


# ---- the copy stays as it is while the engine reads it ---------------------------------------------------------------


def hold_reads(engine: FakeEngine) -> asyncio.Event:
    """Hold the engine's reads: it reads the copy, or notices that the pull has failed, only when the event is set."""
    may_go_on, load = asyncio.Event(), engine.load

    async def load_slowly(policy_version, weights_file, arrivals):
        async def arrived():
            try:
                async for names in arrivals:
                    yield names
            finally:
                await may_go_on.wait()

        await load(policy_version, weights_file, arrived())

    engine.load = load_slowly  # type: ignore[method-assign]
    return may_go_on


async def break_half_way(self, key, *limits):
    """Instead of `FakeSource.pull`: the manifest is known by then, so the engine is loading."""
    yield full_plan(manifest_of(key.policy_version), key.shard)
    await asyncio.sleep(0.02)
    raise WeightsError("the trainer died")


async def test_newer_version_waits_while_one_is_read_a_second_time(rig, monkeypatch):
    """The load of version 1 fails half way, so the engine has to read version 0 again, which it has read before."""
    rig.follow()
    with monkeypatch.context() as patch:
        patch.setattr(FakeSource, "pull", break_half_way)
        patch.setattr(WeightsPuller.obtain, "__defaults__", (0.0,))
        rig.trainer.newest = 1
        with pytest.raises(WeightsError, match="the trainer died"):
            await rig.generate(1)
        await rig.heard_of(1)
        await until(lambda: rig.puller._current.is_over)  # the announced version is tried once more
    assert rig.engine.version() is None
    may_read = hold_reads(rig.engine)
    load = rig.generate(0)
    await rig.pulled(0)
    await rig.trainer.publish(2)
    await rig.heard_of(2)
    await settle()
    assert rig.trainer.pulls == [0]
    may_read.set()
    assert await load == [0, 0, 0]
    await rig.pulled(0, 2)


async def test_newer_version_waits_for_an_engine_whose_pull_failed(rig, monkeypatch):
    rig.follow()
    may_stop = hold_reads(rig.engine)
    with monkeypatch.context() as patch:
        patch.setattr(FakeSource, "pull", break_half_way)
        patch.setattr(WeightsPuller.obtain, "__defaults__", (0.0,))
        rig.trainer.newest = 1
        load = rig.generate(1)
        await until(lambda: rig.engine.loads == [1] and rig.puller._current.is_over)
    await rig.trainer.publish(2)
    await rig.heard_of(2)
    await settle()
    assert rig.trainer.pulls == []
    may_stop.set()
    with pytest.raises(WeightsError, match="the trainer died"):
        await load
    await rig.pulled(2)


async def test_closing_gate_ends_a_load_that_waits_for_its_pull(tmp_path, monkeypatch):
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    async def be_silent(self, key, *limits):
        yield full_plan(manifest_of(key.policy_version), key.shard)
        await never()

    before = asyncio.all_tasks()
    rig = Rig(tmp_path)
    monkeypatch.setattr(FakeSource, "finish", never)  # a trainer that ignores it delays nothing
    await rig.start()
    monkeypatch.setattr(FakeSource, "pull", be_silent)
    rig.follow()
    await rig.trainer.publish(1)
    request = rig.generate(1)
    await until(lambda: rig.engine.loads == [1])
    for task in (request, rig.following):
        task.cancel()
    async with asyncio.timeout(gate_module.CLOSE_DEADLINE_S / 2):
        await rig.gate.close()
        await rig.puller.close()
    await settle(0)
    assert asyncio.all_tasks() == before


# ---- visitors ----------------------------------------------------------------------------------------------------


class Visit:
    """A chat that runs until it may end, or is cancelled; then it leaves when it may."""

    def __init__(self, rig: Rig) -> None:
        self.may_end, self.is_leaving, self.may_leave = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.may_leave.set()
        self.versions: list[int] = []
        self.task = asyncio.create_task(self.talk(rig.gate))

    async def talk(self, gate: VersionGate) -> str:
        async with gate.visit() as version:
            self.versions.append(version)
            try:
                await self.may_end.wait()
            finally:
                self.is_leaving.set()
                await self.may_leave.wait()
            return f"by {version}"


async def begin_visit(rig: Rig) -> Visit:
    visit = Visit(rig)
    await until(lambda: visit.versions)
    return visit


async def test_visitor_stays_when_the_group_that_wants_a_load_goes(rig):
    rig.gate._limits = GateLimits(60.0, grace_s=60.0)
    rig.trainer.newest = 1
    visit, loading = await begin_visit(rig), rig.generate(1)
    await until(lambda: rig.gate._wanted == 1)
    loading.cancel()
    await settle()
    move_clock(120.0)  # longer than its grace
    await settle()
    visit.may_end.set()
    assert (await visit.task, rig.engine.loads) == ("by 0", [])


async def test_grace_runs_while_groups_are_still_generating(rig):
    """A visitor costs nothing but what is left of its grace when the last group is done."""
    rig.gate._limits = GateLimits(60.0, grace_s=60.0)
    rig.trainer.newest = 1
    rig.engine.may_finish.clear()
    old, visit = rig.generate(0), await begin_visit(rig)
    new = rig.generate(1)
    await until(lambda: rig.gate._wanted == 1)
    move_clock(120.0)
    await settle()
    assert not visit.task.done()  # nothing would be won by cancelling it
    rig.engine.may_finish.set()
    async with asyncio.timeout(30.0):  # another 60 s, if its grace began only now
        assert (await old, await new) == ([0] * 3, [1] * 3)
    with pytest.raises(PolicyMoved):
        await visit.task


async def test_visitor_that_comes_when_a_load_is_due_gets_the_new_one(rig):
    rig.trainer.newest = 1
    rig.engine.may_finish.clear()
    old = rig.generate(0)
    await settle()
    new = rig.generate(1)
    await settle()
    visit = Visit(rig)
    await settle()
    assert visit.versions == []
    rig.engine.may_finish.set()
    await asyncio.gather(old, new)
    visit.may_end.set()
    assert await visit.task == "by 1"


async def test_visitor_waits_for_a_load_whose_first_waiter_has_left(rig, monkeypatch):
    monkeypatch.setattr(gate_module, "CLOSE_DEADLINE_S", 0.1)
    rig.trainer.newest = 1
    rig.engine.hangs_in.add("load")
    new = rig.generate(1)
    while not rig.engine.loads:
        await settle(0.01)
    new.cancel()
    await settle()
    visit = Visit(rig)
    await settle()
    assert not visit.task.done()
    assert visit.versions == []
    visit.task.cancel()
    await rig.gate.close()


async def test_visitor_is_refused_when_the_last_load_has_failed(rig):
    rig.engine._version = None
    with pytest.raises(WeightsError, match="serves no policy version"):
        await Visit(rig).task


async def test_load_waits_for_a_visitor_who_already_leaves(rig):
    rig.trainer.newest = 1
    visit = await begin_visit(rig)
    visit.may_leave.clear()
    first = rig.generate(1)
    await asyncio.wait_for(visit.is_leaving.wait(), 5.0)
    first.cancel()
    second = rig.generate(1)
    await settle()
    assert rig.engine.loads == []
    visit.may_leave.set()
    assert await second == [1, 1, 1]
    with pytest.raises(PolicyMoved):
        await visit.task


async def test_visitor_that_does_not_leave_breaks_the_engine(rig, monkeypatch):
    monkeypatch.setattr(gate_module, "LEAVE_DEADLINE_S", 0.1)
    rig.trainer.newest = 1
    visit = await begin_visit(rig)
    visit.may_leave.clear()
    with pytest.raises(EngineBroken, match="1 chats did not end"):
        await rig.generate(1)
    assert rig.engine.loads == []
    visit.may_leave.set()
    with pytest.raises(PolicyMoved):
        await visit.task
