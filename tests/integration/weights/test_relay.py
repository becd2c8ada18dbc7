"""Rollouts that pass on what they pull, over real gRPC: few copies leave the trainer, and nobody depends on a peer."""

import asyncio
import time
from dataclasses import replace

import pytest

from onbeat.contracts.errors import WeightsError
from onbeat.weights import client as client_module
from onbeat.weights import host as host_module
from onbeat.weights import pull as pull_module
from onbeat.weights import server as server_module
from onbeat.weights.client import WeightsClient
from onbeat.weights.host import full_plan
from onbeat.weights.security import WireSecurity
from onbeat.weights.server import Payload
from onbeat.weights.wire import Manifest, PayloadKey, Peer
from services.trainer.weights.relay_tree import Sources
from services.trainer.weights.store import WeightStore
from tests.waiting import until
from tests.weight_plane import JOB, Plane, size_of, stepped, weights

pytestmark = pytest.mark.usefixtures("small_messages")


class Valve:
    """A fault that lets the plan and `num_messages` pass, and the rest when it is opened."""

    def __init__(self, num_messages: int = 3) -> None:
        self._num_messages = num_messages
        self.is_open = asyncio.Event()

    async def __call__(self, messages, key):
        num_passed = 0
        async for message in messages:
            if num_passed > self._num_messages:
                await self.is_open.wait()
            yield message
            num_passed += 1


async def join_a_stuck_relay(plane):
    """Add a relay that got the beginning of version 0 and no more; return it, its pull, and a child near it."""
    await plane.trainer.publish(0, weights(0))
    plane.trainer.server.faults = [Valve()]
    relay, child = await plane.join("relay"), await plane.join("child")
    stuck = relay.start(0)
    await until(lambda: stuck.stats.received_bytes > 0)
    return stuck, child


# ---- few copies leave the trainer ------------------------------------------------------------------------------------


async def test_a_relay_passes_on_what_it_does_not_have_in_full(plane):
    tensors = weights(0)
    await plane.trainer.publish(0, tensors)
    valve = Valve()
    plane.trainer.server.faults = [valve]
    chain = [await plane.join(f"r{number}") for number in range(3)]
    pulls = []
    for rollout in chain:
        pulls.append(rollout.start(0))
        await until(lambda: pulls[-1].stats.received_bytes == 3 * 64 << 10)
    assert [pull.is_over for pull in pulls] == [False] * 3
    valve.is_open.set()
    for rollout, pull in zip(chain, pulls, strict=True):
        await rollout.see_through(pull)
    sent_by = [plane.trainer.address, *(rollout.puller.connections.peer.address for rollout in chain)]
    assert [pull.stats.sources for pull in pulls] == [[address] for address in sent_by[:3]]
    assert plane.trainer.server.num_bytes_sent == size_of(tensors)


@pytest.mark.parametrize("egress", [1, 2])
async def test_trainer_sends_only_egress_copies_to_six_hosts_at_once(egress):
    async with Plane(egress=egress) as plane:
        rollouts = [await plane.join(f"r{number}") for number in range(6)]
        tensors = weights(0)
        for version in range(3):
            snapshot = await plane.trainer.publish(version, tensors)
            sent = plane.trainer.server.num_bytes_sent
            valve = Valve(0)  # opened when all have asked: until then the trainer has its copies to send
            plane.trainer.server.faults, plane.trainer.server.located = [valve] * egress, []
            waiting = [asyncio.create_task(rollout.pull(version)) for rollout in rollouts]
            await until(lambda: len(plane.trainer.server.located) == len(rollouts))
            valve.is_open.set()
            pulls = await asyncio.gather(*waiting)
            assert [fault for pull in pulls for fault in pull.stats.faults] == []
            size = snapshot.delta.plan.size_bytes if snapshot.delta else size_of(tensors)
            assert plane.trainer.server.num_bytes_sent - sent <= egress * size
            tensors = stepped(tensors, version)


