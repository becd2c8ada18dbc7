"""Weights over real gRPC: every version arrives bit for bit or not at all, whatever happens on the way."""

import asyncio
import re
import threading
import time

import pytest
import torch
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onbeat.contracts.errors import WeightsError
from onbeat.weights import client as client_module
from onbeat.weights import pull as pull_module
from onbeat.weights import server as server_module
from onbeat.weights.client import WeightsClient
from onbeat.weights.pull import Attempt
from onbeat.weights.security import PLAIN
from onbeat.weights.wire import PayloadKey, Peer, Plan, data_message, plan_message, read_message
from services.rollout.puller import WeightsPuller
from services.trainer.weights.server import WeightServer
from services.trainer.weights.store import WeightStore, take_snapshot
from tests.waiting import until
from tests.weight_plane import JOB, MIB, Plane, Trainer, bits, size_of, stepped, weights


@pytest.fixture
async def client(plane):
    client = WeightsClient(plane.trainer.address, JOB)
    yield client
    await client.close()


# ---- what a trainer tells --------------------------------------------------------------------------------------------


async def test_describe_carries_files_beyond_grpcs_default_limit():
    store, files = WeightStore(), {"config.json": b'{"a": 1}', "tokenizer.json": b"x" * 6 * MIB}
    store.add(take_snapshot(7, weights(0, 10).items()))
    server = WeightServer(JOB, files, store)
    client = WeightsClient(f"127.0.0.1:{await server.start('127.0.0.1', 0)}", JOB)
    description = await client.describe()
    assert (description.policy_version, description.files) == (7, files)
    await client.close()
    await server.stop()


async def test_what_cannot_be_served_is_refused_with_the_reason(plane, client):
    for version in range(3):
        await plane.trainer.publish(version, weights(version, 10))
    with pytest.raises(WeightsError, match=r"NOT_FOUND.*held: \[1, 2\]"):
        await client.itinerary(0)
    with pytest.raises(WeightsError, match=r"NOT_FOUND.*version 0 in full is not held here; versions held: \[1, 2\]"):
        await anext(client.pull(PayloadKey(0)))
    with pytest.raises(WeightsError, match="OUT_OF_RANGE"):
        await anext(client.pull(PayloadKey(1), 1000 * MIB))
    client.job_id = "other"
    for call in (client.describe(), client.itinerary(1), anext(client.pull(PayloadKey(1))), anext(client.watch())):
        with pytest.raises(WeightsError, match="serves job job, not other"):
            await call


async def test_watch_sees_the_current_and_each_newer_version(plane, client):
    await plane.trainer.publish(3, weights(3, 10))
    versions = client.watch()
    assert await anext(versions) == 3
    waiting = asyncio.ensure_future(anext(versions))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await plane.trainer.publish(4, weights(4, 10))
    assert await asyncio.wait_for(waiting, 5) == 4


async def test_a_server_that_is_gone_is_an_error_not_a_wait():
    client = WeightsClient("127.0.0.1:1", JOB)
    for call in (client.describe(), client.itinerary(0), anext(client.pull(PayloadKey(0))), anext(client.watch())):
        with pytest.raises(WeightsError, match=r"at 127.0.0.1:1: UNAVAILABLE"):
            await asyncio.wait_for(call, 5)
    await client.close()


async def test_pull_whose_connection_closes_fails_and_is_not_cancelled(plane, client):
    """A task that ends with CancelledError is nobody's failure, so its part would be missed in silence."""
    await plane.trainer.publish(0, weights(0, 10))
    plane.trainer.server.faults = [silent]
    messages = client.pull(PayloadKey(0))
    await anext(messages)
    waiting = asyncio.ensure_future(anext(messages))
    await asyncio.sleep(0.05)
    await client.close()
    with pytest.raises(WeightsError, match="closed here"):
        await asyncio.wait_for(waiting, 5)


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda answer: setattr(answer.tensors[0], "digest", bytes(32)), "contradicts its digest"),
        (lambda answer: setattr(answer.tensors[0], "size_bytes", 1 << 50), "has 1125899906842624 bytes"),
        (lambda answer: setattr(answer, "policy_version", 1), "sent the manifest of version 1, not 0"),
        (lambda answer: answer.shard_starts.extend([4, 2]), "shards that overlap"),
        (lambda answer: answer.CopyFrom(type(answer)(digest=blake3().digest())), "version 0 has no tensors"),
    ],
)
async def test_impossible_manifest_is_refused_before_memory_is_taken(plane, spoil, problem):
    await plane.trainer.publish(0, weights(0, 10))
    rollout = await plane.join("r0")
    plane.trainer.server.spoil_manifest = spoil
    with pytest.raises(WeightsError, match=problem):
        await rollout.pull(0, deadline_s=0)
    assert rollout.puller.host is None


