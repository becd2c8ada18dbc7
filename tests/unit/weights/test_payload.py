"""The parts of the weights plane by themselves: payloads that grow, the host's copy, messages, snapshots."""

import asyncio
import mmap
import threading
from itertools import pairwise

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load
from xxhash import xxh3_128_digest

from onbeat.contracts.errors import WeightsError
from onbeat.weights import delta
from onbeat.weights.delta import Encoding
from onbeat.weights.host import HostWeights, check_plan, full_plan
from onbeat.weights.server import Payload, PayloadGivenUp
from onbeat.weights.v1 import weights_pb2
from onbeat.weights.wire import (
    MAX_PLAN_BYTES,
    Manifest,
    PayloadKey,
    Plan,
    Tensor,
    data_message,
    plan_message,
    read_message,
    varint,
)
from services.trainer.weights import store
from services.trainer.weights.store import SnapshotWriter, WeightStore, take_snapshot
from tests.weight_plane import bits

SOON_S = 5.0
KEY = PayloadKey(1)


def entry(name, *shape, dtype="BF16", fill=b"\0"):
    content = fill * int(np.prod(shape)) * {"BF16": 2, "F32": 4}[dtype]
    checks = {"digest": blake3(content).digest(), "checksum": xxh3_128_digest(content)}
    return Tensor(name=name, dtype=dtype, shape=shape, size_bytes=len(content), **checks)


LAYOUT = Manifest(1, (entry("a", 3), entry("b", 0), entry("c", 2, 2, dtype="F32"), entry("d", 1)), shard_starts=(2,))


# ---- a payload that grows --------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=9), max_size=8), st.data())
def test_slices_are_the_bytes_wherever_the_segments_are_cut(parts, data):
    whole = b"".join(parts)
    payload = Payload(KEY, Plan.of([(0, Encoding.RAW, len(whole))]), [memoryview(part) for part in parts])
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, len(whole)))
    assert b"".join(payload.slices(start, end)) == whole[start:end]


def growing():
    return Payload(KEY, Plan.of([(0, Encoding.RAW, 10)]), [memoryview(bytearray(10))], available=0)


async def test_readers_wait_for_exactly_the_bytes_that_they_want():
    payload = growing()
    waiting = {size: asyncio.ensure_future(payload.wait_for(size, SOON_S)) for size in (1, 4, 10)}
    for available in (3, 4, 10):
        assert not await payload.wait_for(available, 0.01)
        payload.advance(available)
        await asyncio.sleep(0.01)
        assert {size for size, reader in waiting.items() if reader.done()} == {s for s in waiting if s <= available}
    assert payload.is_complete


async def test_readers_of_an_abandoned_payload_learn_it_now_and_later():
    payload = growing()
    waiting = asyncio.ensure_future(payload.wait_for(1, SOON_S))
    await asyncio.sleep(0)
    payload.give_up("it moves on")
    with pytest.raises(PayloadGivenUp, match="version 1 in full is given up: it moves on"):
        await asyncio.wait_for(waiting, SOON_S)
    payload.advance(10)
    with pytest.raises(PayloadGivenUp):
        await payload.wait_for(1, SOON_S)


def test_a_plans_digest_is_of_its_payload_alone():
    first, second = (0, Encoding.RAW, 6), (2, Encoding.SPARSE, 5)
    plan = Plan.of([first, second])
    keys = [PayloadKey(1), PayloadKey(2), PayloadKey(1, 0), PayloadKey(1, None, 1)]
    others = [
        Plan.of([first]),
        Plan.of([second, first]),
        Plan.of([(0, Encoding.RAW, 65), second]),
        Plan.of([(0, Encoding.XOR_ZSTD, 6), second]),
    ]
    digests = [plan.digest(key) for key in keys] + [other.digest(KEY) for other in others]
    assert len(set(digests)) == len(keys) + len(others)


