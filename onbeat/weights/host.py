"""The one copy of a job's weights on this host: a safetensors file in memory, moved from version to version in place.

    at version 7 --begin--> moving (holds no version; peers are told) --settle--> at version 8

Engines read the file, peers pull from it. It is anonymous memory: it needs no disk and no room in /dev/shm, and is gone
with the process. Where the system has none (macOS), it is a file in `folder`.
"""

import asyncio
import contextlib
import mmap
import os
from itertools import pairwise
from pathlib import Path

from onbeat.errors import WeightsError
from onbeat.weights.delta import HEADER_BYTES, Encoding
from onbeat.weights.framing import Manifest, safetensors_header
from onbeat.weights.payload import Payload, PayloadKey, Plan, PlanEntry

EXPECT_DEADLINE_S = 10.0  # for the plan of a payload that is on its way here


class HostWeights:
    """Lives on one event loop, except `tensor` and `data`, which any thread may read and the puller's may write."""

    def __init__(self, layout: Manifest, folder: Path) -> None:
        """Room for tensors of this layout; it holds no version yet. Raises WeightsError when there is none."""
        self.manifest: Manifest | None = None  # of the version that it holds, whole and verified
        self.has_held = False  # any version, ever: engines know its path then
        self.layout = layout
        header = safetensors_header(layout)
        size = len(header) + layout.size_bytes
        if hasattr(os, "memfd_create"):
            self._fd = os.memfd_create("onbeat-weights")
            self.path = Path(f"/proc/{os.getpid()}/fd/{self._fd}")
        else:
            self.path = folder / "weights.safetensors"
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.truncate(self._fd, size)
            self._map = mmap.mmap(self._fd, size)
        except (OSError, OverflowError) as error:
            os.close(self._fd)
            raise WeightsError(f"there is no room for weights of {size} bytes: {error}") from error
        self._map[: len(header)] = header
        self.data = memoryview(self._map)[len(header) :]
        self._payloads: dict[PayloadKey, asyncio.Future[Payload]] = {}

    @property
    def version(self) -> int | None:
        return None if self.manifest is None else self.manifest.policy_version

    def tensor(self, index: int) -> memoryview:
        return self.data[self.layout.starts[index] : self.layout.starts[index + 1]]

    # ---- moving ------------------------------------------------------------------------------------------------------

    def begin(self, reason: str) -> None:
        """From now on no version is held; whoever still pulls the old one is told."""
        self.manifest = None
        for coming in self._payloads.values():
            if not coming.done():
                coming.cancel()
            elif not coming.cancelled():
                coming.result().give_up(reason)
        self._payloads.clear()

    def settle(self, manifest: Manifest) -> None:
        """All tensors are verified to be the manifest's."""
        self.manifest, self.has_held = manifest, True
        for shard in range(len(manifest.shards)):
            self.offer(manifest, shard)

    def offer(self, manifest: Manifest, shard: int) -> None:
        """The shard's tensors are verified to be the manifest's: peers may have them, however they came here."""
        key = PayloadKey(manifest.policy_version, None, shard)
        self.expect(key)
        self.open(key, full_plan(manifest, shard)).advance(len(self._room(shard)))

    def expect(self, key: PayloadKey) -> None:
        """It is about to be pulled: peers who ask for it wait."""
        if key not in self._payloads:
            self._payloads[key] = asyncio.get_running_loop().create_future()

    def open(self, key: PayloadKey, plan: Plan) -> Payload:
        """Where the payload is received; in full, its place. Raises WeightsError for an impossible plan."""
        check_plan(key, plan, self.layout)
        coming = self._payloads[key]
        if coming.done():
            return coming.result()
        is_full = key.base_version is None
        room = self._room(key.shard) if is_full else memoryview(bytearray(plan.size_bytes))
        payload = Payload(key, plan, [room], available=0)
        coming.set_result(payload)
        return payload

    def _room(self, shard: int) -> memoryview:
        tensors = self.layout.shards[shard]
        return self.data[self.layout.starts[tensors.start] : self.layout.starts[tensors.stop]]

    def drop(self, key: PayloadKey, reason: str) -> None:
        """It will not be had, or not these bytes of it."""
        coming = self._payloads.pop(key, None)
        if coming is not None and not coming.cancel() and not coming.cancelled():
            coming.result().give_up(reason)

    # ---- for peers ---------------------------------------------------------------------------------------------------

    async def payload(self, key: PayloadKey) -> Payload | None:
        """See `server.Holder`."""
        coming = self._payloads.get(key)
        if coming is None:
            return None
        await asyncio.wait({coming}, timeout=EXPECT_DEADLINE_S)
        return coming.result() if coming.done() and not coming.cancelled() else None

    def versions(self) -> list[int]:
        return [] if self.version is None else [self.version]

    def close(self) -> None:
        self.begin("its host is leaving")
        self.data.release()
        with contextlib.suppress(BufferError):  # a peer's stream still holds a slice; the memory goes with it
            self._map.close()
        os.close(self._fd)


def host_id() -> str:
    """The same for all processes of a machine, containers included; '' where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def full_plan(manifest: Manifest, shard: int) -> Plan:
    """Every tensor of the shard as it is."""
    tensors = manifest.shards[shard]
    return Plan(tuple(PlanEntry(index, Encoding.RAW, manifest.tensors[index].size_bytes) for index in tensors))


def check_plan(key: PayloadKey, plan: Plan, layout: Manifest) -> None:
    """Raises WeightsError unless the plan fits the shard: nobody makes us reserve more than a full copy."""
    if key.base_version is None:
        if plan.entries != full_plan(layout, key.shard).entries:
            raise WeightsError(f"{key}: the plan is of another model")
        return
    tensors = layout.shards[key.shard]
    indices = [entry.tensor_index for entry in plan.entries]
    if any(index not in tensors for index in indices) or any(a >= b for a, b in pairwise(indices)):
        raise WeightsError(f"{key}: the plan names tensors out of order or of another shard")
    if any(entry.size_bytes > layout.tensors[entry.tensor_index].size_bytes + HEADER_BYTES for entry in plan.entries):
        raise WeightsError(f"{key}: the plan has an encoded tensor that is larger than the tensor")
