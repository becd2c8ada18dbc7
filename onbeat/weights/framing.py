"""Tensors as bytes: the manifest of a version, its digests, and the safetensors file that a pull writes.

Digests are BLAKE3: fast enough to be always on, strong enough for an audit.
"""

import json
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

CHUNK_BYTES = 1 << 20  # about 1 MiB a message is the sweet spot of gRPC from Python


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a version, in the checkpoint's own name and layout."""

    name: str
    dtype: str  # safetensors names: "BF16", "F32", ...
    shape: tuple[int, ...]
    size_bytes: int
    digest: bytes  # BLAKE3 over the raw little-endian bytes


@dataclass(frozen=True)
class Manifest:
    policy_version: int
    tensors: tuple[TensorEntry, ...]

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)

    @property
    def digest(self) -> bytes:
        """BLAKE3 over names, dtypes, shapes and digests in order: equal if and only if the weights are."""
        whole = blake3()
        for tensor in self.tensors:
            whole.update(json.dumps([tensor.name, tensor.dtype, tensor.shape]).encode())
            whole.update(tensor.digest)
        return whole.digest()


def safetensors_header(manifest: Manifest) -> bytes:
    """The header of a safetensors file that holds the manifest's tensors back to back, padded to 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", "policy_version": str(manifest.policy_version)}}
    offset = 0
    for tensor in manifest.tensors:
        end = offset + tensor.size_bytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
