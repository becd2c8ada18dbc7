"""The weights plane lets in who may come in, over real gRPC and real certificates, and refuses everybody else soon."""

import asyncio
import logging
import re
import signal
import socket
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import grpc
import pytest
from cryptography.hazmat.primitives import serialization
from pydantic_settings import BaseSettings, SettingsConfigDict

from onbeat.contracts.errors import WeightsError
from onbeat.weights import security as module
from onbeat.weights.client import WeightsClient
from onbeat.weights.security import (
    PLAIN,
    WireSecurity,
    WireSettings,
    bind,
    call_metadata,
    create_channel,
    create_server,
    join_address,
    reachable_host,
)
from onbeat.weights.server import service_handler
from onbeat.weights.v1 import weights_pb2
from onbeat.weights.wire import SERVICE
from tests.integration.authority import Authority

KEY = "correct-horse-battery"
DEADLINE_S = 10.0
SOON_S = 5.0


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("pki") / "stranger")


@pytest.fixture(scope="module")
def tls_server(authority):
    cert, key = authority.issue("127.0.0.1")
    return WireSecurity(tls_cert=cert, tls_key=key)


@pytest.fixture(scope="module")
def mutual_server(authority, tls_server):
    return replace(tls_server, tls_ca=authority.cert)


class Weights:
    """Watch sends one version; of the job `endless` it then stays open."""

    async def Describe(self, request, context):
        return weights_pb2.DescribeResponse(job_id=request.job_id)

    async def Watch(self, request, context):
        yield weights_pb2.WatchResponse(policy_version=7)
        if request.job_id == "endless":
            await asyncio.Event().wait()


class Wire:
    """Servers and channels of one test; all of them end with it."""

    def __init__(self, stack):
        self._stack = stack

    async def serve(self, security, max_concurrent_calls=8):
        server = create_server(security, max_concurrent_calls)
        server.add_generic_rpc_handlers((service_handler(Weights()),))
        port = bind(server, security, "127.0.0.1:0")
        await server.start()
        self._stack.push_async_callback(server.stop, None)
        return f"127.0.0.1:{port}"

    def channel(self, address, security):
        channel = create_channel(address, security)
        self._stack.push_async_callback(channel.close)
        return channel

    def stub(self, address, security):
        """Make a stub whose calls send the metadata that a `WeightsClient` sends."""
        channel, metadata = self.channel(address, security), call_metadata(security)
        describe = channel.unary_unary(
            f"/{SERVICE}/Describe",
            request_serializer=weights_pb2.DescribeRequest.SerializeToString,
            response_deserializer=weights_pb2.DescribeResponse.FromString,
        )
        watch = channel.unary_stream(
            f"/{SERVICE}/Watch",
            request_serializer=weights_pb2.WatchRequest.SerializeToString,
            response_deserializer=weights_pb2.WatchResponse.FromString,
        )
        return SimpleNamespace(Describe=partial(describe, metadata=metadata), Watch=partial(watch, metadata=metadata))


@pytest.fixture
async def wire():
    async with AsyncExitStack() as stack:
        yield Wire(stack)


async def describe(stub):
    return await stub.Describe(weights_pb2.DescribeRequest(job_id="job"), timeout=DEADLINE_S)


async def watch(stub):
    """Return all versions of a stream that ends."""
    request = weights_pb2.WatchRequest(job_id="job")
    return [answer.policy_version async for answer in stub.Watch(request, timeout=DEADLINE_S)]


async def open_stream(stub):
    """Open a stream that is being answered and stays open."""
    call = stub.Watch(weights_pb2.WatchRequest(job_id="endless"))
    first = await asyncio.wait_for(anext(aiter(call)), DEADLINE_S)
    assert first.policy_version == 7
    return call


async def assert_is_answered(stub):
    assert (await describe(stub)).job_id == "job"
    assert await watch(stub) == [7]


async def assert_is_refused(stub, code, *words):
    """Unary calls and streams alike, long before their deadline. Returns the last details."""
    for call in (describe, watch):
        started = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(stub)
        assert time.monotonic() - started < SOON_S
        assert refused.value.code() == code, refused.value.details()
        for word in words:
            assert word in refused.value.details()
        assert KEY not in refused.value.details()