# ---- a peer that goes its own way ------------------------------------------------------------------------------------


async def test_relay_that_moves_on_redirects_its_children(plane):
    tensors = weights(0)
    await plane.trainer.publish(0, tensors)
    relay, child = await plane.join("relay", zone="near"), await plane.join("child", zone="near")
    await relay.pull(0)
    valve = Valve()
    relay.server.faults = [valve]
    pull = child.start(0)
    await until(lambda: pull.stats.received_bytes > 0)
    await plane.trainer.publish(1, stepped(tensors, 1))
    await relay.pull(1)
    valve.is_open.set()
    await child.see_through(pull)
    assert "ABORTED: version 0 in full is given up: version 1 replaces it" in pull.stats.faults[0]
    assert pull.stats.sources == [plane.trainer.address]
    assert pull.stats.received_bytes == size_of(tensors)
    assert (await child.pull(1)).stats.faults == []


async def test_children_of_a_relay_whose_pull_fails_learn_it_at_once(plane):
    stuck, child = await join_a_stuck_relay(plane)
    pull = child.start(0)
    await until(lambda: pull.stats.received_bytes > 0)
    started = time.monotonic()
    await stuck.cancel()
    await child.see_through(pull)
    assert time.monotonic() - started < 3
    assert "ABORTED" in pull.stats.faults[0]


async def test_a_relay_that_is_full_sends_its_children_elsewhere(plane, tmp_path):
    await plane.trainer.publish(0, weights(0))
    relay, child = await plane.join("relay", zone="near"), await plane.join("child", zone="near")
    await relay.server.stop()
    relay.server._max_concurrent_calls = 1
    relay.puller.serve_at(f"127.0.0.1:{await relay.server.start('127.0.0.1', 0)}")
    await relay.pull(0)
    relay.server.faults = [Valve()]
    other = WeightsClient(relay.puller.connections.peer.address, JOB)
    stream = other.pull(PayloadKey(0))
    await anext(stream)
    pull = await child.pull(0)
    assert "RESOURCE_EXHAUSTED" in pull.stats.faults[0]
    assert pull.stats.sources == [plane.trainer.address]
    await stream.aclose()
    await other.close()


async def test_a_relay_waits_for_what_it_is_about_to_have(plane):
    """The child is sent to it before its own first byte has come."""
    await plane.trainer.publish(0, weights(0))
    valve = Valve(-1)
    plane.trainer.server.faults = [valve]
    relay, child = await plane.join("relay"), await plane.join("child")
    pulls = [relay.start(0)]
    await until(lambda: bool(plane.trainer.server.pulled))
    pulls.append(child.start(0))
    await until(lambda: bool(relay.server.pulled))
    valve.is_open.set()
    await relay.see_through(pulls[0])
    await child.see_through(pulls[1])
    assert pulls[1].stats.faults == []
    assert pulls[1].stats.sources == [relay.puller.connections.peer.address]


async def test_relay_that_never_gets_its_version_reports_it_in_time(plane, monkeypatch):
    monkeypatch.setattr(host_module, "EXPECT_DEADLINE_S", 0.2)
    await plane.trainer.publish(0, weights(0))
    plane.trainer.server.faults = [Valve(-1)]
    relay, child = await plane.join("relay"), await plane.join("child")
    stuck = relay.start(0)
    await until(lambda: bool(plane.trainer.server.pulled))
    pull = await child.pull(0)
    assert "NOT_FOUND" in pull.stats.faults[0]
    assert pull.stats.sources == [plane.trainer.address]
    await stuck.cancel()


