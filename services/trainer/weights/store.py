"""The published weights in host memory, by policy version: the newest in full, and the deltas that lead to them."""

import threading
import time
import weakref
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from blake3 import blake3
from xxhash import xxh3_128_digest

from onbeat.config import JobConfig
from onbeat.machine.cores import available_cores
from onbeat.weights import delta
from onbeat.weights.host import full_plan
from onbeat.weights.server import Payload
from onbeat.weights.v1.weights_pb2 import GetManifestResponse
from onbeat.weights.wire import Manifest, PayloadKey, Plan, Step, Tensor
from services.trainer.world import ALONE, World

SAFETENSORS_DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16"}
TORCH_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
CORES_PER_ENCODER = 4  # the others compute meanwhile


class HostMemory:
    """The host memory of copies from a device. A copy that nothing refers to any more gives its memory to the next one
    of its size: writing into new memory takes several times as long."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)  # free buffers by bytes

    def copy(self, tensor: torch.Tensor) -> memoryview:
        """Return a copy of the tensor's bytes, row-major, little-endian."""
        free = self._free[tensor.numel() * tensor.element_size()]
        whole = free.pop() if free else torch.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8)
        whole.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        owner = whole.numpy()  # all views of the bytes keep this object
        weakref.finalize(owner, free.append, whole).atexit = False
        return owner.data.toreadonly()


@dataclass(frozen=True)
class Snapshot:
    """One shard's tensors: `buffers` hold them one by one, as `manifest` describes them.

    It is an immutable copy, or a view of the parameters: then it is valid until their next step begins.
    """

    manifest: Manifest
    buffers: tuple[memoryview, ...]
    shard: int = 0  # the rank that holds it; a version in one piece has one shard
    delta: Payload | None = None  # the delta from `delta.key.base_version`
    encode_s: float = 0.0  # seconds of all threads together for digests, checksums and delta
    started_at: float = 0.0  # time.monotonic() when the optimizer's step began
    memory: HostMemory = field(default_factory=HostMemory, repr=False, compare=False)  # buffers for the next version

    @property
    def policy_version(self) -> int:
        return self.manifest.policy_version

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield views of the buffers by name; they must not be written to."""
        for entry, buffer in zip(self.entries, self.buffers, strict=True):
            dtype = TORCH_DTYPES[entry.dtype]
            flat = torch.frombuffer(buffer.obj, dtype=dtype) if len(buffer) else torch.empty(0, dtype=dtype)
            yield entry.name, flat.view(tuple(entry.shape))

    @property
    def entries(self) -> tuple[Tensor, ...]:
        """The manifest's entries of this shard."""
        tensors = self.manifest.shards[self.shard]
        return self.manifest.tensors[tensors.start : tensors.stop]

    def holders(self) -> dict[str, int]:
        """Return the shard that holds each tensor of the version, by name."""
        tensors = self.manifest.tensors
        return {tensors[index].name: shard for shard, run in enumerate(self.manifest.shards) for index in run}

    @cached_property
    def full(self) -> Payload:
        key = PayloadKey(self.policy_version, None, self.shard)
        return Payload(key, full_plan(self.manifest, self.shard), self.buffers)


@dataclass(frozen=True)
class Encoded:
    """A thread's result for one tensor."""

    entry: Tensor
    buffer: memoryview
    encoding: delta.Encoding  # encoding of the delta
    change: memoryview
    seconds: float