async def wait_until_answered(stub):
    """Wait for a free place, which takes the time in which a server notices that a client has gone."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                return await open_stream(stub)
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
                await asyncio.sleep(0.02)


# The key


@pytest.mark.parametrize("wrong", ["", "x", KEY[:-1], KEY + "x", KEY.upper()])
async def test_only_the_right_key_opens_unary_calls_and_streams(wire, wrong):
    address = await wire.serve(WireSecurity(api_key=KEY))
    await assert_is_answered(wire.stub(address, WireSecurity(api_key=KEY)))
    stub, problem = wire.stub(address, WireSecurity(api_key=wrong)), "is wrong" if wrong else "no API key"
    await assert_is_refused(stub, grpc.StatusCode.UNAUTHENTICATED, problem, "ONBEAT_WEIGHTS_API_KEY")
    with pytest.raises(grpc.aio.AioRpcError) as refused:  # it does not learn which methods there are
        await wire.channel(address, PLAIN).unary_unary("/no.such/Method")(b"", timeout=DEADLINE_S)
    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("key", ["two words", "line\n", "clé"])
def test_a_key_that_cannot_travel_is_refused_without_being_shown(key):
    with pytest.raises(ValueError, match="ONBEAT_WEIGHTS_API_KEY") as refused:
        WireSecurity(api_key=key)
    assert key not in str(refused.value)


def test_the_key_may_lie_in_a_file(tmp_path):
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    assert WireSettings(weights_api_key_file=file).wire_security().api_key == KEY
    assert WireSettings(weights_api_key_file="").wire_security().api_key == ""
    with pytest.raises(ValueError, match="both set"):
        WireSettings(weights_api_key=KEY, weights_api_key_file=file).wire_security()
    file.write_text("\n")
    with pytest.raises(ValueError, match=r"ONBEAT_WEIGHTS_API_KEY_FILE=.* is empty"):
        WireSettings(weights_api_key_file=file).wire_security()
    with pytest.raises(ValueError, match="cannot be read"):
        WireSettings(weights_api_key_file=tmp_path / "none").wire_security()


async def test_key_sent_in_the_clear_is_warned_of_once_except_loopback(wire, caplog, tls_server, authority):
    module._warn_of_key_in_clear.cache_clear()
    with caplog.at_level(logging.WARNING):
        for address in ("127.0.0.1:1", "localhost:1", "[::1]:1"):
            wire.channel(address, WireSecurity(api_key=KEY))
        wire.channel("10.0.0.1:1", WireSecurity(api_key=KEY, tls_ca=authority.cert))
        bind(create_server(tls_server, max_concurrent_calls=1), replace(tls_server, api_key=KEY), "0.0.0.0:0")
        assert caplog.records == []
        wire.channel("10.0.0.1:1", WireSecurity(api_key=KEY))
        wire.channel("trainer.example:1", WireSecurity(api_key=KEY))
        bind(create_server(PLAIN, max_concurrent_calls=1), WireSecurity(api_key=KEY), "0.0.0.0:0")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "in the clear" in caplog.text
    assert KEY not in caplog.text


def test_server_on_all_interfaces_is_named_after_its_machine(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "node-7")
    assert [reachable_host(host) for host in ("0.0.0.0", "::", "10.0.0.1")] == ["node-7", "node-7", "10.0.0.1"]
    assert reachable_host("0.0.0.0", "weights.example") == "weights.example"


# TLS


@pytest.fixture(scope="module")
def sides(authority, stranger, tls_server, mutual_server):
    """Both ends of a wire, by name."""
    cert, key = authority.issue("weights.test")
    ours, theirs = authority.issue("rollout"), stranger.issue("rollout")
    trusting = WireSecurity(tls_ca=authority.cert)
    return {
        "plain": PLAIN,
        "tls": tls_server,
        "tls of another name": WireSecurity(tls_cert=cert, tls_key=key),
        "mutual": mutual_server,
        "trusting": trusting,
        "trusting by name": replace(trusting, tls_server_name="weights.test"),
        "trusting another authority": WireSecurity(tls_ca=stranger.cert),
        "certified": replace(trusting, tls_cert=ours[0], tls_key=ours[1]),
        "certified by another authority": replace(trusting, tls_cert=theirs[0], tls_key=theirs[1]),
    }


@pytest.mark.parametrize(
    ("server", "client", "problem"),
    [
        ("tls", "trusting", None),
        ("tls", "trusting another authority", "not from the authority in ONBEAT_WEIGHTS_TLS_CA here"),
        ("tls", "plain", "this side has none; if ONBEAT_WEIGHTS_TLS_CERT is set there, set ONBEAT_WEIGHTS_TLS_CA here"),
        ("tls of another name", "trusting", "put that name into ONBEAT_WEIGHTS_TLS_SERVER_NAME here"),
        ("tls of another name", "trusting by name", None),
        ("mutual", "certified", None),
        ("mutual", "trusting", "if ONBEAT_WEIGHTS_TLS_CA is set there, set ONBEAT_WEIGHTS_TLS_CERT"),
        ("mutual", "certified by another authority", "of that authority here"),
        ("plain", "trusting", "this side wants it and the other side has none; set ONBEAT_WEIGHTS_TLS_CERT"),
    ],
)
async def test_only_sides_that_trust_each_other_talk_over_tls(wire, sides, server, client, problem):
    address = await wire.serve(sides[server])
    stub = wire.stub(address, sides[client])
    if problem is None:
        await assert_is_answered(stub)
        return
    await assert_is_refused(stub, grpc.StatusCode.UNAVAILABLE)
    puller = WeightsClient(address, "job", sides[client])
    with pytest.raises(WeightsError, match=re.escape(problem)) as refused:
        await puller.describe()
    assert str(refused.value).startswith(f"could not describe the model at {address}: TLS: ")
    await puller.close()


async def test_over_tls_the_key_is_asked_for_as_well(wire, tls_server, authority):
    address = await wire.serve(replace(tls_server, api_key=KEY))
    await assert_is_answered(wire.stub(address, WireSecurity(api_key=KEY, tls_ca=authority.cert)))
    wrong = wire.stub(address, WireSecurity(api_key="wrong", tls_ca=authority.cert))
    await assert_is_refused(wrong, grpc.StatusCode.UNAUTHENTICATED)


async def test_a_side_that_can_only_pull_does_not_serve_in_plain_text(authority, tls_server, mutual_server):
    pulls_only = WireSecurity(tls_ca=authority.cert)
    assert not pulls_only.can_serve
    assert all(security.can_serve for security in (PLAIN, tls_server, mutual_server))
    with pytest.raises(ValueError, match="ONBEAT_WEIGHTS_TLS_CERT is not"):
        bind(create_server(pulls_only, max_concurrent_calls=1), pulls_only, "127.0.0.1:0")


# Addresses


async def test_no_proxy_comes_between_rollouts_and_trainer(wire, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        for name in ("http_proxy", "https_proxy", "grpc_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        await assert_is_answered(wire.stub(await wire.serve(PLAIN), PLAIN))
        proxy.settimeout(0)
        with pytest.raises(BlockingIOError):
            proxy.accept()


@pytest.mark.parametrize(("host", "address"), [("::1", "[::1]:5"), ("[::]", "[::]:5"), ("node-7", "node-7:5")])
def test_an_ipv6_address_gets_brackets(host, address):
    assert join_address(host, 5) == address


# Files


def test_files_that_cannot_work_are_refused_by_variable_and_path(authority, stranger, tmp_path):
    cert, key = authority.issue("good")
    (tmp_path / "empty.pem").write_text("\n")
    (tmp_path / "text.pem").write_text("hello")
    right_key = serialization.load_pem_private_key(key.read_bytes(), None)
    encryption = serialization.BestAvailableEncryption(b"password")
    encrypted = right_key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    (tmp_path / "encrypted.key").write_bytes(encrypted)
    for files, message in [
        ({"tls_cert": cert}, "ONBEAT_WEIGHTS_TLS_CERT is set but ONBEAT_WEIGHTS_TLS_KEY is not"),
        ({"tls_key": key}, "ONBEAT_WEIGHTS_TLS_KEY is set but ONBEAT_WEIGHTS_TLS_CERT is not"),
        ({"tls_server_name": "weights.test"}, "ONBEAT_WEIGHTS_TLS_SERVER_NAME"),
        ({"tls_ca": tmp_path / "gone.pem"}, r"ONBEAT_WEIGHTS_TLS_CA=.*gone\.pem cannot be read: No such file"),
        ({"tls_ca": tmp_path / "empty.pem"}, r"ONBEAT_WEIGHTS_TLS_CA=.*empty\.pem is empty"),
        ({"tls_ca": tmp_path / "text.pem"}, r"ONBEAT_WEIGHTS_TLS_CA=.*text\.pem has no PEM certificate"),
        ({"tls_cert": tmp_path / "empty.pem", "tls_key": key}, r"ONBEAT_WEIGHTS_TLS_CERT=.*empty\.pem is empty"),
        ({"tls_cert": key, "tls_key": cert}, "are not a PEM certificate and its unencrypted key"),
        ({"tls_cert": cert, "tls_key": stranger.issue("other")[1]}, "are not a PEM certificate and its unencrypted"),
        ({"tls_cert": cert, "tls_key": tmp_path / "encrypted.key"}, "are not a PEM certificate and its unencrypted"),
    ]:
        with pytest.raises(ValueError, match=message):
            WireSecurity(**files)


# Limits


async def test_a_call_beyond_the_limit_is_refused_with_the_limit(wire):
    security = WireSecurity(api_key=KEY)
    address = await wire.serve(security, max_concurrent_calls=2)
    for _ in range(3):  # these take no place
        await assert_is_refused(wire.stub(address, PLAIN), grpc.StatusCode.UNAUTHENTICATED)
    stub = wire.stub(address, security)
    calls = [await open_stream(stub), await open_stream(stub)]
    for _ in range(2):
        await assert_is_refused(stub, grpc.StatusCode.RESOURCE_EXHAUSTED, "at most 2 calls at once")
    calls[0].cancel()
    calls[0] = await wait_until_answered(stub)
    await assert_is_refused(stub, grpc.StatusCode.RESOURCE_EXHAUSTED)


async def test_calls_that_end_by_themselves_free_their_slots(wire):
    stub = wire.stub(await wire.serve(PLAIN, max_concurrent_calls=1), PLAIN)
    for _ in range(100):
        await assert_is_answered(stub)


HOLDER = """
import sys, time, grpc
from onbeat.weights.v1 import weights_pb2
watch = grpc.insecure_channel(sys.argv[1]).unary_stream("/onbeat.weights.v1.WeightsService/Watch")
for answer in watch(weights_pb2.WatchRequest(job_id="endless").SerializeToString()):
    print("open", flush=True)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_a_client_that_is_gone_leaves_its_place_to_the_next(wire, how, monkeypatch):
    """Frozen: the connection stays, but nobody answers on it, as when a machine is cut off."""
    monkeypatch.setitem(module.SERVER_OPTIONS, "grpc.keepalive_time_ms", 1000)
    monkeypatch.setitem(module.SERVER_OPTIONS, "grpc.http2.ping_timeout_ms", 500)
    address = await wire.serve(PLAIN, max_concurrent_calls=1)
    holder = await asyncio.create_subprocess_exec(sys.executable, "-c", HOLDER, address, stdout=asyncio.subprocess.PIPE)
    try:
        assert await asyncio.wait_for(holder.stdout.readline(), 30) == b"open\n"
        stub = wire.stub(address, PLAIN)
        await assert_is_refused(stub, grpc.StatusCode.RESOURCE_EXHAUSTED)
        holder.send_signal(how)
        await wait_until_answered(stub)
    finally:
        if holder.returncode is None:
            holder.kill()
        await asyncio.wait_for(holder.wait(), 10)