async def test_a_relay_whose_source_is_silent_keeps_its_pullers(plane, monkeypatch):
    """The relay finds another source; who pulls from it gets signs of life meanwhile, and is not to blame it."""
    monkeypatch.setattr(server_module, "SIGN_OF_LIFE_S", 0.05)
    stuck, child = await join_a_stuck_relay(plane)
    waiting = child.start(0)
    await until(lambda: waiting.stats.received_bytes > 0)
    monkeypatch.setattr(client_module, "MESSAGE_DEADLINE_S", 0.3)
    await asyncio.sleep(1.0)
    assert not waiting.stats.faults
    await stuck.cancel()
    await waiting.complete()


async def test_relay_with_a_silent_source_redirects_pullers_in_time(plane, monkeypatch):
    monkeypatch.setattr(server_module, "GROWTH_DEADLINE_S", 0.2)
    monkeypatch.setattr(server_module, "SIGN_OF_LIFE_S", 0.05)
    stuck, child = await join_a_stuck_relay(plane)
    pull = await child.pull(0)
    assert "ABORTED" in pull.stats.faults[0]
    await stuck.cancel()


async def test_nothing_is_sent_twice_when_a_source_in_the_chain_dies(plane, monkeypatch):
    monkeypatch.setattr(server_module, "STOP_GRACE_S", 0.0)
    tensors = weights(0)
    await plane.trainer.publish(0, tensors)
    valve = Valve(6)
    plane.trainer.server.faults = [valve]
    chain = [await plane.join(f"r{number}") for number in range(3)]
    pulls = []
    for rollout in chain:
        pulls.append(rollout.start(0))
        await until(lambda: pulls[-1].stats.received_bytes == 6 * 64 << 10)
    await chain[1].server.stop()
    await until(lambda: bool(pulls[2].stats.faults))
    valve.is_open.set()
    for rollout, pull in zip(chain, pulls, strict=True):
        await rollout.see_through(pull)
        assert pull.stats.received_bytes == size_of(tensors)


async def test_ten_broken_relays_do_not_keep_anybody_from_the_trainer(plane):
    await plane.trainer.publish(0, weights(0))
    relays = [await plane.join(f"relay-{number}", zone="near") for number in range(10)]
    for relay in relays:
        await relay.pull(0)
    for relay in relays:
        await relay.server.stop()
    pull = await (await plane.join("r0", zone="near")).pull(0)
    assert len(pull.stats.faults) > pull_module.MAX_SOURCES
    assert pull.stats.sources == [plane.trainer.address]


# ---- shards ----------------------------------------------------------------------------------------------------------


class TwoShards(WeightStore):
    """Both shards of each version at one address, in full."""

    async def payload(self, key):
        snapshot = self.get(key.policy_version)
        tensors = snapshot.manifest.shards[key.shard]
        return Payload(key, full_plan(snapshot.manifest, key.shard), snapshot.buffers[tensors.start : tensors.stop])


async def publish_in_two_shards(trainer, version, tensors):
    """Publish in two shards, of which the first has one tensor."""
    await trainer.publish(version, tensors)
    snapshot = trainer.store.get(version)
    trainer.store.add(replace(snapshot, manifest=Manifest(version, snapshot.manifest.tensors, (1,)), delta=None))


async def restart_in_two_shards(trainer):
    await trainer.server.stop()
    trainer.store, trainer._published = TwoShards(), None
    trainer.server = trainer._create_server()
    await trainer.start()
    root = Peer(address=trainer.address, host_id="trainer's host")
    trainer.server.sources = Sources([root, root])


@pytest.fixture
async def sharded(plane):
    await restart_in_two_shards(plane.trainer)
    return plane


async def test_shards_arrive_side_by_side_and_are_passed_on(sharded):
    tensors = weights(0)
    await publish_in_two_shards(sharded.trainer, 0, tensors)
    rollouts = [await sharded.join(f"r{number}") for number in range(3)]
    pulls = await asyncio.gather(*(rollout.pull(0) for rollout in rollouts))
    assert [fault for pull in pulls for fault in pull.stats.faults] == []
    assert {key.shard for key, _ in sharded.trainer.server.pulled} == {0, 1}
    assert sharded.trainer.server.num_bytes_sent == size_of(tensors)