class SnapshotWriter:
    """A writer that takes a snapshot tensor by tensor, while the optimizer updates the next ones.

    `put` copies and returns; threads make the digest, the checksum, and the delta from `base` if there is one.
    `is_in_place`: `base` and the snapshot are views of the parameters. Then `put` copies nothing, and `keep` copies
    what a step is about to change.
    """

    def __init__(
        self, version: int, base: Snapshot | None = None, is_in_place: bool = False, memory: HostMemory | None = None
    ) -> None:
        """Begin a version. `memory` is that of an older one, to be used again; by default that of `base`."""
        self._version, self._base, self._is_in_place = version, base, is_in_place
        self._started_at = time.monotonic()
        self._inputs: dict[str, tuple[Tensor, memoryview, int]] = {}  # arguments of `_encode` by name
        self._encoded: dict[str, Future[Encoded]] = {}
        self._held: dict[str, tuple[Tensor, memoryview | None]] = {}  # the base's, with its bytes if they are here
        self._memory = memory or (HostMemory() if base is None else base.memory)
        if base is not None:
            entries = zip(base.entries, base.buffers, strict=True)
            self._held = {entry.name: (entry, None if is_in_place else buffer) for entry, buffer in entries}
        num_threads = max(1, len(available_cores()) // CORES_PER_ENCODER)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="encode-weights")

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Copy the base's bytes of a parameter that is about to change, for its delta."""
        if name in self._held:
            self._held[name] = (self._held[name][0], host_bytes(tensor))

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Take the tensor into the version: as a copy, which later changes do not reach, or in place."""
        assert name not in self._encoded, f"{name} is put twice"
        is_here = tensor.device.type == "cpu"
        buffer = host_bytes(tensor, is_copied=not self._is_in_place) if is_here else self._memory.copy(tensor)
        dtype = SAFETENSORS_DTYPES[tensor.dtype]
        entry = Tensor(name=name, dtype=dtype, shape=tensor.shape, size_bytes=len(buffer))
        self._inputs[name] = (entry, buffer, tensor.element_size())
        self._encoded[name] = self._threads.submit(self._encode, *self._inputs[name])

    def finish(self, order: Iterable[str] | None = None, world: World = ALONE) -> Snapshot:
        """Encode what the threads have not begun, and wait for them, after all tensors are put. `order`: of the
        manifest's tensors; default: as put.

        In a `world` of several ranks, each puts its own run of the tensors, ascending by rank: its shard. All must
        call this.
        """
        here = {
            name: self._encode(*self._inputs[name]) for name in reversed(self._encoded) if self._encoded[name].cancel()
        }
        names = self._encoded if order is None else order
        encoded = [here[name] if name in here else self._encoded[name].result() for name in names]
        self._threads.shutdown()
        manifest = join_shards(self._version, [tensor.entry for tensor in encoded], world)
        change = None
        if self._base is not None and self._base.manifest.layout == manifest.layout:
            key = PayloadKey(self._version, self._base.policy_version, world.rank)
            indexed = enumerate(encoded, manifest.shards[world.rank].start)
            changed = [(index, tensor) for index, tensor in indexed if tensor.encoding is not delta.Encoding.UNCHANGED]
            plan = Plan.of((index, tensor.encoding, len(tensor.change)) for index, tensor in changed)
            change = Payload(key, plan, [tensor.change for _, tensor in changed])
        buffers, encode_s = tuple(tensor.buffer for tensor in encoded), sum(tensor.seconds for tensor in encoded)
        return Snapshot(manifest, buffers, world.rank, change, encode_s, self._started_at, self._memory)

    def _encode(self, entry: Tensor, buffer: memoryview, item_bytes: int) -> Encoded:
        started = time.monotonic()
        entry.digest, entry.checksum = blake3(buffer).digest(), xxh3_128_digest(buffer)
        encoding, change = delta.Encoding.RAW, buffer
        held, base = self._held.pop(entry.name, (None, None))
        if held is not None and held.size_bytes == len(buffer):
            if held.digest == entry.digest:
                encoding, change = delta.Encoding.UNCHANGED, buffer[:0]
            else:
                encoding, encoded = delta.encode(base, buffer, item_bytes)
                change = memoryview(encoded)
        return Encoded(entry, buffer, encoding, change, time.monotonic() - started)


def join_shards(version: int, entries: list[Tensor], world: World) -> Manifest:
    """Join the entries of all ranks into one manifest."""
    entries_of_rank = GetManifestResponse(tensors=entries).SerializeToString()
    shards = [GetManifestResponse.FromString(message).tensors for message in world.all_gather_bytes(entries_of_rank)]
    *starts, _ = accumulate(len(shard) for shard in shards)
    return Manifest(version, tuple(tensor for shard in shards for tensor in shard), tuple(starts))


def split_evenly(sizes: list[int], num_shards: int) -> list[range]:
    """Split into consecutive runs of about equally many bytes, one for each shard; some may be empty.

    >>> split_evenly([5, 1, 1, 1, 4, 4], 2)
    [range(0, 4), range(4, 6)]
    """
    ends = list(accumulate(sizes))
    shards = [
        min(num_shards - 1, (2 * end - size) * num_shards // (2 * ends[-1]))
        for end, size in zip(ends, sizes, strict=True)
    ]
    return [range(bisect_left(shards, shard), bisect_left(shards, shard + 1)) for shard in range(num_shards)]


def take_snapshot(
    version: int,
    tensors: Iterable[tuple[str, torch.Tensor]],
    order: Iterable[str] | None = None,
    world: World = ALONE,
    base: Snapshot | None = None,
) -> Snapshot:
    """Copy the tensors to host memory, with their digests and the delta from `base`. See `SnapshotWriter`."""
    writer = SnapshotWriter(version, base)
    for name, tensor in tensors:
        writer.put(name, tensor)
    return writer.finish(order, world)


def num_served(config: JobConfig) -> int:
    """Return how many versions rollouts may ask for: those of open iterations, and one that is still evaluated."""
    return config.max_staleness + 1 + (config.evaluation is not None)


class WeightStore:
    """The store that the training thread writes and the weight server's thread reads.

    The newest `num_kept` versions are kept in full. The newest delta is kept if it is smaller than a full copy, and
    older ones while all together are smaller than half of one: a longer chain saves a late rollout little and costs
    this process memory. Both sizes are those of all shards, so that every rank of a sharded model keeps the same
    deltas.
    """

    def __init__(self, num_kept: int = 2) -> None:
        self._num_kept = num_kept
        self._snapshots: dict[int, Snapshot] = {}
        self._deltas: dict[int, tuple[Step, Payload]] = {}  # deltas of this shard, by the version that they lead to
        self._lock = threading.Lock()

    def add(self, snapshot: Snapshot, delta_bytes: int | None = None) -> None:
        """Add a version. `delta_bytes`: of the deltas of all shards; by default the version is in one piece."""
        with self._lock:
            self._snapshots[snapshot.policy_version] = snapshot
            for old in sorted(self._snapshots)[: -self._num_kept]:
                del self._snapshots[old]
            if snapshot.delta is not None:
                key = snapshot.delta.key
                assert key.base_version is not None
                size_bytes = snapshot.delta.plan.size_bytes if delta_bytes is None else delta_bytes
                step = Step(policy_version=key.policy_version, base_version=key.base_version, size_bytes=size_bytes)
                self._deltas[key.policy_version] = step, snapshot.delta
            self._drop_deltas(snapshot.manifest.size_bytes)

    def _drop_deltas(self, full_bytes: int) -> None:
        total, limit = 0, full_bytes
        for version in sorted(self._deltas, reverse=True):
            step, _ = self._deltas[version]
            total += step.size_bytes
            if total >= limit:
                del self._deltas[version]
            limit = full_bytes // 2

    async def withdraw(self) -> None:
        """Give up all versions, whose bytes are about to change, and the deltas that contain some of these bytes. The
        streams of their pullers end. Call this on the loop of those streams."""
        with self._lock:
            payloads = [snapshot.full for snapshot in self._snapshots.values()]
            self._snapshots.clear()
            for version, (_, change) in list(self._deltas.items()):
                if any(delta.Encoding(entry.encoding) is delta.Encoding.RAW for entry in change.plan.entries):
                    payloads.append(change)
                    del self._deltas[version]
        for payload in payloads:
            payload.give_up("the next version is made in its place")

    def get(self, version: int) -> Snapshot | None:
        with self._lock:
            return self._snapshots.get(version)

    def newest(self) -> Snapshot | None:
        with self._lock:
            return self._snapshots[max(self._snapshots)] if self._snapshots else None

    def versions(self) -> list[int]:
        with self._lock:
            return sorted(self._snapshots)

    def steps(self, base_version: int, version: int) -> tuple[Step, ...]:
        """Return the deltas from the base to the version if all are here and smaller than the whole; else ()."""
        steps: list[Step] = []
        with self._lock:
            size = self._snapshots[version].manifest.size_bytes if version in self._snapshots else 0
            while version > base_version and version in self._deltas:
                step, _ = self._deltas[version]
                steps.insert(0, step)
                version = step.base_version
        is_worth_it = version == base_version and sum(step.size_bytes for step in steps) < size
        return tuple(steps) if is_worth_it else ()

    async def payload(self, key: PayloadKey) -> Payload | None:
        """Return the payload or None, as `onbeat.weights.server.PayloadOwner` describes."""
        with self._lock:
            if key.base_version is None:
                snapshot = self._snapshots.get(key.policy_version)
                return None if snapshot is None or snapshot.shard != key.shard else snapshot.full
            _, change = self._deltas.get(key.policy_version, (None, None))
            return change if change is not None and change.key == key else None


def host_bytes(tensor: torch.Tensor, is_copied: bool = True) -> memoryview:
    """Return the tensor's bytes, row-major, little-endian: a private copy, or, if not `is_copied`, the tensor's own
    memory where it is on the host and contiguous."""
    whole = tensor.detach().to("cpu", copy=is_copied).contiguous()
    return whole.reshape(-1).view(torch.uint8).numpy().data.toreadonly()
