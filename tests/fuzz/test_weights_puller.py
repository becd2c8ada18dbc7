"""A trainer that lies: the puller takes nothing from it, says who it was, and gets its weights from the next one."""

import asyncio
import contextlib
import itertools
import math
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.contracts.errors import WeightsError
from onbeat.weights import client as client_module
from onbeat.weights.security import CHANNEL_OPTIONS
from onbeat.weights.v1 import weights_pb2
from onbeat.weights.wire import DTYPE_BYTES, SERVICE, Manifest, data_message
from tests.fuzz import fuzzed
from tests.weight_plane import JOB, MIB, Plane, Rollout, hosts_apart, stepped, weights

pytestmark = pytest.mark.slow

DEADLINE_S = 30.0
Answers = dict[str, Iterable[bytes]]  # answers by method


@dataclass
class Liar(grpc.GenericRpcHandler):
    """A weights service that answers with whatever bytes it is given."""

    address: str = ""
    answers: Answers = field(default_factory=dict)
    num_sent_bytes: int = 0

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        async def answer(_: bytes, __: Any) -> AsyncIterator[bytes]:
            for message in self.answers.get(details.method.rpartition("/")[2], ()):
                self.num_sent_bytes += len(message)
                yield message

        return grpc.unary_stream_rpc_method_handler(answer)


@contextlib.asynccontextmanager
async def lied_to(way: str) -> AsyncIterator[tuple[Rollout, Liar]]:
    """Run a rollout that knows the liar only, while the liar knows all that the trainer would send.

    It has no version yet if `way` is "in full", and version 0 if it is "delta". At the end it finds the trainer, and
    gets both versions.
    """
    with hosts_apart():
        async with Plane() as plane:
            tensors = weights(0, 2000)
            await plane.trainer.publish(0, tensors)
            rollout = await plane.join("r0")
            base = None
            if way == "delta":
                await rollout.pull(0, DEADLINE_S)
                base = 0
            await plane.trainer.publish(1, stepped(tensors, 1, share=0.3))
            liar, server = Liar(), grpc.aio.server(options=list(CHANNEL_OPTIONS.items()))
            server.add_generic_rpc_handlers((liar,))
            liar.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            await server.start()
            liar.answers = await true_answers(plane.trainer.address, base)
            liar.answers["Locate"] = [weights_pb2.LocateResponse(address=liar.address).SerializeToString()]
            honest, plane.trainer.address = plane.trainer.address, liar.address
            with pytest.MonkeyPatch.context() as patch:  # two answers to one question are waited for
                patch.setattr(client_module, "CALL_DEADLINE_S", 1.0)
                patch.setattr(client_module, "MESSAGE_DEADLINE_S", 1.0)
                yield rollout, liar
            plane.trainer.address = honest
            await server.stop(None)
            for version in (1, 0):
                await rollout.pull(version, DEADLINE_S)


async def true_answers(address: str, base: int | None) -> Answers:
    key = weights_pb2.PayloadKey(policy_version=1, base_version=base)
    requests = {
        "Describe": weights_pb2.DescribeRequest(job_id=JOB),
        "GetManifest": weights_pb2.GetManifestRequest(job_id=JOB, policy_version=1, base_version=base),
        "Pull": weights_pb2.PullRequest(job_id=JOB, key=key),
    }
    answers: Answers = {"Finish": [b""]}
    async with grpc.aio.insecure_channel(address) as channel:
        for method, request in requests.items():
            call = channel.unary_stream(f"/{SERVICE}/{method}")(request.SerializeToString())
            answers[method] = [message async for message in call]
    return answers


async def assert_refused(rollout: Rollout, liar: Liar) -> str:
    """Why. `Rollout.pull` sees to it that nothing wrong was called final, and that no version is held."""
    with pytest.raises(WeightsError) as refusal:
        await asyncio.wait_for(rollout.pull(1, deadline_s=0), DEADLINE_S)
    assert liar.address in str(refusal.value), refusal.value
    return str(refusal.value)


# ---- bytes -------------------------------------------------------------------------------------------------------


STEPS = st.tuples(
    st.sampled_from(["lose", "double", "swap", "glue", "splice"]),
    st.floats(0, 0.999),  # the message
    st.floats(0, 0.999),  # a place in it, at which
    st.sampled_from([0, 1, 7, 1 << 30]),  # so many bytes become
    st.binary(max_size=30),  # these
)


def spoiled(messages: list[bytes], steps: list[tuple[str, float, float, int, bytes]]) -> list[bytes]:
    """Make other messages of an answer: lost, doubled, swapped, glued, or with bytes cut, changed or inserted."""
    changed = list(messages)
    for how, where, inside, num_lost, noise in steps:
        if not changed:
            break
        index = int(where * len(changed))
        message = changed[index]
        position = int(inside * len(message))
        match how:
            case "lose":
                del changed[index]
            case "double":
                changed.insert(index, message)
            case "swap":
                changed[index], changed[-1] = changed[-1], changed[index]
            case "glue":
                changed[index : index + 2] = [b"".join(changed[index : index + 2])]
            case "splice":
                changed[index] = message[:position] + noise + message[position + num_lost :]
    return changed