# ---- messages --------------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=300), max_size=5))
def test_data_is_framed_as_protobuf_would(parts):
    message = data_message([memoryview(part) for part in parts])
    content = b"".join(parts)
    assert message == weights_pb2.PullResponse(data=content).SerializeToString()
    assert bytes(read_message(KEY, message)) == content


def test_data_is_read_without_a_copy():
    message = data_message([memoryview(b"x" * 1000)])
    assert read_message(KEY, message).obj is message


@given(st.lists(st.tuples(st.integers(0, 2**31), st.sampled_from(Encoding), st.integers(0, 2**60)), max_size=5))
def test_a_plan_survives_its_message_and_is_of_its_key_only(entries):
    plan = Plan.of(entries)
    message = plan_message(KEY, plan)
    assert read_message(KEY, message) == plan
    with pytest.raises(WeightsError, match="contradicts its digest"):
        read_message(PayloadKey(2), message)


@given(st.binary(max_size=40))
def test_noise_is_refused_or_is_data_and_nothing_else_happens(noise):
    try:
        message = read_message(KEY, noise)
    except WeightsError:
        return
    assert weights_pb2.PullResponse.FromString(noise).data == bytes(message)


def test_a_plan_that_is_too_large_is_refused_before_it_is_parsed():
    """Two bytes of an empty entry become hundreds in memory, on the event loop. What follows the tag here is noise."""
    entries = b"\x0a\x00" * (MAX_PLAN_BYTES // 2 + 1)
    for message in (b"\x0a" + varint(len(entries)) + entries, b"\x0a" + b"\xff" * MAX_PLAN_BYTES):
        with pytest.raises(WeightsError, match=f"a plan of {len(message)} bytes came, at most {MAX_PLAN_BYTES}"):
            read_message(KEY, message)


# ---- the host's copy -------------------------------------------------------------------------------------------------


@pytest.fixture
async def host():
    host = HostWeights(LAYOUT)
    yield host
    host.close()


async def test_version_is_held_and_can_be_pulled_from_settle_to_begin(host):
    assert (host.version, host.versions()) == (None, [])
    assert await host.payload(KEY) is None
    host.settle(LAYOUT)
    assert (host.version, host.versions()) == (1, [1])
    payloads = [await host.payload(PayloadKey(1, None, shard)) for shard in range(2)]
    assert [payload.is_complete for payload in payloads] == [True, True]
    assert [payload.plan.size_bytes for payload in payloads] == [6, 18]
    host.begin("it moves")
    assert (host.version, host.versions()) == (None, [])
    assert await host.payload(KEY) is None
    for payload in payloads:
        with pytest.raises(PayloadGivenUp, match="it moves"):
            payload.check()


async def test_reader_of_an_expected_payload_waits_for_open_or_drop(host):
    opened, dropped, moved = PayloadKey(2), PayloadKey(2, 1), PayloadKey(2, None, 1)
    for key in (opened, dropped, moved):
        host.expect(key)
    waiting = [asyncio.ensure_future(host.payload(key)) for key in (opened, dropped, moved)]
    await asyncio.sleep(0.01)
    assert not any(reader.done() for reader in waiting)
    payload = host.open(opened, full_plan(LAYOUT, 0))
    assert await asyncio.wait_for(waiting[0], SOON_S) is payload
    host.drop(dropped, "no source has it")
    assert await asyncio.wait_for(waiting[1], SOON_S) is None
    host.begin("it moves")
    assert await asyncio.wait_for(waiting[2], SOON_S) is None
    with pytest.raises(PayloadGivenUp):
        payload.check()


async def test_leaving_reader_does_not_take_the_payload_from_others(host):
    host.expect(KEY)
    readers = [asyncio.ensure_future(host.payload(KEY)) for _ in range(2)]
    await asyncio.sleep(0.01)
    readers[0].cancel()
    await asyncio.sleep(0.01)
    payload = host.open(KEY, full_plan(LAYOUT, 0))
    assert await asyncio.wait_for(readers[1], SOON_S) is payload


async def test_a_reader_of_the_copy_does_not_keep_it_from_being_closed():
    host = HostWeights(LAYOUT)
    host.settle(LAYOUT)
    payload = await host.payload(KEY)
    piece = payload.slices(0, 6)
    host.close()
    assert not host.path.exists()
    assert bytes(piece[0]) == bytes(6)


async def test_released_copy_gives_its_memory_back_and_is_usable():
    wide = Manifest(1, (entry("w", 1 << 20, dtype="F32", fill=b"\1"),))
    host = HostWeights(wide)

    def resident_bytes() -> int:
        return host.path.stat().st_blocks * 512

    host.tensor(0)[:] = b"\1" * (4 << 20)
    host.settle(wide)
    assert resident_bytes() >= 4 << 20
    host.release()
    assert resident_bytes() <= mmap.PAGESIZE  # the header's page
    assert (host.versions(), await host.payload(KEY)) == ([], None)
    host.tensor(0)[:] = b"\2" * (4 << 20)
    host.settle(wide)
    assert load(host.path.read_bytes())["w"].view(torch.uint8).unique().tolist() == [2]
    host.close()


RAW = Encoding.RAW


@pytest.mark.parametrize(
    ("key", "entries"),
    [
        (PayloadKey(1), [(0, RAW, 6)]),  # an empty tensor is named as well
        (PayloadKey(1), [(1, RAW, 0), (0, RAW, 6)]),
        (PayloadKey(1), [(0, RAW, 6), (1, RAW, 0), (2, RAW, 16)]),
        (PayloadKey(1), [(0, RAW, 7), (1, RAW, 0)]),
        (PayloadKey(1), [(0, Encoding.SPARSE, 6), (1, RAW, 0)]),
        (PayloadKey(1, 0), [(1, RAW, 0), (0, RAW, 6)]),
        (PayloadKey(1, 0), [(0, RAW, 6), (0, RAW, 6)]),
        (PayloadKey(1, 0), [(2, RAW, 6)]),
        (PayloadKey(1, 0, 1), [(0, RAW, 6)]),
        (PayloadKey(1, 0, 1), [(4, RAW, 1)]),
        (PayloadKey(1, 0), [(0, Encoding.SPARSE, 7)]),
    ],
)
def test_an_impossible_plan_is_refused(key, entries):
    with pytest.raises(WeightsError, match=str(key)):
        check_plan(key, Plan.of(entries), LAYOUT)
    for possible in ([], [(2, Encoding.SPARSE, 16)], [(2, RAW, 16), (3, Encoding.XOR_ZSTD, 1)]):
        check_plan(PayloadKey(1, 0, 1), Plan.of(possible), LAYOUT)


# ---- snapshots -------------------------------------------------------------------------------------------------------


def weights(seed=0, num_items=4000):
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(num_items, generator=generator).bfloat16(),
        "v": torch.randn(10, 3, generator=generator),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(1.5, dtype=torch.float16),
    }


