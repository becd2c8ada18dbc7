"""The contract of both sides: what a version is, what a payload is, and their messages.

Digests are BLAKE3, which is collision-resistant, so they can be trusted whatever the relay, and in an audit. Checksums
are XXH3-128: they find faults in a fraction of the time, but collisions can be made on purpose. They are for bytes from
the process that sent the checksums.

The data of a pull is framed by hand, byte for byte as protobuf would: a parser would copy every megabyte once more, and
halve the speed. All else is the generated messages, which only this package and the weight server know.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from blake3 import blake3
from google.protobuf.message import DecodeError

from onbeat.contracts.errors import WeightsError
from onbeat.weights.v1 import weights_pb2
from onbeat.weights.v1.weights_pb2 import Entry, Peer, Step, Tensor

__all__ = ["Entry", "Peer", "Step", "Tensor"]  # the generated messages that other modules import from here

SERVICE = "onbeat.weights.v1.WeightsService"
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "U8": 1}
MAX_PLAN_BYTES = 1 << 20  # an entry takes about 12 bytes; a plan takes time and memory before it can be checked
MAX_SHARDS = 4096  # ranks of a trainer; each shard is pulled by its own task
DATA_TAG = 0x12  # tag of PullResponse.data: field 2, length-delimited


# ---- a version -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Manifest:
    policy_version: int
    tensors: tuple[Tensor, ...]  # tensors in the checkpoint's own names and layout; they must not be changed
    shard_starts: tuple[int, ...] = ()  # index of the first tensor of each shard except the first

    @property
    def size_bytes(self) -> int:
        return self.starts[-1]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The offset of each tensor when they lie back to back, and at last the end of the last one."""
        return tuple(accumulate((tensor.size_bytes for tensor in self.tensors), initial=0))

    @cached_property
    def shards(self) -> tuple[range, ...]:
        """The tensors of each shard."""
        return tuple(range(first, end) for first, end in pairwise((0, *self.shard_starts, len(self.tensors))))

    @cached_property
    def digest(self) -> bytes:
        """The BLAKE3 over names, dtypes, shapes and digests in order: equal if and only if the weights are.

        Checksums are left out: jobs record this digest. A pull fails where a checksum is wrong, and is tried again.
        """
        whole = blake3()
        for tensor in self.tensors:
            whole.update(json.dumps([tensor.name, tensor.dtype, list(tensor.shape)]).encode())
            whole.update(tensor.digest)
        return whole.digest()

    @property
    def layout(self) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
        """The names, dtypes and shapes: the same for all versions of a model, whatever the number of trainer ranks."""
        return tuple((tensor.name, tensor.dtype, tuple(tensor.shape)) for tensor in self.tensors)


# ---- a payload: one shard of a version, in full or as the delta from a base ------------------------------------------


@dataclass(frozen=True)
class PayloadKey:
    """The name of one payload. `base_version` None: in full."""

    policy_version: int
    base_version: int | None = None
    shard: int = 0

    def __str__(self) -> str:
        way = "in full" if self.base_version is None else f"from {self.base_version}"
        return f"version {self.policy_version} {way}" + (f", shard {self.shard}" if self.shard else "")


@dataclass(frozen=True)
class Plan:
    """The division of the payload's bytes into encoded tensors, back to back."""

    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, parts: Iterable[tuple[int, int, int]]) -> "Plan":
        """Return the plan with these (tensor index, `delta.Encoding`, encoded size in bytes)."""
        return cls(
            tuple(
                Entry(tensor_index=index, encoding=encoding, size_bytes=size_bytes)  # type: ignore[arg-type]
                for index, encoding, size_bytes in parts
            )
        )

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The offset of each entry, and at last the payload's size."""
        return tuple(accumulate((entry.size_bytes for entry in self.entries), initial=0))

    @property
    def size_bytes(self) -> int:
        return self.starts[-1]

    def digest(self, key: PayloadKey) -> bytes:
        whole = blake3(repr(key).encode())
        for entry in self.entries:
            whole.update(repr((entry.tensor_index, entry.encoding, entry.size_bytes)).encode())
        return whole.digest()


# ---- messages --------------------------------------------------------------------------------------------------------


def data_message(pieces: Sequence[memoryview]) -> bytes:
    """Return a PullResponse with `data`, made in one copy."""
    size = sum(len(piece) for piece in pieces)
    return b"".join((bytes((DATA_TAG,)), varint(size), *pieces))


def plan_message(key: PayloadKey, plan: Plan) -> bytes:
    message = weights_pb2.Plan(entries=plan.entries, digest=plan.digest(key))
    return weights_pb2.PullResponse(plan=message).SerializeToString()


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
    decoded = Plan(tuple(plan.entries))
    if decoded.digest(key) != plan.digest:
        raise WeightsError(f"{key}: the plan contradicts its digest")
    return decoded


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


def key_message(key: PayloadKey) -> weights_pb2.PayloadKey:
    return weights_pb2.PayloadKey(policy_version=key.policy_version, base_version=key.base_version, shard=key.shard)


def read_key(message: weights_pb2.PayloadKey) -> PayloadKey:
    base = message.base_version if message.HasField("base_version") else None
    return PayloadKey(message.policy_version, base, message.shard)


def read_manifest(answer: weights_pb2.GetManifestResponse) -> Manifest:
    """Return the manifest. Raise WeightsError when it contradicts its digest or itself."""
    tensors = tuple(answer.tensors)
    manifest = Manifest(answer.policy_version, tensors, tuple(answer.shard_starts))
    if manifest.digest != answer.digest:
        raise WeightsError(f"the manifest of version {answer.policy_version} contradicts its digest")
    if not tensors:
        raise WeightsError(f"the manifest of version {answer.policy_version} has no tensors")
    names = {tensor.name for tensor in tensors}
    if len(names) < len(tensors) or "__metadata__" in names:
        raise WeightsError(f"the manifest of version {answer.policy_version} has tensors that no file can hold by name")
    if len(manifest.shard_starts) > MAX_SHARDS:
        raise WeightsError(f"the manifest of version {answer.policy_version} has {len(manifest.shard_starts)} shards")
    for tensor in tensors:
        if tensor.dtype not in DTYPE_BYTES:
            raise WeightsError(f"the manifest says that {tensor.name} is of dtype {tensor.dtype!r}, unknown here")
        if tensor.size_bytes != math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]:
            shape = f"{tensor.dtype} of shape {list(tensor.shape)}"
            raise WeightsError(f"the manifest says that {tensor.name}, {shape}, has {tensor.size_bytes} bytes")
    bounds = (0, *manifest.shard_starts, len(tensors))
    if list(bounds) != sorted(bounds):
        raise WeightsError(f"the manifest of version {answer.policy_version} has shards that overlap")
    return manifest
