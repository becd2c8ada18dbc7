"""Tensors as bytes: the manifest of a version, its digests, and the safetensors layout that a host keeps it in.

Digests are BLAKE3, which is collision-resistant, so they can be trusted whatever the relay, and in an audit. Checksums
are XXH3-128: they find faults in a fraction of the time, but collisions can be made on purpose. They are for bytes from
the process that sent the checksums.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from blake3 import blake3

CHUNK_BYTES = 1 << 20  # messages of about 1 MiB are the sweet spot of gRPC from Python

DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "U8": 1}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a version, in the checkpoint's own name and layout."""

    name: str
    dtype: str  # safetensors names: "BF16", "F32", ...
    shape: tuple[int, ...]
    size_bytes: int
    digest: bytes  # BLAKE3 over the raw little-endian bytes
    checksum: bytes  # XXH3-128 over the same bytes; empty if there is none


@dataclass(frozen=True)
class Manifest:
    policy_version: int
    tensors: tuple[TensorEntry, ...]
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
            whole.update(json.dumps([tensor.name, tensor.dtype, tensor.shape]).encode())
            whole.update(tensor.digest)
        return whole.digest()

    @property
    def layout(self) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
        """The names, dtypes and shapes: the same for all versions of a model, whatever the number of trainer ranks."""
        return tuple((tensor.name, tensor.dtype, tensor.shape) for tensor in self.tensors)


def safetensors_header(manifest: Manifest) -> bytes:
    """Return the header of a safetensors file that holds the manifest's tensors back to back, padded to 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for tensor, (start, end) in zip(manifest.tensors, pairwise(manifest.starts), strict=True):
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