async def test_held_version_stays_when_no_next_one_can_be_had(plane):
    await plane.trainer.publish(0, weights(0, 10))
    rollout = await plane.join("r0")
    await rollout.pull(0)
    await plane.trainer.publish(1, weights(1, 20))
    with pytest.raises(WeightsError, match="another model"):
        await rollout.pull(1, deadline_s=0)
    rollout.assert_holds(0)
    await plane.trainer.server.stop()
    with pytest.raises(WeightsError, match="UNAVAILABLE"):
        await rollout.pull(1, deadline_s=0.2)
    rollout.assert_holds(0)


# ---- every version arrives bit for bit -------------------------------------------------------------------------------


async def test_versions_of_several_mib_arrive_in_full_then_as_deltas(plane):
    rollout = await plane.join("r0")
    tensors = weights(0, 3 * MIB)
    for version in range(4):
        snapshot = await plane.trainer.publish(version, tensors)
        pull = await rollout.pull(version)
        assert pull.manifest.digest == snapshot.manifest.digest
        assert pull.stats.received_bytes == (snapshot.delta.plan.size_bytes if version else size_of(tensors))
        assert pull.stats.full_bytes == size_of(tensors)
        assert (pull.stats.faults, pull.stats.sources) == ([], [plane.trainer.address])
        tensors = stepped(tensors, version)


async def test_who_has_missed_versions_follows_the_chain_of_deltas(plane):
    rollout, tensors = await plane.join("r0"), weights(0)
    await plane.trainer.publish(0, tensors)
    await rollout.pull(0)
    sizes = []
    for version in range(1, 5):
        # Some tensors change in every step, one only at first, and one goes back to what it was.
        tensors = stepped(tensors, version, names=["big", "half"] if version == 1 else ["big"])
        tensors["scalar"] = torch.tensor(float(version % 4))
        sizes.append((await plane.trainer.publish(version, tensors)).delta.plan.size_bytes)
    pull = await rollout.pull(4)
    assert pull.stats.received_bytes == sum(sizes) < size_of(tensors)
    assert pull.stats.faults == []


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["update", "update", "join", "pull", "all", "all", "leave", "back", "restart"]),
        st.integers(0, 9),
    ),
    max_size=25,
)


class Life:
    """A job's random life. Each operation takes a number that says whom, or how much."""

    def __init__(self, plane: Plane) -> None:
        self.plane, self.rollouts = plane, []
        self.version, self.num_done = 0, 0

    async def run(self, operations):
        await self.plane.trainer.publish(0, weights(0, 2000))
        for operation, number in [("join", 0), *operations, ("join", 1), ("all", 0)]:
            self.num_done += 1
            await getattr(self, operation)(number)

    async def update(self, number):
        share = (0.0, 0.001, 0.02, 0.3, 1.0)[number % 5]
        names = (None, ["big"], ["half", "small"])[number % 3]
        tensors = stepped(self.plane.trainer.tensors[self.version], self.num_done, share, names)
        self.version += 1
        await self.plane.trainer.publish(self.version, tensors)

    async def join(self, number):
        name = f"rollout-{self.num_done}"
        place = {"host": f"host-{number % 3}", "is_relay": number != 7}
        self.rollouts.append(await self.plane.join(name, **place))

    async def pull(self, number):
        if self.rollouts:
            await self.rollouts[number % len(self.rollouts)].pull(self.version)

    async def all(self, _):
        await asyncio.gather(*(rollout.pull(self.version) for rollout in self.rollouts))

    async def leave(self, number):
        if self.rollouts:
            await self.rollouts.pop(number % len(self.rollouts)).leave()

    async def back(self, number):
        if self.rollouts:
            await self.rollouts[number % len(self.rollouts)].pull(min(self.plane.trainer.store.versions()))

    async def restart(self, number):
        """Restart the trainer at the same or an older version, sometimes with other bits than before."""
        self.version = max(0, self.version - number % 3)
        tensors = self.plane.trainer.tensors[self.version]
        await self.plane.trainer.restart()
        await self.plane.trainer.publish(self.version, stepped(tensors, self.num_done, share=0.01 * (number > 5)))


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(OPERATIONS)
def test_all_versions_are_equal_everywhere_through_all_faults(operations):
    async def live():
        async with Plane() as plane:
            await Life(plane).run(operations)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_module, "CHUNK_BYTES", 1000)
        asyncio.run(live())