async def test_shard_cut_off_by_the_others_failure_is_not_complete(sharded):
    """Both come from one relay over one connection, which is given up when the first one fails."""
    await publish_in_two_shards(sharded.trainer, 0, weights(0))
    relay, child = await sharded.join("relay", zone="near"), await sharded.join("child", zone="near")
    await relay.pull(0)
    sharded.trainer.server.pulled.clear()

    async def broken_in_the_first(messages, key):
        async for message in messages:
            yield message
            await asyncio.sleep(0.05)
            if key.shard == 0:
                raise RuntimeError("the source breaks, as it was asked to")

    relay.server.faults = [broken_in_the_first, broken_in_the_first]
    pull = await child.pull(0)
    assert len(pull.stats.faults) == 2
    assert {key.shard for key, _ in sharded.trainer.server.pulled} == {0, 1}


async def test_trainer_that_returns_with_other_shards_is_followed(plane):
    """The trainer goes from one shard to two and back: first in full, without older deltas, then by deltas again."""
    tensors, trainer = weights(0), plane.trainer
    rollouts = [await plane.join(f"r{number}") for number in range(2)]

    async def received() -> list[int]:
        pulls = await asyncio.gather(*(rollout.pull(max(trainer.tensors), deadline_s=0) for rollout in rollouts))
        assert [fault for pull in pulls for fault in pull.stats.faults] == []
        return [pull.stats.received_bytes for pull in pulls]

    await trainer.publish(0, tensors)
    assert await received() == [size_of(tensors)] * 2
    await restart_in_two_shards(trainer)
    await publish_in_two_shards(trainer, 1, stepped(tensors, 1))
    assert await received() == [size_of(tensors)] * 2
    await trainer.restart()
    await trainer.publish(2, stepped(tensors, 2))
    assert await received() == [size_of(tensors)] * 2
    snapshot = await trainer.publish(3, stepped(trainer.tensors[2], 3))
    assert await received() == [snapshot.delta.plan.size_bytes] * 2


# ---- who may take part -----------------------------------------------------------------------------------------------


async def assert_only_these_take_part(security, *strangers):
    """Assert that all rollouts with this security get each version, also from each other, and strangers get none."""
    async with Plane(security=security) as plane:
        tensors = weights(0)
        await plane.trainer.publish(0, tensors)
        rollouts = [await plane.join(f"r{number}") for number in range(3)]
        for version in range(2):
            pulls = await asyncio.gather(*(rollout.pull(version) for rollout in rollouts))
            assert [fault for pull in pulls for fault in pull.stats.faults] == []
            assert {pull.stats.sources[0] for pull in pulls} > {plane.trainer.address}
            await plane.trainer.publish(version + 1, stepped(tensors, version))
        await rollouts[0].pull(2)
        for address in (plane.trainer.address, rollouts[0].puller.connections.peer.address):
            for wrong, code in strangers:
                stranger = WeightsClient(address, JOB, wrong)
                with pytest.raises(WeightsError, match=code):
                    await anext(stranger.pull(PayloadKey(2)))
                await stranger.close()


async def test_with_an_api_key_only_key_holders_are_served():
    keys = [WireSecurity(), WireSecurity(api_key="guess")]
    await assert_only_these_take_part(WireSecurity(api_key="secret"), *((key, "UNAUTHENTICATED") for key in keys))


async def test_with_mutual_tls_only_certificate_holders_are_served(authority):
    cert, key = authority.issue("127.0.0.1")
    strangers = [WireSecurity(tls_ca=authority.cert), WireSecurity()]
    security = WireSecurity(tls_cert=cert, tls_key=key, tls_ca=authority.cert)
    await assert_only_these_take_part(security, *((stranger, "UNAVAILABLE") for stranger in strangers))
