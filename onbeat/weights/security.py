"""Security of the weights plane: API key, TLS and limits of gRPC servers and channels.

PLAIN                     anyone who reaches the port (loopback, a trusted network)
api_key                   callers prove that they know the key
tls_cert, tls_key         the server proves who it is
+ tls_ca                  both sides prove who they are (mutual TLS)
tls_ca alone              a side that pulls over TLS and cannot serve
"""

import asyncio
import functools
import hashlib
import hmac
import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import grpc.aio
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from onbeat.contracts.errors import WeightsError
from onbeat.process.network import OptionalFile, check_certificate, host_of, is_loopback, read_file, trust

logger = logging.getLogger(__name__)

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"  # None: there is no such method

API_KEY = "ONBEAT_WEIGHTS_API_KEY"
TLS_CERT = "ONBEAT_WEIGHTS_TLS_CERT"
TLS_KEY = "ONBEAT_WEIGHTS_TLS_KEY"
TLS_CA = "ONBEAT_WEIGHTS_TLS_CA"
TLS_SERVER_NAME = "ONBEAT_WEIGHTS_TLS_SERVER_NAME"

MAX_REQUEST_BYTES = 1 << 20  # requests are names and numbers; no caller needs to make a server allocate more
MAX_ANSWER_BYTES = 256 << 20  # a tokenizer can be tens of MB
# These options are for both sides: a peer that vanished silently is noticed within 30 s, and its calls end.
LIVENESS_OPTIONS: dict[str, Any] = {
    "grpc.keepalive_time_ms": 20_000,
    "grpc.http2.ping_timeout_ms": 10_000,  # `grpc.keepalive_timeout_ms` changes nothing: 60 s
    "grpc.http2.max_pings_without_data": 0,  # no limit
}
SERVER_OPTIONS: dict[str, Any] = {
    **LIVENESS_OPTIONS,
    "grpc.max_receive_message_length": MAX_REQUEST_BYTES,
    "grpc.max_send_message_length": MAX_ANSWER_BYTES,
    "grpc.http2.min_ping_interval_without_data_ms": 5_000,  # the default counts pings on a quiet call as abuse: 100 s
    "grpc.so_reuseport": 0,  # otherwise two servers share a port silently, and each gets some of the calls
    "grpc.server_handshake_timeout_ms": 10_000,  # limit for a connection that sends nothing
}
CHANNEL_OPTIONS: dict[str, Any] = {
    **LIVENESS_OPTIONS,
    "grpc.max_receive_message_length": MAX_ANSWER_BYTES,
    "grpc.use_local_subchannel_pool": 1,  # otherwise a new client waits out the growing retry delays of older clients
    "grpc.max_reconnect_backoff_ms": 3_000,  # the default is 2 minutes
    "grpc.enable_http_proxy": 0,  # otherwise gRPC obeys http_proxy, for 127.0.0.1 too, and a proxy sees key and weights
}


@dataclass(frozen=True)
class WireSecurity:
    """One side's identity, and whom it trusts. It raises ValueError for a combination that cannot work."""

    api_key: str = field(default="", repr=False)  # sent with every call and required of every call; empty: neither
    tls_cert: Path | None = None  # PEM of this side; with tls_key
    tls_key: Path | None = None
    tls_ca: Path | None = None  # PEM authority that the other side's certificate must come from
    tls_server_name: str = ""  # name in the server's certificate when it is not the address it is reached by

    def __post_init__(self) -> None:
        if not all("!" <= character <= "~" for character in self.api_key):
            raise ValueError(f"{API_KEY} has a blank, a line end or a character beyond ASCII; use letters and digits")
        if self.tls_server_name and not self.has_tls:
            raise ValueError(f"{TLS_SERVER_NAME} is set but there is no TLS to use it; set {TLS_CA}")
        self._check_files()

    @property
    def has_tls(self) -> bool:
        return self.tls_cert is not None or self.tls_ca is not None

    @property
    def can_serve(self) -> bool:
        """True if this side can serve: with tls_ca alone it may pull, but would have to serve in plain text."""
        return self.tls_ca is None or self.tls_cert is not None

    def _check_files(self) -> None:
        """Check the files now: gRPC would only log a problem, and fail later. Raise ValueError."""
        for variable, path in [(TLS_CERT, self.tls_cert), (TLS_KEY, self.tls_key), (TLS_CA, self.tls_ca)]:
            if path is not None:
                read_file(variable, path)
        check_certificate((TLS_CERT, self.tls_cert), (TLS_KEY, self.tls_key))
        if self.tls_ca is not None:
            trust(TLS_CA, self.tls_ca)