@pytest.mark.parametrize("compression", [None, grpc.Compression.Gzip], ids=["plain", "compressed"])
async def test_oversized_request_is_refused_also_if_compressed(wire, compression):
    stub = wire.stub(await wire.serve(PLAIN), PLAIN)
    request = weights_pb2.DescribeRequest(job_id="x" * (2 << 20))
    with pytest.raises(grpc.aio.AioRpcError, match="larger than max") as refused:
        await stub.Describe(request, timeout=DEADLINE_S, compression=compression)
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    await assert_is_answered(stub)


async def test_a_port_that_is_taken_is_an_error_not_a_shared_port(wire, tls_server):
    address = await wire.serve(PLAIN)
    for security in (PLAIN, tls_server):
        with pytest.raises(WeightsError, match=f"cannot listen on {address}"):
            bind(create_server(security, max_concurrent_calls=1), security, address)


# Settings


def test_settings_make_the_security_from_the_environment(monkeypatch, authority):
    class Settings(WireSettings, BaseSettings):
        model_config = SettingsConfigDict(env_prefix="ONBEAT_")

    class Strict(Settings):
        needed: int

    cert, key = authority.issue("settings")
    values = {"TLS_CERT": cert, "TLS_KEY": key, "TLS_CA": authority.cert, "TLS_SERVER_NAME": "n", "API_KEY": KEY}
    for name, value in values.items():
        monkeypatch.setenv(f"ONBEAT_WEIGHTS_{name}", str(value))
    settings = Settings()
    security = settings.wire_security()
    assert security == WireSecurity(KEY, cert, key, authority.cert, "n")
    with pytest.raises(ValueError, match="needed") as refused:  # an error about another setting
        Strict()
    assert KEY not in repr(security) + repr(settings) + settings.model_dump_json() + str(refused.value)
    for name in values:
        monkeypatch.setenv(f"ONBEAT_WEIGHTS_{name}", "")
    assert Settings().wire_security() == PLAIN
