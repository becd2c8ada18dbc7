"""The weights service's messages and their meaning here.

The data of a pull is framed by hand, byte for byte as protobuf would: a parser would copy every megabyte once more, and
halve the speed.
"""

import math
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf import message_factory
from google.protobuf.message import DecodeError

from onbeat.errors import WeightsError
from onbeat.weights.framing import DTYPE_BYTES, Manifest, TensorEntry
from onbeat.weights.payload import PayloadKey, Plan, PlanEntry
from onbeat.weights.v1 import weights_pb2

SERVICE = "onbeat.weights.v1.WeightsService"
MAX_PLAN_BYTES = 1 << 20  # an entry takes about 12 bytes; a plan takes time and memory before it can be checked
MAX_SHARDS = 4096  # ranks of a trainer; each shard is pulled by its own task
DATA_TAG = 0x12  # of PullResponse.data: field 2, length-delimited


def data_message(pieces: Sequence[memoryview]) -> bytes:
    """Return a PullResponse with `data`, made in one copy."""
    size = sum(len(piece) for piece in pieces)
    return b"".join((bytes((DATA_TAG,)), varint(size), *pieces))


def plan_message(key: PayloadKey, plan: Plan) -> bytes:
    entries = [
        weights_pb2.Entry(tensor_index=entry.tensor_index, encoding=int(entry.encoding), size_bytes=entry.size_bytes)  # type: ignore[arg-type]
        for entry in plan.entries
    ]
    return weights_pb2.PullResponse(plan=weights_pb2.Plan(entries=entries, digest=plan.digest(key))).SerializeToString()


def read_message(key: PayloadKey, message: bytes) -> Plan | memoryview:
    """Read a PullResponse: return the plan, or the data without a copy. Raise WeightsError."""
    if message[:1] == bytes((DATA_TAG,)):
        size, start = read_varint(message, 1)
        if size != len(message) - start:
            raise WeightsError(f"{key}: a message says {size} bytes and holds {len(message) - start}")
        return memoryview(message)[start:]
    if len(message) > MAX_PLAN_BYTES:
        raise WeightsError(f"{key}: a plan of {len(message)} bytes came, at most {MAX_PLAN_BYTES} are read")
    try:
        plan = weights_pb2.PullResponse.FromString(message).plan
    except DecodeError as error:
        raise WeightsError(f"{key}: a message is neither a plan nor data: {error}") from error
    entries = tuple(PlanEntry(entry.tensor_index, entry.encoding, entry.size_bytes) for entry in plan.entries)
    found = Plan(entries)
    if found.digest(key) != plan.digest:
        raise WeightsError(f"{key}: the plan contradicts its digest")
    return found


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(buffer: bytes, start: int) -> tuple[int, int]:
    """Return the number at `start` and the offset of its end. Raise WeightsError when it has no end."""
    value = 0
    for index, byte in enumerate(buffer[start : start + 10]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, start + index + 1
    raise WeightsError("a message ends in its header")


# ---- the service; its pull sends and receives bytes, which generated code would parse --------------------------------


def service_handler(servicer: object) -> grpc.GenericRpcHandler:
    """Return a handler of the service's methods that `servicer` has; the others are UNIMPLEMENTED."""
    methods: dict[str, Any] = {}
    for method in weights_pb2.DESCRIPTOR.services_by_name["WeightsService"].methods:
        if not hasattr(servicer, method.name):
            continue
        read = message_factory.GetMessageClass(method.input_type).FromString
        write = message_factory.GetMessageClass(method.output_type).SerializeToString
        create: Any = grpc.unary_unary_rpc_method_handler
        serve = answering(getattr(servicer, method.name), read)
        if method.server_streaming:
            create, serve = grpc.unary_stream_rpc_method_handler, streaming(getattr(servicer, method.name), read)
        methods[method.name] = create(serve, None, None if method.name == "Pull" else write)
    return grpc.method_handlers_generic_handler(SERVICE, methods)


def answering(method: Callable[..., Any], read: Callable[[bytes], Any]) -> Callable[..., Any]:
    async def serve(data: bytes, context: Any) -> Any:
        return await method(await parse(data, read, context), context)

    return serve


def streaming(method: Callable[..., Any], read: Callable[[bytes], Any]) -> Callable[..., Any]:
    async def serve(data: bytes, context: Any) -> AsyncIterator[Any]:
        async for message in method(await parse(data, read, context), context):
            yield message

    return serve


async def parse(data: bytes, read: Callable[[bytes], Any], context: Any) -> Any:
    """Return the request. An unreadable one is the caller's fault: abort the call, without a traceback in our log."""
    try:
        return read(data)
    except DecodeError:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request is no message of this method")


def pull_stub(channel: grpc.aio.Channel) -> Callable[..., Any]:
    """Return a callable for `Pull` whose answers are bytes."""
    return channel.unary_stream(f"/{SERVICE}/Pull", request_serializer=weights_pb2.PullRequest.SerializeToString)


# ---- messages and their meaning --------------------------------------------------------------------------------------


def key_message(key: PayloadKey) -> weights_pb2.PayloadKey:
    return weights_pb2.PayloadKey(policy_version=key.policy_version, base_version=key.base_version, shard=key.shard)


def read_key(message: weights_pb2.PayloadKey) -> PayloadKey:
    base = message.base_version if message.HasField("base_version") else None
    return PayloadKey(message.policy_version, base, message.shard)


def tensor_messages(manifest: Manifest) -> list[weights_pb2.Tensor]:
    return [
        weights_pb2.Tensor(
            name=tensor.name,
            dtype=tensor.dtype,
            shape=tensor.shape,
            size_bytes=tensor.size_bytes,
            digest=tensor.digest,
            checksum=tensor.checksum,
        )
        for tensor in manifest.tensors
    ]


def read_manifest(answer: weights_pb2.GetManifestResponse) -> Manifest:
    """Return the manifest. Raise WeightsError when it contradicts its digest or itself."""
    tensors = tuple(
        TensorEntry(tensor.name, tensor.dtype, tuple(tensor.shape), tensor.size_bytes, tensor.digest, tensor.checksum)
        for tensor in answer.tensors
    )
    manifest = Manifest(answer.policy_version, tensors, tuple(answer.shard_starts))
    if manifest.digest != answer.digest:
        raise WeightsError(f"the manifest of version {answer.policy_version} contradicts its digest")
    names = {tensor.name for tensor in tensors}
    if len(names) < len(tensors) or "__metadata__" in names:
        raise WeightsError(f"the manifest of version {answer.policy_version} has tensors that no file can hold by name")
    if len(manifest.shard_starts) > MAX_SHARDS:
        raise WeightsError(f"the manifest of version {answer.policy_version} has {len(manifest.shard_starts)} shards")
    for tensor in tensors:
        if tensor.dtype not in DTYPE_BYTES:
            raise WeightsError(f"the manifest says that {tensor.name} is of dtype {tensor.dtype!r}, unknown here")
        if tensor.size_bytes != math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]:
            shape = f"{tensor.dtype} of shape {tensor.shape}"
            raise WeightsError(f"the manifest says that {tensor.name}, {shape}, has {tensor.size_bytes} bytes")
    bounds = (0, *manifest.shard_starts, len(tensors))
    if list(bounds) != sorted(bounds):
        raise WeightsError(f"the manifest of version {answer.policy_version} has shards that overlap")
    return manifest