PLAIN = WireSecurity()


class WireSettings(BaseModel):
    """The part of a service's settings that makes its WireSecurity: `class Settings(WireSettings, BaseSettings)`."""

    model_config = ConfigDict(hide_input_in_errors=True)  # an error about the whole model would show the key

    weights_api_key: SecretStr = Field(
        SecretStr(""), description="key of trainers and rollouts; requests without it are refused; empty: no key"
    )
    weights_api_key_file: OptionalFile = Field(
        None, description="holds the key instead of weights_api_key; read once, at the start"
    )
    weights_tls_cert: OptionalFile = Field(None, description="PEM certificate of this side; with weights_tls_key")
    weights_tls_key: OptionalFile = Field(None, description="PEM private key of this side, not encrypted")
    weights_tls_ca: OptionalFile = Field(
        None, description="PEM authority that the other side's certificate must come from; then servers ask for one too"
    )
    weights_tls_server_name: str = Field(
        "", description="name in the servers' certificates when it is not the address they are reached by"
    )

    def wire_security(self) -> WireSecurity:
        """Return the security that the settings describe. Raise ValueError for a combination that cannot work."""
        return WireSecurity(
            api_key=self._read_api_key(),
            tls_cert=self.weights_tls_cert,
            tls_key=self.weights_tls_key,
            tls_ca=self.weights_tls_ca,
            tls_server_name=self.weights_tls_server_name,
        )

    def _read_api_key(self) -> str:
        given = self.weights_api_key.get_secret_value()
        if self.weights_api_key_file is None:
            return given
        if given:
            raise ValueError(f"{API_KEY} and {API_KEY}_FILE are both set; set one of them")
        return read_file(f"{API_KEY}_FILE", self.weights_api_key_file)


def reachable_host(host: str, advertise: str = "") -> str:
    """Return the name under which others reach a server that listens on `host`: `advertise` if given, or the name of
    this machine for all interfaces (0.0.0.0, ::)."""
    return advertise or (socket.gethostname() if host in ("0.0.0.0", "::", "[::]") else host)


