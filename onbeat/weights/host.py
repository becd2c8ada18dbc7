"""The one copy of a job's weights on this host: a safetensors file in memory, moved from version to version in place.

    at version 7 --begin--> moving (holds no version; readers are informed) --settle--> at version 8

Engines read the file, peers pull from it. It is anonymous memory: it needs no disk space and no space in /dev/shm, and
ends with the process.
"""

import asyncio
import contextlib
import json
import mmap
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

from onbeat.contracts.errors import WeightsError
from onbeat.weights.delta import Encoding
from onbeat.weights.server import Payload
from onbeat.weights.wire import Manifest, PayloadKey, Plan

EXPECT_DEADLINE_S = 10.0  # time of a peer to wait for the plan of a payload that is on its way here


class HostWeights:
    """A host's copy of the weights. It lives on one event loop, except `tensor` and `data`: any thread may read them,
    and the puller's threads may write."""

    def __init__(self, layout: Manifest) -> None:
        """Reserve memory for this layout, without a version yet. Raise WeightsError if there is too little memory."""
        self.manifest: Manifest | None = None  # manifest of the version that is held, complete and verified
        self.has_held = False  # engines know the path once it has held a version
        self.layout = layout
        header = safetensors_header(layout)
        size = len(header) + layout.size_bytes
        self._fd = os.memfd_create("onbeat-weights")
        self.path = Path(f"/proc/{os.getpid()}/fd/{self._fd}")
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
        """Stop holding the version, and end the streams of peers that still pull it with this reason."""
        self.manifest = None
        for key in list(self._payloads):
            self.drop(key, reason)

    def settle(self, manifest: Manifest) -> None:
        """Start holding the manifest's version. All tensors have been verified."""
        self.manifest, self.has_held = manifest, True
        for shard in range(len(manifest.shards)):
            self.offer(manifest, shard)

    def release(self) -> None:
        """Give the memory back to the system; the copy holds no version until the next pull."""
        self.begin("its engine has read it")
        start = len(self._map) - len(self.data)  # the header stays
        start += -start % mmap.PAGESIZE
        if start < len(self._map):
            self._map.madvise(mmap.MADV_REMOVE, start, len(self._map) - start)

    def offer(self, manifest: Manifest, shard: int) -> None:
        """Serve a shard to peers, however it came here. Its tensors have been verified."""
        key = PayloadKey(manifest.policy_version, None, shard)
        self.expect(key)
        self.open(key, full_plan(manifest, shard)).advance(len(self._room(shard)))

    def expect(self, key: PayloadKey) -> None:
        """Announce a payload that is about to be pulled: peers that ask for it wait."""
        if key not in self._payloads:
            self._payloads[key] = asyncio.get_running_loop().create_future()

    def open(self, key: PayloadKey, plan: Plan) -> Payload:
        """Return the payload to receive into: in place if it is in full. Raise WeightsError for an impossible plan."""
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
        """Give up a payload that will not arrive, or whose bytes were wrong."""
        coming = self._payloads.pop(key, None)
        if coming is not None and not coming.cancel() and not coming.cancelled():
            coming.result().give_up(reason)

    # ---- for peers ---------------------------------------------------------------------------------------------------

    async def payload(self, key: PayloadKey) -> Payload | None:
        """Implement `server.PayloadOwner.payload`."""
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
        with contextlib.suppress(BufferError):  # a peer's stream still holds a slice; the memory is freed with it
            self._map.close()
        os.close(self._fd)


def host_id() -> str:
    """Return an id shared by all processes of a machine, containers included; '' where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
    except OSError:
        return ""


def full_plan(manifest: Manifest, shard: int) -> Plan:
    """Return the plan that sends every tensor of the shard unencoded."""
    tensors = manifest.shards[shard]
    return Plan.of((index, Encoding.RAW, manifest.tensors[index].size_bytes) for index in tensors)


def check_plan(key: PayloadKey, plan: Plan, layout: Manifest) -> None:
    """Check that the plan fits the shard, so that no peer can make us reserve more than a full copy.

    Raise WeightsError if it does not.
    """
    if key.base_version is None:
        if plan.entries != full_plan(layout, key.shard).entries:
            raise WeightsError(f"{key}: the plan is of another model")
        return
    tensors = layout.shards[key.shard]
    indices = [entry.tensor_index for entry in plan.entries]
    if any(index not in tensors for index in indices) or any(a >= b for a, b in pairwise(indices)):
        raise WeightsError(f"{key}: the plan names tensors out of order or of another shard")
    if any(entry.size_bytes > layout.tensors[entry.tensor_index].size_bytes for entry in plan.entries):
        raise WeightsError(f"{key}: the plan has an encoded tensor that is larger than the tensor")


def safetensors_header(manifest: Manifest) -> bytes:
    """Return the header of a safetensors file that holds the manifest's tensors back to back, padded to 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for tensor, (start, end) in zip(manifest.tensors, pairwise(manifest.starts), strict=True):
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