def test_memory_of_a_version_that_is_not_the_base_is_used():
    older = take_snapshot(1, weights().items())
    writer = SnapshotWriter(2, memory=older.memory)  # a rank that has published nothing
    for name, tensor in weights().items():
        writer.put(name, tensor)
    newer = writer.finish()
    assert newer.memory is older.memory
    assert newer.delta is None


def test_a_snapshot_does_not_change_when_training_goes_on(monkeypatch):
    monkeypatch.setattr(store, "CORES_PER_ENCODER", 10_000)  # one thread
    live = weights()
    live["transposed"] = live["v"].clone().T
    before = {name: bits(tensor) for name, tensor in live.items()}
    may_encode, writer = threading.Event(), SnapshotWriter(1)
    writer._threads.submit(may_encode.wait)  # the encoder comes late
    for name, tensor in live.items():
        writer.put(name, tensor)
        tensor.fill_(7)
    may_encode.set()
    snapshot = writer.finish()
    for entry, buffer in zip(snapshot.manifest.tensors, snapshot.buffers, strict=True):
        assert bytes(buffer) == before[entry.name]
        assert entry.digest == blake3(before[entry.name]).digest()
        assert entry.checksum == xxh3_128_digest(before[entry.name])


@pytest.mark.parametrize("num_cores", [2, 16])
def test_snapshots_are_the_same_with_any_number_of_threads(num_cores, monkeypatch):
    monkeypatch.setattr(store, "available_cores", lambda: list(range(num_cores)))
    live = {f"{name}{layer}": tensor for layer in range(20) for name, tensor in weights(layer).items()}
    base = take_snapshot(0, live.items())
    for tensor in live.values():
        tensor.view(-1)[:1] += 1
    snapshot = take_snapshot(1, live.items(), base=base)
    assert snapshot.encode_s > 0
    monkeypatch.setattr(store, "CORES_PER_ENCODER", 10_000)  # one thread
    alone = take_snapshot(1, live.items(), base=base)
    assert snapshot.manifest == alone.manifest
    assert snapshot.delta.plan == alone.delta.plan
    assert snapshot.delta.slices(0, alone.delta.plan.size_bytes) == alone.delta.slices(0, alone.delta.plan.size_bytes)