def join_address(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def create_server(security: WireSecurity, max_concurrent_calls: int) -> grpc.aio.Server:
    """Create a server whose every method requires the key and counts against one limit."""
    gate = _Gate(dict(call_metadata(security)).get("authorization"), max_concurrent_calls)
    return grpc.aio.server(interceptors=[gate], options=list(SERVER_OPTIONS.items()))


def bind(server: grpc.aio.Server, security: WireSecurity, address: str) -> int:
    """Listen on `host:port` (0: the system chooses) and return the port.

    Raise ValueError when this side may not serve, WeightsError when the address cannot be bound.
    """
    if not security.can_serve:
        raise ValueError(f"{TLS_CA} is set but {TLS_CERT} is not: this side can pull, but would serve in plain text")
    try:
        if security.tls_cert is None:
            _warn_if_key_in_clear(security, address)
            return server.add_insecure_port(address)
        return server.add_secure_port(address, _server_credentials(security))
    except RuntimeError as error:
        raise WeightsError(f"cannot listen on {address}: its port is taken, or its host not of this machine") from error


def create_channel(address: str, security: WireSecurity) -> grpc.aio.Channel:
    """Create a channel to `host:port`. Its calls carry the key only if they send `call_metadata`.

    A TLS problem shows at the first call: UNAVAILABLE, with the handshake's error in its details.
    """
    options = list(CHANNEL_OPTIONS.items())
    if security.tls_server_name:
        options.append(("grpc.ssl_target_name_override", security.tls_server_name))
    if security.has_tls:
        return grpc.aio.secure_channel(address, _channel_credentials(security), options)
    _warn_if_key_in_clear(security, address)
    return grpc.aio.insecure_channel(address, options)


def tls_remedy(security: WireSecurity, details: str) -> str:
    """Return what to do about a connection that gRPC could not make, if TLS is or may be the reason; otherwise ""."""
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return f"TLS: the certificate there is not in force, or not from the authority in {TLS_CA} here"
    if "Hostname Verification" in details:
        return f"TLS: the certificate there is for another name; put that name into {TLS_SERVER_NAME} here"
    if "WRONG_VERSION_NUMBER" in details:
        return f"TLS: this side wants it and the other side has none; set {TLS_CERT} and {TLS_KEY} there"
    if "Socket closed" in details and security.has_tls:
        return f"TLS: if {TLS_CA} is set there, set {TLS_CERT} and {TLS_KEY} of that authority here"
    if "Socket closed" in details:
        return f"TLS: this side has none; if {TLS_CERT} is set there, set {TLS_CA} here"
    return "TLS failed" if "handshake failed" in details else ""


def call_metadata(security: WireSecurity) -> tuple[tuple[str, str], ...]:
    """Return what every call has to send: the key, if there is one. gRPC takes call credentials with TLS only."""
    return (("authorization", f"Bearer {security.api_key}"),) if security.api_key else ()


class _Gate(grpc.aio.ServerInterceptor):
    """A gate that admits a call when it has the key and a slot is free. It runs on the server's event loop only."""

    def __init__(self, authorization: str | None, max_calls: int) -> None:
        self._expected = None if authorization is None else hashlib.sha256(authorization.encode()).digest()
        self._max_calls = max_calls
        self._num_calls = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        metadata = dict(handler_call_details.invocation_metadata)
        if self._expected is not None and (wrong := self._what_is_wrong(metadata.get("authorization"))):
            return _refusal(grpc.StatusCode.UNAUTHENTICATED, f"{wrong}; set {API_KEY} to the key of this server")
        if self._num_calls >= self._max_calls:
            detail = f"this server answers at most {self._max_calls} calls at once; try again later or at another one"
            return _refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, detail)
        self._num_calls += 1
        # An interceptor runs in the task of its call; the task ends when the call is answered, cancelled or abandoned.
        call = asyncio.current_task()
        assert call is not None
        call.add_done_callback(self._release)
        return await continuation(handler_call_details)

    def _release(self, _: object) -> None:
        self._num_calls -= 1

    def _what_is_wrong(self, sent: str | bytes | None) -> str:
        """Return the problem with the key, or ''. Hashes are compared: equally long, in constant time."""
        if sent is None:
            return "the call has no API key"
        given = hashlib.sha256(sent.encode() if isinstance(sent, str) else sent).digest()
        assert self._expected is not None
        return "" if hmac.compare_digest(given, self._expected) else "the API key of the call is wrong"


def _refusal(code: grpc.StatusCode, detail: str) -> Handler:
    """Return a handler that refuses the call. A stream handler fits every method and does not wait for the request."""

    async def refuse(_: object, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        await context.abort(code, detail)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _server_credentials(security: WireSecurity) -> grpc.ServerCredentials:
    assert security.tls_cert is not None
    assert security.tls_key is not None
    pair = (read_file(TLS_KEY, security.tls_key).encode(), read_file(TLS_CERT, security.tls_cert).encode())
    has_authority = security.tls_ca is not None
    return grpc.ssl_server_credentials([pair], _pem(TLS_CA, security.tls_ca), require_client_auth=has_authority)


def _pem(variable: str, path: Path | None) -> bytes | None:
    return read_file(variable, path).encode() if path is not None else None


def _channel_credentials(security: WireSecurity) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        root_certificates=_pem(TLS_CA, security.tls_ca),
        private_key=_pem(TLS_KEY, security.tls_key),
        certificate_chain=_pem(TLS_CERT, security.tls_cert),
    )


def _warn_if_key_in_clear(security: WireSecurity, address: str) -> None:
    if security.api_key and not is_loopback(host_of(address)):
        _warn_of_key_in_clear()


@functools.cache
def _warn_of_key_in_clear() -> None:
    """Log the warning once per process, however many connections it opens."""
    logger.warning("the key of the weights plane travels in the clear; set %s, %s and %s", TLS_CERT, TLS_KEY, TLS_CA)