# ---- what breaks on the way ------------------------------------------------------------------------------------------


def edited(edit):
    """Make a fault that changes the list of a pull's messages."""

    async def fault(messages, key):
        for message in edit([message async for message in messages], key):
            yield message

    return fault


def flip_a_bit(messages, key):
    spoiled = bytearray(messages[len(messages) // 2])
    spoiled[-len(spoiled) // 2] ^= 4
    return [*messages[: len(messages) // 2], bytes(spoiled), *messages[len(messages) // 2 + 1 :]]


def spoil_the_start(messages, key):
    """Overwrite the sizes of the streams of an encoded tensor."""
    first = read_message(key, messages[1])
    return [messages[0], data_message([memoryview(b"\xff" * 8), first[8:]]), *messages[2:]]


def with_plan(change):
    """Another plan, which agrees with its digest."""

    def edit(messages, key):
        entries = read_message(key, messages[0]).entries
        parts = [(entry.tensor_index, entry.encoding, entry.size_bytes) for entry in entries]
        return [plan_message(key, Plan.of(change(parts))), *messages[1:]]

    return edit


async def broken(messages, key):
    yield await anext(messages)
    yield await anext(messages)
    raise RuntimeError("the source breaks, as it was asked to")


async def silent(messages, key):
    yield await anext(messages)
    await asyncio.sleep(60)


# tests/unit/weights tests which plans and messages are refused.
FAULTS = {
    "flipped bit": (
        edited(flip_a_bit),
        "does not match its (digest|checksum)|came|not a zstd frame|ends at|comes after",
    ),
    "spoiled start": (edited(spoil_the_start), "does not match its (digest|checksum)|a stream ends at"),
    "short stream": (edited(lambda messages, key: messages[:-1]), r"ended after \d+ of \d+ bytes"),
    "nothing": (edited(lambda messages, key: []), "ended after 0 of 0 bytes"),
    "long stream": (edited(lambda messages, key: [*messages, data_message([memoryview(b"x")])]), "bytes came of"),
    "data first": (edited(lambda messages, key: [messages[1], messages[0], *messages[2:]]), "before its plan"),
    "plan out of order": (edited(with_plan(reversed)), "another model|out of order"),
    "noise": (edited(lambda messages, key: [messages[0], b"\xff" * 20, *messages[1:]]), "neither a plan nor data"),
    "broken source": (broken, "UNKNOWN"),
    "silent source": (silent, "silent for"),
}


@pytest.mark.parametrize("way", ["in full", "delta"])
@pytest.mark.parametrize("where", ["trainer", "relay"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_is_noticed_and_cured(fault, where, way, plane, small_messages, monkeypatch):
    spoil, problem = FAULTS[fault]
    if spoil is silent:  # a busy machine must not make the other sources silent as well
        monkeypatch.setattr(client_module, "MESSAGE_DEADLINE_S", 1.0)
    rollout, relay = await plane.join("r0", zone="near"), await plane.join("relay", zone="near")
    tensors = weights(0)
    await plane.trainer.publish(0, tensors)
    if way == "delta":
        await relay.pull(0)
        await rollout.pull(0)
        tensors = stepped(tensors, 1, share=0.3)
        await plane.trainer.publish(1, tensors)
    version = max(plane.trainer.tensors)
    server = plane.trainer.server
    if where == "relay":
        await relay.pull(version)
        server = relay.server
    server.faults = [spoil]

    pull = await rollout.pull(version)
    assert server.faults == []
    assert re.match(
        f"{relay.puller.connections.peer.address if where == 'relay' else plane.trainer.address}: .*({problem})",
        pull.stats.faults[0],
    )
    assert f"does not match its {'checksum' if where == 'relay' else 'digest'}" not in pull.stats.faults[0]
    # Where the first part of a delta cannot be trusted, the next source's contradicts it: then it comes in full.
    assert all("is another payload here" in fault for fault in pull.stats.faults[1:2])
    assert len(pull.stats.faults) <= 2

    await plane.trainer.publish(version + 1, stepped(tensors, 2))
    pull = await rollout.pull(version + 1)
    assert pull.stats.faults == []
    assert pull.stats.received_bytes < size_of(tensors) / 10


@pytest.mark.parametrize("way", ["in full", "delta"])
@pytest.mark.parametrize("fault", ["flipped bit", "short stream", "plan out of order", "broken source"])
async def test_trainer_that_never_delivers_is_an_error_and_no_version(fault, way, plane, small_messages):
    rollout, tensors = await plane.join("r0"), weights(0)
    await plane.trainer.publish(0, tensors)
    if way == "delta":
        await rollout.pull(0)
        await plane.trainer.publish(1, stepped(tensors, 1, share=0.3))
    version = max(plane.trainer.tensors)
    plane.trainer.server.faults = [FAULTS[fault][0]] * 1000
    started = time.monotonic()
    with pytest.raises(WeightsError, match=FAULTS[fault][1]):
        await rollout.pull(version, deadline_s=0.5)
    assert time.monotonic() - started < 3
    assert rollout.version is None
    assert len(plane.trainer.server.pulled) < 20, "it was asked again and again without a pause"
    plane.trainer.server.faults = []
    assert (await rollout.pull(version)).stats.faults == []


async def held_back(messages, key):
    """Slowly enough for the source to be stopped meanwhile."""
    async for message in messages:
        yield message
        await asyncio.sleep(0.05)


async def trickling(messages, key):
    """Send the plan, and then a byte at a time, for longer than any test waits."""
    async for message in messages:
        piece = read_message(key, message)
        if not isinstance(piece, memoryview):
            yield message
            continue
        for position in range(len(piece)):
            yield data_message([piece[position : position + 1]])
            await asyncio.sleep(0.02)


async def giving_signs_of_life(messages, key):
    yield await anext(messages)
    while True:
        yield data_message([])
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("fault", "progress_bytes", "problem"),
    [
        (trickling, client_module.PROGRESS_BYTES, "only [0-9]+ bytes in"),
        (giving_signs_of_life, client_module.PROGRESS_BYTES, "only [0-9]+ bytes in"),
        (trickling, 1, "only [0-9]+ of [0-9]+ bytes in"),  # enough for the rule of progress; the payload takes hours
    ],
)
async def test_source_that_is_alive_but_too_slow_is_left_in_time(fault, progress_bytes, problem, plane, monkeypatch):
    monkeypatch.setattr(client_module, "PROGRESS_S", 0.3)
    monkeypatch.setattr(client_module, "PROGRESS_BYTES", progress_bytes)
    await plane.trainer.publish(0, weights(0))
    relay, rollout = await plane.join("relay", zone="near"), await plane.join("r0", zone="near")
    await relay.pull(0)
    relay.server.faults = [fault]
    started = time.monotonic()
    pull = await rollout.pull(0)
    assert 0.3 < time.monotonic() - started < 3
    assert re.match(f"{relay.puller.connections.peer.address}: .*{problem}", pull.stats.faults[0])
    assert pull.stats.sources == [plane.trainer.address]


async def test_slow_source_is_kept_when_there_is_no_other(plane, small_messages, monkeypatch):
    monkeypatch.setattr(client_module, "PROGRESS_S", 0.1)
    monkeypatch.setattr(client_module, "PROGRESS_BYTES", 1)
    monkeypatch.setattr(pull_module, "SLOWEST_PULL_S", 0.1)
    tensors = weights(0)
    await plane.trainer.publish(0, tensors)
    rollout = await plane.join("r0")
    plane.trainer.server.faults = [held_back] * 2
    pull = await rollout.pull(0)
    assert len(pull.stats.faults) == 1
    assert pull.stats.sources == [plane.trainer.address]
    assert pull.stats.received_bytes == size_of(tensors)


async def test_source_with_another_plan_is_not_mixed_with_the_last(plane, small_messages):
    """A delta whose entries are swapped for others is cut; the trainer's goes on differently, so it starts anew."""
    rollout, tensors = await plane.join("r0"), weights(0)
    await plane.trainer.publish(0, tensors)
    await rollout.pull(0)
    await plane.trainer.publish(1, stepped(tensors, 1, share=0.3))
    plane.trainer.server.faults = [edited(lambda messages, key: with_plan(lambda parts: parts[:1])(messages, key)[:2])]
    pull = await rollout.pull(1)
    assert [("another payload here" in fault) for fault in pull.stats.faults] == [False, True]


async def test_tensor_spoiled_later_is_never_final_during_the_check(plane, small_messages, monkeypatch):
    """Three peers: right bytes of which some tensors are whole, then another plan, then wrong bytes."""

    async def wrong_then_silent(messages, key):
        """Send the plan, two messages of flipped bytes, and after a while the rest."""
        yield await anext(messages)
        for _ in range(2):
            async for message in messages:
                piece = bytes(255 ^ byte for byte in read_message(key, message))
                yield data_message([memoryview(piece)])
                break
        await asyncio.sleep(0.5)
        async for message in messages:
            yield message

    await plane.trainer.publish(0, weights(0))
    peers = [await plane.join(f"peer-{number}", zone="near") for number in range(3)]
    for peer in peers:
        await peer.pull(0)
    without_the_end = edited(lambda messages, key: messages[:-2])
    faults = (without_the_end, edited(with_plan(reversed)), wrong_then_silent)
    for peer, fault in zip(peers, faults, strict=True):
        peer.server.faults = [fault]
    rollout, check = await plane.join("r0", zone="near"), Attempt.check

    def check_slowly(self, *args):
        check(self, *args)
        time.sleep(0.1)

    monkeypatch.setattr(Attempt, "check", check_slowly)
    pull = await rollout.pull(0)
    assert [peer.server.faults for peer in peers] == [[]] * 3
    assert pull.stats.sources == [plane.trainer.address]


async def test_final_tensors_are_not_rewritten_by_the_next_source(plane, small_messages):
    """An engine may be reading it. The first stream is wrong in `big`, the second in `half`."""
    tensors = {name: weights(0)[name] for name in ("half", "big")}
    await plane.trainer.publish(0, tensors)
    rollout, seen = await plane.join("r0"), []

    def flipped(is_meant):
        async def fault(messages, key):
            start = 0
            async for message in messages:
                piece = read_message(key, message)
                if isinstance(piece, memoryview):
                    is_wrong, start = is_meant(start), start + len(piece)
                    message = data_message([memoryview(bytes(255 * is_wrong ^ byte for byte in piece))])
                yield message
                await asyncio.sleep(0.01)
                seen.append(0 in pull.final and bytes(rollout.puller.host.tensor(0)) == bits(tensors["half"]))

        return fault

    end_of_half = tensors["half"].nbytes
    plane.trainer.server.faults = [flipped(lambda start: start > end_of_half), flipped(lambda start: start < 100_000)]
    pull = rollout.start(0)
    await rollout.see_through(pull)
    assert len(pull.stats.faults) == 1, "wrong bytes for what is final already do no harm"
    first_seen = seen.index(True)
    assert all(seen[first_seen:])


async def test_pull_without_sources_fails_in_time_and_next_one_works(plane, small_messages, monkeypatch):
    monkeypatch.setattr(server_module, "STOP_GRACE_S", 0.0)
    await plane.trainer.publish(0, weights(0))
    relay, rollout = await plane.join("relay", zone="near"), await plane.join("r0", zone="near")
    await relay.pull(0)
    relay.server.faults = [held_back]
    pull = rollout.start(0, deadline_s=0.5)
    await until(lambda: pull.stats.received_bytes > 100_000)
    started = time.monotonic()
    await plane.trainer.server.stop()
    await relay.leave()
    with pytest.raises(WeightsError, match="UNAVAILABLE"):
        await rollout.see_through(pull)
    assert time.monotonic() - started < 5
    assert rollout.version is None
    await plane.trainer.restart()
    await plane.trainer.publish(0, weights(0))
    await rollout.pull(0)


async def test_trainer_that_returns_elsewhere_is_found_during_a_pull(plane):
    rollout = await plane.join("r0")
    await plane.trainer.server.stop()
    pull = rollout.start(0)
    await until(lambda: bool(pull.stats.faults))
    await plane.trainer.restart()
    await plane.trainer.publish(0, weights(0, 10))
    await rollout.see_through(pull)


async def test_trainer_that_returns_at_its_address_is_found_at_once(plane, client):
    """gRPC waits longer and longer between its own tries, and by default for all connections to an address together."""
    rollout = await plane.join("r0")
    await plane.trainer.server.stop()
    for _ in range(2):
        for call in (client.describe(), rollout.pull(0, deadline_s=0)):
            with pytest.raises(WeightsError, match="UNAVAILABLE"):
                await call
    await plane.trainer.restart(int(plane.trainer.address.rpartition(":")[2]))
    await plane.trainer.publish(0, weights(0, 10))
    await rollout.pull(0, deadline_s=0)


async def test_remade_versions_of_a_restarted_trainer_are_not_mixed(plane, small_messages, monkeypatch):
    """Some tensors of the first version 0 are final, and an engine may have read them."""
    monkeypatch.setattr(server_module, "STOP_GRACE_S", 0.0)
    await plane.trainer.publish(0, weights(0))
    rollout = await plane.join("r0")
    plane.trainer.server.faults = [held_back]
    pull = rollout.start(0)
    await until(lambda: bool(pull.final))
    await plane.trainer.restart()
    await plane.trainer.publish(0, weights(1))
    with pytest.raises(WeightsError, match="has other weights than when its pull began"):
        await rollout.see_through(pull)
    assert (await rollout.pull(0)).stats.faults == []


async def test_pull_during_a_step_in_place_ends_with_right_bits(plane, client, small_messages):
    """The version that it began with is gone, and some of its tensors are final; the next one is whole."""
    live = weights(0)
    await plane.trainer.publish_in_place(1, live)
    rollout = await plane.join("r0")
    plane.trainer.server.faults = [held_back]
    pull = rollout.start(1)
    await until(lambda: bool(pull.final))
    await plane.trainer.store.withdraw()
    for tensor in live.values():
        tensor += 1
    with pytest.raises(WeightsError, match="no version is published now"):
        await client.describe()
    await until(lambda: len(pull.stats.faults) > 1)
    assert "the next version is made in its place" in pull.stats.faults[0]
    assert "version 1 in full is not held here; versions held: []" in pull.stats.faults[1]
    await plane.trainer.publish_in_place(2, live)
    await pull.cancel()
    await rollout.pull(2)


async def test_bytes_that_a_step_tears_are_never_called_a_version(plane, small_messages):
    """The situation is as above, but the server would go on to send: the checksum of each tensor refuses the bytes."""
    live = weights(0)
    await plane.trainer.publish_in_place(1, live)
    rollout = await plane.join("r0")
    plane.trainer.server.faults = [held_back]
    pull = rollout.start(1, deadline_s=0.5)
    await until(lambda: pull.stats.received_bytes > 100_000)
    for tensor in live.values():
        tensor += 1
    with pytest.raises(WeightsError, match="does not match its checksum"):
        await rollout.see_through(pull)
    await plane.trainer.store.withdraw()
    await plane.trainer.publish_in_place(2, live)
    await rollout.pull(2)


async def test_arrivals_end_with_the_pull_and_not_with_the_last_name(plane, small_messages):
    """An engine that loads these tensors has loaded the version, which has to be complete by then."""
    tensors = {name: weights(0)[name] for name in ("half", "big")}
    await plane.trainer.publish(0, tensors)
    rollout, may_end = await plane.join("r0"), asyncio.Event()

    async def late_at_the_end(messages, key):
        *most, last = [message async for message in messages]
        for message in most:
            yield message
        await may_end.wait()
        yield last

    for is_cancelled in (True, False):
        plane.trainer.server.faults = [late_at_the_end]
        pull = rollout.start(0)
        arrivals = pull.arrivals(["half"])
        assert await asyncio.wait_for(anext(arrivals), 5) == ["half"]
        end = asyncio.ensure_future(anext(arrivals, None))
        await asyncio.sleep(0.05)
        assert not end.done()
        if is_cancelled:
            await pull.cancel()
            with pytest.raises(WeightsError, match="cancelled"):
                await end
        else:
            may_end.set()
            assert await asyncio.wait_for(end, 5) is None
            await rollout.see_through(pull)


async def test_tensor_is_final_while_the_next_ones_are_applied(plane, monkeypatch):
    """The bytes of all of them have arrived: an engine loads the first ones meanwhile."""
    await plane.trainer.publish(0, weights(0))
    rollout, may_check = await plane.join("r0"), threading.Event()
    await rollout.pull(0)
    await plane.trainer.publish(1, stepped(weights(0), seed=1))
    check = Attempt.check

    def check_late(attempt, index, shard):
        if attempt.host.layout.tensors[index].name == "half":
            assert may_check.wait(5)
        check(attempt, index, shard)

    monkeypatch.setattr(Attempt, "check", check_late)
    monkeypatch.setattr(pull_module, "APPLY_BYTES", size_of({"big": weights(0)["big"]}))
    pull = rollout.start(1)
    assert await asyncio.wait_for(anext(pull.arrivals(["big", "half"])), 4) == ["big"]
    may_check.set()
    await rollout.see_through(pull)


# ---- what answers is not the trainer -------------------------------------------------------------------------------


async def test_false_weights_service_is_refused_until_the_true_answers(plane):
    """It serves zeros, consistent in themselves, under the version's number and at the address in the job's record."""
    tensors = weights(0)
    true = await plane.trainer.publish(1, tensors)
    false = Trainer(1, PLAIN, 1024)
    await false.start()
    await false.publish(1, {name: torch.zeros_like(tensor) for name, tensor in tensors.items()})
    addresses = [false.address, false.address, plane.trainer.address]

    async def find_trainer() -> str:
        return addresses.pop(0) if len(addresses) > 1 else addresses[0]

    async def find_digest(version: int) -> str:
        return true.manifest.digest.hex()

    puller = WeightsPuller(
        lambda address: WeightsClient(address, JOB), find_trainer, Peer(worker_id="r0"), find_digest=find_digest
    )
    pull = puller.start(1, deadline_s=10.0)
    await pull.complete()
    assert len(pull.stats.faults) == 2
    assert all(f"{false.address} answers with other weights" in fault for fault in pull.stats.faults)
    assert puller.host.manifest.digest == true.manifest.digest
    await puller.close()
    await false.server.stop()


# ---- the base is not what the puller believes ------------------------------------------------------------------------


@pytest.mark.parametrize("names", [["big"], ["half"], ["big", "half"], ["scalar"]])
@pytest.mark.parametrize("updated", [["big"], ["half", "small"]])
async def test_base_with_equal_number_and_other_bits_never_corrupts(names, updated, plane):
    """The restarted trainer's version 0 differs in `names`; its delta to version 1 names `updated`."""
    rollout, tensors = await plane.join("r0"), weights(0)
    await plane.trainer.publish(0, tensors)
    await rollout.pull(0)
    await plane.trainer.restart()
    tensors = stepped(tensors, 1, share=1.0, names=names)
    await plane.trainer.publish(0, tensors)
    await plane.trainer.publish(1, stepped(tensors, 2, names=updated))
    pull = await rollout.pull(1)
    assert "does not match its checksum" in pull.stats.faults[0]
    assert pull.stats.received_bytes >= size_of(tensors)


async def test_chain_from_other_bits_back_to_held_ones_is_not_trusted(plane):
    """`half` is held with the very digest of version 2; but the first delta, from other bits, has changed it here."""
    rollout, tensors = await plane.join("r0"), weights(0)
    await plane.trainer.publish(0, tensors)
    await rollout.pull(0)
    await plane.trainer.restart()
    await plane.trainer.publish(0, stepped(tensors, 1, names=["half"]))
    await plane.trainer.publish(1, tensors)
    await plane.trainer.publish(2, stepped(tensors, 2, share=1.0, names=["small"]))
    pull = await rollout.pull(2)
    assert "half of version 2 does not match its checksum" in pull.stats.faults[0]


async def test_steps_that_lead_elsewhere_are_not_called_the_version(plane):
    rollout, tensors = await plane.join("r0"), weights(0)
    for version in range(2):
        await plane.trainer.publish(version, tensors)
        tensors = stepped(tensors, version)
        await rollout.pull(version)
    await plane.trainer.publish(2, tensors)

    def name_the_delta_to_version_1(answer):
        for step in answer.steps:
            step.policy_version, step.base_version = 1, 0

    plane.trainer.server.spoil_manifest = name_the_delta_to_version_1
    pull = await rollout.pull(2)
    assert pull.stats.faults


# ---- limits ----------------------------------------------------------------------------------------------------------


async def test_a_trainer_that_is_full_is_tried_until_there_is_room():
    async with Plane(max_calls=2) as plane:
        await plane.trainer.publish(0, weights(0))
        watcher = WeightsClient(plane.trainer.address, JOB)
        watches = [watcher.watch(), watcher.watch()]
        for watch in watches:
            await anext(watch)
        rollout = await plane.join("r0")
        pull = rollout.start(0)
        await until(lambda: bool(pull.stats.faults))
        assert "RESOURCE_EXHAUSTED" in pull.stats.faults[0]
        for watch in watches:
            await watch.aclose()
        await watcher.close()
        await rollout.see_through(pull)