def test_thread_that_finishes_encodes_what_others_have_not_begun(monkeypatch):
    encoded_here, encode = threading.Event(), SnapshotWriter._encode

    def encode_late(writer, *args):
        if threading.current_thread() is threading.main_thread():
            encoded_here.set()
        else:
            assert encoded_here.wait(5)
        return encode(writer, *args)

    monkeypatch.setattr(store, "available_cores", lambda: [0])
    live = {f"{name}{layer}": tensor for layer in range(3) for name, tensor in weights(layer).items()}
    alone = take_snapshot(1, live.items())
    monkeypatch.setattr(SnapshotWriter, "_encode", encode_late)
    assert take_snapshot(1, live.items()).manifest == alone.manifest


def test_versions_from_a_device_use_the_memory_of_older_ones():
    class OnDevice(torch.Tensor):
        """A tensor that says that it is on a GPU."""

        device = torch.device("cuda")

    live = {"w": weights()["w"].as_subclass(OnDevice)}
    snapshots = [take_snapshot(0, live.items())]
    snapshots.append(take_snapshot(1, live.items(), base=snapshots[0]))
    addresses = [np.frombuffer(snapshot.buffers[0], np.uint8).ctypes.data for snapshot in snapshots]
    assert len(set(addresses)) == 2, "both are served"
    del snapshots[0]
    others = [torch.empty_like(weights()["w"]) for _ in range(100)]  # they would get memory that is given back
    live["w"].fill_(7)
    snapshots.append(take_snapshot(2, live.items(), base=snapshots[-1]))
    assert np.frombuffer(snapshots[-1].buffers[0], np.uint8).ctypes.data == addresses[0]
    assert addresses[0] not in {other.data_ptr() for other in others}
    assert bytes(snapshots[-1].buffers[0]) == bits(live["w"])


def test_a_snapshot_in_place_has_the_digests_and_delta_of_a_copy():
    live = weights()
    copied, shared = (SnapshotWriter(1, is_in_place=is_in_place) for is_in_place in (False, True))
    for writer in (copied, shared):
        for name, tensor in live.items():
            writer.put(name, tensor)
    bases = copied.finish(), shared.finish()
    copied, shared = SnapshotWriter(2, bases[0]), SnapshotWriter(2, bases[1], is_in_place=True)
    for name, tensor in live.items():
        shared.keep(name, tensor)
        tensor.view(-1)[:1] += 1  # one item in 4000 of the largest tensor
        copied.put(name, tensor)
        shared.put(name, tensor)
    copy, view = copied.finish(), shared.finish()
    assert view.manifest == copy.manifest
    assert view.delta.plan == copy.delta.plan
    assert view.delta.slices(0, view.delta.plan.size_bytes) == copy.delta.slices(0, copy.delta.plan.size_bytes)
    for name, tensor in view.tensors():
        assert tensor.data_ptr() == live[name].data_ptr() or tensor.numel() == 0