@pytest.mark.parametrize("way", ["in full", "delta"])
@pytest.mark.parametrize("method", ["GetManifest", "Locate", "Pull"])
def test_spoiled_answers_give_the_true_weights_or_an_error(way: str, method: str) -> None:
    @fuzzed(40)
    @given(st.lists(STEPS, min_size=1, max_size=3))
    def test(steps: list[tuple[str, float, float, int, bytes]]) -> None:
        async def attack() -> None:
            async with lied_to(way) as (rollout, liar):
                answer = spoiled(list(liar.answers[method]), steps)
                liar.answers[method] = answer if method == "Pull" else answer[:1]
                with contextlib.suppress(WeightsError):
                    await asyncio.wait_for(rollout.pull(1, deadline_s=0), DEADLINE_S)

        asyncio.run(attack())

    test()


# ---- answers that are well-formed, and lies ----------------------------------------------------------------------

NUMBERS = st.sampled_from([0, 1, 2, 7, 2**20, 2**31, 2**40, 2**62, 2**63, 2**64 - 1])
NAMES = st.sampled_from(["big", "", "__metadata__", "../../etc/passwd", "\0", "x" * 10_000, "{}", "\u202e"])
TENSORS = st.builds(
    lambda name, dtype, shape, size: weights_pb2.Tensor(
        name=name, dtype=dtype, shape=shape, size_bytes=size_of(dtype, shape) if size is None else size
    ),
    NAMES,
    st.sampled_from([*DTYPE_BYTES, "EVIL", ""]),
    st.lists(NUMBERS, max_size=4),
    st.none() | NUMBERS,
)


def size_of(dtype: str, shape: list[int]) -> int:
    return min(2**64 - 1, math.prod(shape) * DTYPE_BYTES.get(dtype, 0))


@pytest.mark.parametrize("way", ["in full", "delta"])
def test_consistent_but_unreasonable_manifest_is_refused(way: str) -> None:
    """The manifest's digest is right, but its sizes, names, dtypes and shards are arbitrary."""

    @fuzzed(50)
    @given(
        st.lists(TENSORS, min_size=1, max_size=3),
        st.booleans(),
        st.lists(NUMBERS.filter(lambda n: n < 2**32), max_size=3),
    )
    def test(tensors: list[weights_pb2.Tensor], has_true_ones: bool, shard_starts: list[int]) -> None:
        async def attack() -> None:
            async with lied_to(way) as (rollout, liar):
                answer = weights_pb2.GetManifestResponse.FromString(*liar.answers["GetManifest"])
                if not has_true_ones:
                    del answer.tensors[:]
                answer.tensors.extend(tensors)
                answer.shard_starts.extend(shard_starts)
                answer.digest = Manifest(1, tuple(answer.tensors)).digest
                liar.answers["GetManifest"] = [answer.SerializeToString()]
                await assert_refused(rollout, liar)

        asyncio.run(attack())

    test()


@pytest.mark.parametrize(
    "address", ["", "nowhere", "127.0.0.1:1", "unix:/dev/null", "dns:///\0", "x" * 70_000, "[::1]:-1"]
)
async def test_a_source_that_is_none_is_refused(address: str) -> None:
    async with lied_to("in full") as (rollout, liar):
        answer = weights_pb2.LocateResponse(address=address)
        liar.answers["Locate"] = [answer.SerializeToString()]
        with pytest.raises(WeightsError):
            await asyncio.wait_for(rollout.pull(1, deadline_s=0), DEADLINE_S)


@pytest.mark.parametrize("endless", ["plans", "data", "manifests", "versions"])
async def test_an_endless_answer_ends_soon_and_is_not_kept(endless: str) -> None:
    async with lied_to("delta") as (rollout, liar):
        plan, *_ = liar.answers["Pull"]
        match endless:
            case "plans":
                liar.answers["Pull"] = itertools.repeat(plan)
            case "data":
                liar.answers["Pull"] = itertools.chain([plan], itertools.repeat(data_message([memoryview(bytes(MIB))])))
            case "manifests":
                liar.answers["GetManifest"] = itertools.repeat(*liar.answers["GetManifest"])
            case "versions":
                answer = weights_pb2.GetManifestResponse.FromString(*liar.answers["GetManifest"])
                answer.shard_starts.extend([1] * 1_000_000)
                liar.answers["GetManifest"] = [answer.SerializeToString()]
        await assert_refused(rollout, liar)
        assert liar.num_sent_bytes < 64 * MIB


@pytest.mark.parametrize("name", ["../config.json", "/etc/passwd", "a/b.json", "a\0.json", "", "..", "x" * 300])
async def test_a_model_file_whose_name_is_no_plain_one_is_refused(name: str) -> None:
    async with lied_to("in full") as (rollout, liar):
        answer = weights_pb2.DescribeResponse(files=[weights_pb2.File(name=name, content=b"{}")])
        liar.answers["Describe"] = [answer.SerializeToString()]
        with pytest.raises(WeightsError, match=f"{liar.address}.*model file"):
            await rollout.puller.describe()


@pytest.mark.parametrize("age_s", [math.nan, math.inf, -1.0])
async def test_an_age_that_is_none_is_refused(age_s: float) -> None:
    async with lied_to("in full") as (rollout, liar):
        answer = weights_pb2.GetManifestResponse.FromString(*liar.answers["GetManifest"])
        answer.age_s = age_s
        liar.answers["GetManifest"] = [answer.SerializeToString()]
        assert "s old" in await assert_refused(rollout, liar)
