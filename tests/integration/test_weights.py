"""Weights over real gRPC: every version arrives bit for bit or not at all."""

import asyncio

import grpc
import pytest
import torch
from safetensors.torch import load_file

from onbeat.errors import WeightsError
from onbeat.weights.client import WeightsClient
from onbeat.weights.v1 import weights_pb2, weights_pb2_grpc
from services.trainer.weight_server import WeightServer
from services.trainer.weight_store import WeightStore, take_snapshot

MIB = 1 << 20


def weights(seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        "big": torch.randn(3 * MIB // 2 + 5, generator=generator).bfloat16(),  # several chunks, the last one partial
        "small": torch.randn(4, 3, generator=generator),
        "scalar": torch.tensor(float(seed)),
        "empty": torch.zeros(0, 7),
    }


@pytest.fixture
async def served():
    store = WeightStore(num_kept=2)
    server = WeightServer("job", {"config.json": b'{"a": 1}', "tokenizer.json": b"x" * 6 * MIB}, store)
    port = await server.start("127.0.0.1", 0)
    client = WeightsClient(f"127.0.0.1:{port}", "job")
    yield store, server, client
    await client.close()
    await server.stop()


async def test_every_version_arrives_bit_for_bit(served, tmp_path):
    store, _, client = served
    for version in range(3):
        store.add(take_snapshot(version, weights(version).items()))
        stats = await client.pull(version, tmp_path / "weights.safetensors")
        received = load_file(tmp_path / "weights.safetensors")
        assert stats.num_bytes == sum(tensor.nbytes for tensor in weights(version).values())
        assert stats.digest == store.get(version).manifest.digest
        for name, tensor in weights(version).items():
            assert received[name].dtype == tensor.dtype
            assert torch.equal(received[name], tensor)


async def test_a_snapshot_does_not_change_when_training_goes_on(served, tmp_path):
    store, _, client = served
    live = {"w": torch.zeros(10)}
    store.add(take_snapshot(0, live.items()))
    live["w"].add_(1.0)
    await client.pull(0, tmp_path / "w.safetensors")
    assert torch.equal(load_file(tmp_path / "w.safetensors")["w"], torch.zeros(10))


async def test_describe_carries_files_beyond_grpcs_default_limit(served):
    store, _, client = served
    store.add(take_snapshot(7, weights(0).items()))
    description = await client.describe()
    assert description.policy_version == 7
    assert len(description.files["tokenizer.json"]) == 6 * MIB


async def test_a_version_that_is_not_held_is_refused_by_name(served, tmp_path):
    store, _, client = served
    for version in range(3):
        store.add(take_snapshot(version, weights(version).items()))
    with pytest.raises(WeightsError, match=r"NOT_FOUND.*held: \[1, 2\]"):
        await client.pull(0, tmp_path / "w.safetensors")
    assert list(tmp_path.iterdir()) == []


async def test_another_job_is_refused(served):
    store, _, client = served
    store.add(take_snapshot(0, weights(0).items()))
    client.job_id = "other"
    with pytest.raises(WeightsError, match="serves job job, not other"):
        await client.describe()


async def test_watch_sees_the_current_and_each_newer_version(served):
    store, server, client = served
    store.add(take_snapshot(3, weights(3).items()))
    versions = client.watch()
    assert await anext(versions) == 3
    waiting = asyncio.ensure_future(anext(versions))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    store.add(take_snapshot(4, weights(4).items()))
    await server.announce()
    assert await asyncio.wait_for(waiting, 5) == 4


async def test_a_server_that_is_gone_is_an_error_not_a_wait(tmp_path):
    client = WeightsClient("127.0.0.1:1", "job")
    with pytest.raises(WeightsError, match="UNAVAILABLE"):
        await client.pull(0, tmp_path / "w.safetensors")
    with pytest.raises(WeightsError, match="UNAVAILABLE"):
        await anext(client.watch())


class FaultyServer(weights_pb2_grpc.WeightsServiceServicer):
    """Serves a real snapshot, but spoils the stream on its way."""

    def __init__(self, store, spoil):
        self._real = WeightServer("job", {}, store)
        self._spoil = spoil

    async def GetManifest(self, request, context):
        return await self._real.GetManifest(request, context)

    async def Pull(self, request, context):
        messages = [message async for message in self._real.Pull(request, context)]
        for message in self._spoil(messages):
            yield message


def flip_a_bit(messages):
    data = bytearray(messages[1].data)
    data[100] ^= 1
    messages[1].data = bytes(data)
    return messages


def swap_two(messages):
    messages[0], messages[1] = messages[1], messages[0]
    return messages


def unknown_encoding(messages):
    messages[0].encoding = 99
    return messages


SPOILERS = {
    "corrupt byte": (flip_a_bit, "do not match the digest"),
    "short stream": (lambda messages: messages[:-1], "stream ended after"),
    "missing chunk": (lambda messages: messages[1:], "does not fit"),
    "wrong order": (swap_two, "does not fit"),
    "repeated chunk": (lambda messages: [messages[0], *messages], "does not fit"),
    "future encoding": (unknown_encoding, "upgrade this side"),
}


@pytest.mark.parametrize("fault", SPOILERS)
async def test_a_spoiled_stream_leaves_nothing(fault, tmp_path):
    spoil, message = SPOILERS[fault]
    store = WeightStore()
    store.add(take_snapshot(0, weights(0).items()))
    server = grpc.aio.server()
    weights_pb2_grpc.add_WeightsServiceServicer_to_server(FaultyServer(store, spoil), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = WeightsClient(f"127.0.0.1:{port}", "job")
    with pytest.raises(WeightsError, match=message):
        await client.pull(0, tmp_path / "w.safetensors")
    assert list(tmp_path.iterdir()) == []
    await client.close()
    await server.stop(None)


async def test_manifest_that_contradicts_its_digest_is_refused(tmp_path):
    store = WeightStore()
    store.add(take_snapshot(0, weights(0).items()))

    class Liar(FaultyServer):
        async def GetManifest(self, request, context):
            manifest = await self._real.GetManifest(request, context)
            manifest.tensors[0].shape[0] += 1
            return weights_pb2.GetManifestResponse.FromString(manifest.SerializeToString())

    server = grpc.aio.server()
    weights_pb2_grpc.add_WeightsServiceServicer_to_server(Liar(store, lambda messages: messages), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = WeightsClient(f"127.0.0.1:{port}", "job")
    with pytest.raises(WeightsError, match="contradicts its digest"):
        await client.pull(0, tmp_path / "w.safetensors")
    await client.close()
    await server.stop(None)