def test_manifest_has_the_requested_order_and_so_has_the_delta():
    base = take_snapshot(1, weights().items(), order=["v", "w", "empty", "scalar"])
    live = {name: tensor + 1 for name, tensor in reversed(weights().items())}
    snapshot = take_snapshot(2, live.items(), order=["v", "w", "empty", "scalar"], base=base)
    assert [entry.name for entry in snapshot.manifest.tensors] == ["v", "w", "empty", "scalar"]
    assert [entry.tensor_index for entry in snapshot.delta.plan.entries] == [0, 1, 3]


@given(st.sets(st.sampled_from(["w", "v", "scalar"])), st.sampled_from([0.001, 0.1, 1.0]), st.integers(0, 9))
def test_base_plus_delta_is_the_version_and_omits_unchanged_ones(names, share, seed):
    def applied(base, snapshot):
        """Return the result of a puller that holds `base` and applies the delta."""
        decoded, change = {}, snapshot.delta
        check_plan(change.key, change.plan, snapshot.manifest)
        for entry, buffer in zip(base.manifest.tensors, base.buffers, strict=True):
            decoded[entry.name] = bytearray(buffer)
        for entry, (start, end) in zip(change.plan.entries, pairwise(change.plan.starts), strict=True):
            tensor = snapshot.manifest.tensors[entry.tensor_index]
            item_bytes = {"BF16": 2, "F16": 2, "F32": 4}[tensor.dtype]
            delta.apply(entry.encoding, b"".join(change.slices(start, end)), decoded[tensor.name], item_bytes)
        return {name: bytes(content) for name, content in decoded.items()}

    before = weights()
    base = take_snapshot(1, before.items())
    after = {name: tensor.clone() for name, tensor in before.items()}
    generator = torch.Generator().manual_seed(seed)
    for name in names:
        is_moved = torch.rand(after[name].shape, generator=generator) < share
        after[name][is_moved] *= 1.5
    snapshot = take_snapshot(4, after.items(), base=base)
    assert snapshot.delta.key == PayloadKey(4, 1)
    assert applied(base, snapshot) == {name: bits(tensor) for name, tensor in after.items()}
    changed = {name for name in before if bits(before[name]) != bits(after[name])}
    planned = {snapshot.manifest.tensors[entry.tensor_index].name for entry in snapshot.delta.plan.entries}
    assert planned == changed


def test_there_is_no_delta_without_a_base_or_from_another_model():
    base = take_snapshot(1, weights().items())
    assert base.delta is None
    assert take_snapshot(2, weights(num_items=4001).items(), base=base).delta is None
    renamed = {name.upper(): tensor for name, tensor in weights().items()}
    assert take_snapshot(2, renamed.items(), base=base).delta is None
    cast = weights() | {"w": weights()["w"].half()}
    assert take_snapshot(2, cast.items(), base=base).delta is None


def published(store, num_versions, share):
    tensors, base = weights(), None
    for version in range(num_versions):
        base = take_snapshot(version, tensors.items(), base=base)
        store.add(base)
        generator = torch.Generator().manual_seed(version)
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        is_moved = torch.rand(len(tensors["w"]), generator=generator) < share
        tensors["w"][is_moved] = tensors["w"][is_moved] * 1.01 + 0.01
    return base


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
async def test_older_deltas_are_kept_up_to_half_of_a_full_copy(share):
    store = WeightStore(num_kept=2)
    newest = published(store, 40, share)
    assert store.versions() == [38, 39]
    keys = [PayloadKey(version, version - 1) for version in range(1, 40)]
    kept = [payload for key in keys if (payload := await store.payload(key)) is not None]
    sizes = [payload.plan.size_bytes for payload in kept]
    assert sizes[-1] < newest.manifest.size_bytes
    assert len(sizes) == 1 or sum(sizes) < newest.manifest.size_bytes / 2
    assert [payload.key for payload in kept] == keys[40 - 1 - len(kept) :]
    assert len(kept) >= 1


