"""Strangers at the trainer's weights service: whatever they call, others get their weights, bit for bit."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from onbeat.weights.v1 import weights_pb2
from onbeat.weights.wire import SERVICE
from tests.fuzz import fuzzed
from tests.weight_plane import JOB, MIB, Plane, stepped, weights

pytestmark = pytest.mark.slow

DEADLINE_S = 30.0
REFUSED = {  # statuses of handlers for faults that they expect
    grpc.StatusCode.NOT_FOUND,  # a version
    grpc.StatusCode.FAILED_PRECONDITION,  # a job
    grpc.StatusCode.INVALID_ARGUMENT,  # bytes that are no message, a shard, a worker
    grpc.StatusCode.OUT_OF_RANGE,  # an offset
}
METHODS = [method.name for method in weights_pb2.DESCRIPTOR.services_by_name["WeightsService"].methods]


@contextlib.asynccontextmanager
async def serving(num_items: int = 1000) -> AsyncIterator[tuple[Plane, grpc.aio.Channel]]:
    """Run a trainer with versions 0 and 1, and a stranger's channel to it. At the end others still get both."""
    async with Plane() as plane:
        tensors = weights(0, num_items)
        await plane.trainer.publish(0, tensors)
        rollout = await plane.join("r0")
        await rollout.pull(0, DEADLINE_S)
        await plane.trainer.publish(1, stepped(tensors, 1))
        async with grpc.aio.insecure_channel(plane.trainer.address) as channel:
            yield plane, channel
        pull = await rollout.pull(1, DEADLINE_S)
        assert pull.stats.faults == []
        await (await plane.join("late")).pull(1, DEADLINE_S)


async def call(channel: grpc.aio.Channel, method: str, request: bytes) -> grpc.StatusCode:
    """Call the server and return the status; OK for a stream that does not end."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            messages = channel.unary_stream(f"/{SERVICE}/{method}")(request)
            await anext(aiter(messages), None)
            messages.cancel()
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@fuzzed(40)
@given(st.lists(st.tuples(st.sampled_from([*METHODS, "Steal", ""]), st.binary(max_size=200)), max_size=30))
def test_bytes_that_are_no_request_are_refused(calls):
    async def attack() -> None:
        async with serving() as (_, channel):
            for method, request in calls:
                code = await call(channel, method, request)
                assert code in (REFUSED if method in METHODS else {grpc.StatusCode.UNIMPLEMENTED})

    asyncio.run(attack())


NUMBERS = st.sampled_from([0, 1, 2, 99, 2**31, 2**32 - 1])
LARGE = NUMBERS | st.sampled_from([2**63, 2**64 - 1])
TEXTS = st.sampled_from(["", "r0", "late", "\0", "../../etc", "x" * 10_000, "127.0.0.1:1", "/dev/zero"])
KEYS = st.builds(
    lambda version, base, shard: weights_pb2.PayloadKey(policy_version=version, base_version=base, shard=shard),
    LARGE,
    st.none() | LARGE,
    NUMBERS,
)
PEERS = st.builds(weights_pb2.Peer, worker_id=TEXTS, address=TEXTS, host_id=TEXTS, zone=TEXTS)
JOBS = st.sampled_from([JOB, JOB, JOB, "", "other", "\0"])
REQUESTS = st.one_of(
    st.builds(weights_pb2.DescribeRequest, job_id=JOBS),
    st.builds(weights_pb2.GetManifestRequest, job_id=JOBS, policy_version=LARGE, base_version=st.none() | LARGE),
    st.builds(
        weights_pb2.LocateRequest,
        job_id=JOBS,
        key=st.none() | KEYS,
        puller=st.none() | PEERS,
        failed_addresses=st.lists(TEXTS, max_size=50),
    ),
    st.builds(weights_pb2.PullRequest, job_id=JOBS, key=st.none() | KEYS, offset_bytes=LARGE),
    st.builds(weights_pb2.FinishRequest, job_id=JOBS, key=KEYS, worker_id=TEXTS, is_complete=st.booleans()),
    st.builds(weights_pb2.WatchRequest, job_id=JOBS),
)
# A detail that quotes this in full is too long for gRPC, which then answers in its own words.
LONG = "x" * 10_000


@fuzzed(60)
@given(st.lists(REQUESTS, max_size=40))
@example([weights_pb2.LocateRequest(job_id=JOB, key={"shard": 9}, puller={"worker_id": LONG})])
@example([weights_pb2.DescribeRequest(job_id=LONG)])
def test_senseless_requests_are_answered_or_refused_by_name(requests):
    """No handler meets what it has not thought of, and nobody is sent to a worker that does not exist for good."""

    async def attack() -> None:
        async with serving() as (_, channel):
            for request in requests:
                method = type(request).DESCRIPTOR.name.removesuffix("Request")
                code = await call(channel, method, request.SerializeToString())
                assert code in REFUSED or code is grpc.StatusCode.OK, request

    asyncio.run(attack())


def pull_request(offset_bytes: int = 0) -> bytes:
    key = weights_pb2.PayloadKey(policy_version=1)
    return weights_pb2.PullRequest(job_id=JOB, key=key, offset_bytes=offset_bytes).SerializeToString()


async def test_streams_that_are_cut_in_the_middle_leave_nothing_behind():
    async with serving(2 * MIB) as (_, channel):
        await call(channel, "Pull", pull_request())
        before = len(asyncio.all_tasks())
        for number in range(60):
            stream = channel.unary_stream(f"/{SERVICE}/Pull")(pull_request(number))
            for _ in range(number % 4):
                await stream.read()
            stream.cancel()
        async with asyncio.timeout(DEADLINE_S):
            while len(asyncio.all_tasks()) > before:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("num_readers", [1, 8])
async def test_reader_that_stops_reading_gets_only_what_buffers_hold(num_readers):
    """The trainer then holds a message of at most 1 MiB for each, and the others get their weights as before."""
    # A client with gRPC's default settings grows its own buffer up to the whole payload. These readers' stays small,
    # so what was sent is what the server holds.
    small_buffer = [("grpc.http2.bdp_probe", 0)]
    async with (
        serving(16 * MIB) as (plane, _),
        grpc.aio.insecure_channel(plane.trainer.address, options=small_buffer) as slow_channel,
    ):
        server = plane.trainer.server
        sent_before = server.num_bytes_sent
        readers = [slow_channel.unary_stream(f"/{SERVICE}/Pull")(pull_request()) for _ in range(num_readers)]
        for reader in readers:
            await asyncio.wait_for(reader.read(), DEADLINE_S)
        await (await plane.join("honest")).pull(1, DEADLINE_S)
        full_bytes = plane.trainer.store.newest().manifest.size_bytes
        assert server.num_bytes_sent - sent_before - full_bytes <= num_readers * MIB
        for reader in readers:
            reader.cancel()
