"""Snapshots of published weights in host memory, by policy version. Newest few are kept."""

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from blake3 import blake3

from onbeat.weights.framing import Manifest, TensorEntry

SAFETENSORS_DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16"}
TORCH_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True)
class Snapshot:
    """Immutable: what `manifest` says is what `buffers` hold, tensor by tensor."""

    manifest: Manifest
    buffers: tuple[memoryview, ...]

    @property
    def policy_version(self) -> int:
        return self.manifest.policy_version

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Views of the buffers by name; not to be written."""
        for entry, buffer in zip(self.manifest.tensors, self.buffers, strict=True):
            flat = torch.frombuffer(buffer.obj, dtype=torch.uint8).view(TORCH_DTYPES[entry.dtype])
            yield entry.name, flat.view(entry.shape)


def take_snapshot(version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Snapshot:
    """Copy the tensors to host memory, with their digests."""
    entries, buffers = [], []
    for name, tensor in tensors:
        buffer = host_bytes(tensor)
        digest = blake3(buffer).digest()
        entries.append(TensorEntry(name, SAFETENSORS_DTYPES[tensor.dtype], tuple(tensor.shape), len(buffer), digest))
        buffers.append(buffer)
    return Snapshot(Manifest(version, tuple(entries)), tuple(buffers))


class WeightStore:
    """Written by the training thread, read by the weight server's thread."""

    def __init__(self, num_kept: int = 2) -> None:
        self._num_kept = num_kept
        self._snapshots: dict[int, Snapshot] = {}
        self._lock = threading.Lock()

    def add(self, snapshot: Snapshot) -> None:
        """Make it available; the oldest beyond `num_kept` is dropped."""
        with self._lock:
            self._snapshots[snapshot.policy_version] = snapshot
            for old in sorted(self._snapshots)[: -self._num_kept]:
                del self._snapshots[old]

    def get(self, version: int) -> Snapshot | None:
        with self._lock:
            return self._snapshots.get(version)

    def newest(self) -> Snapshot | None:
        with self._lock:
            return self._snapshots[max(self._snapshots)] if self._snapshots else None

    def versions(self) -> list[int]:
        with self._lock:
            return sorted(self._snapshots)


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """A private copy of the tensor's bytes, row-major, little-endian."""
    copy = tensor.detach().to("cpu", copy=True).contiguous()
    return memoryview(copy.reshape(-1).view(torch.uint8).numpy()).toreadonly()