def test_steps_lead_from_the_base_to_the_version_or_are_absent():
    store = WeightStore(num_kept=3)
    published(store, 6, 0.01)
    steps = store.steps(2, 5)
    assert [(step.base_version, step.policy_version) for step in steps] == [(2, 3), (3, 4), (4, 5)]
    assert all(step.size_bytes > 0 for step in steps)
    assert store.steps(5, 5) == store.steps(5, 3) == store.steps(9, 5) == store.steps(-1, 5) == store.steps(2, 99) == ()
    first = take_snapshot(13, weights(0).items())  # `bounded` jobs publish only what has moved enough
    for snapshot in (first, take_snapshot(17, weights(1).items(), base=first)):
        store.add(snapshot)
    assert [(step.base_version, step.policy_version) for step in store.steps(13, 17)] == [(13, 17)]
    assert store.steps(15, 17) == ()


def test_steps_that_would_carry_more_than_the_whole_are_none():
    store = WeightStore(num_kept=3)
    newest = published(store, 6, 1.0)
    oldest = min(base for base in range(5) if store.steps(base, 5))
    assert oldest > 0
    assert sum(step.size_bytes for step in store.steps(oldest, 5)) < newest.manifest.size_bytes


async def test_changes_of_other_shards_count_if_this_is_unchanged():
    store, newest = WeightStore(num_kept=5), None
    for version in range(5):
        newest = take_snapshot(version, weights().items(), base=newest)
        delta_bytes = newest.manifest.size_bytes // 5
        store.add(newest, delta_bytes if version else None)
    assert [step.size_bytes for step in store.steps(2, 4)] == [delta_bytes] * 2
    assert store.steps(1, 4) == ()
    is_kept = [await store.payload(PayloadKey(version, version - 1)) is not None for version in range(1, 5)]
    assert is_kept == [False, False, True, True]


async def test_what_is_withdrawn_ends_its_streams_and_keeps_own_bytes():
    """A delta of changed items alone has bytes of its own; that of a tensor without a base is a view of the version."""
    store = WeightStore(num_kept=1)
    second = published(store, 3, 0.01)
    whole, rank_payload = await store.payload(PayloadKey(2)), await store.payload(PayloadKey(2, 1))
    third = take_snapshot(3, [(name, tensor + 1) for name, tensor in weights(num_items=4000).items()], base=second)
    assert {entry.encoding for entry in third.delta.plan.entries} >= {delta.Encoding.RAW}
    store.add(third, delta_bytes=1)
    raw = await store.payload(PayloadKey(3, 2))
    newest = await store.payload(PayloadKey(3))
    await store.withdraw()
    assert (store.versions(), store.newest(), store.steps(1, 3)) == ([], None, ())
    for payload in (raw, newest):
        with pytest.raises(PayloadGivenUp, match="the next version is made in its place"):
            payload.check()
    assert await store.payload(PayloadKey(3)) is None
    assert await store.payload(PayloadKey(3, 2)) is None
    assert await store.payload(PayloadKey(2, 1)) is rank_payload
    for payload in (whole, rank_payload):
        payload.check()


async def test_a_delta_is_only_found_under_its_own_base():
    store = WeightStore()
    published(store, 3, 0.01)
    assert await store.payload(PayloadKey(2, 1)) is not None
    assert await store.payload(PayloadKey(2, 0)) is None
    assert await store.payload(PayloadKey(2, 1, 1)) is None
    assert await store.payload(PayloadKey(2, None, 1)) is None
    assert await store.payload(PayloadKey(0)) is None
