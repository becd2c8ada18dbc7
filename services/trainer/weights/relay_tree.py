"""The distribution tree of each version: it grows with its pullers, so that no link carries much more than one copy.

    trainer --> rollout-0 --> rollout-1 --> rollout-2    egress 1, fan-out 1: a pipelined chain, one copy on each link
                                        `-> rollout-3    on the machine of rollout-1: any number

A puller becomes a source as soon as it has asked, because a relay passes on data while it is still receiving. The
nearest source is chosen: the same machine, then the same zone, then the least deep.
"""

import time
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import lru_cache

from onbeat.process.network import host_of, is_loopback
from onbeat.weights.wire import PayloadKey, Peer

UNSPECIFIED = ("0.0.0.0", "::")  # addresses of a server that listens everywhere
SLOT_S = 600.0  # a puller that never reports its finish holds its source's slot for this long
FORGET_S = 3600.0  # a worker that has asked for nothing for this long is no longer a source
ROOT = ""  # the trainer, among worker ids


@dataclass
class Holder:
    """A worker that has payloads, or is getting them."""

    peer: Peer
    keys: set[PayloadKey] = field(default_factory=set)
    policy_version: int = 0  # the version of its keys
    heard_at: float = 0.0
    is_suspect: bool = False  # a puller reported that it did not deliver; reset by its next request


@dataclass
class Slot:
    key: PayloadKey
    source: str  # worker id
    until: float


class Sources:
    """The choice of sources; used on the weight server's event loop only. `egress`: pulls that the trainer serves to
    other machines at a time for each shard; `fanout`: the same for a rollout."""

    def __init__(self, roots: list[Peer], egress: int = 1, fanout: int = 1) -> None:
        self._roots = roots  # roots by shard
        self._egress, self._fanout = egress, fanout
        self._holders: dict[str, Holder] = {}
        self._slots: dict[tuple[str, int], Slot] = {}  # slots by puller and shard

    @property
    def num_shards(self) -> int:
        return len(self._roots)

    def locate(self, key: PayloadKey, puller: Peer, failed: set[str]) -> str:
        """Return the address that `puller` gets the payload from: never one that it feeds itself, and of `failed`
        addresses only the trainer's."""
        shard = key.shard
        self._slots.pop((puller.worker_id, shard), None)
        self._hear(puller, key, failed)
        fed, loads = self._fed_by(puller.worker_id, shard), self._loads(shard)
        able = [name for name, holder in self._holders.items() if self._may_feed(holder, key, puller, failed)]
        candidates = [name for name in able if name not in fed] + [ROOT]
        free = [name for name in candidates if self._has_room(name, shard, puller, loads)]
        if free:
            chosen = min(free, key=lambda name: (distance(self._peer(name, shard), puller), self._depth(name, shard)))
        else:
            chosen = min(candidates, key=lambda name: loads[name])
        self._slots[puller.worker_id, shard] = Slot(key, chosen, time.monotonic() + SLOT_S)
        return self._peer(chosen, shard).address

    def finish(self, key: PayloadKey, worker_id: str, is_complete: bool) -> None:
        """Free the puller's slot. `is_complete`: it holds this shard of the version in full."""
        slot, holder = self._slots.get((worker_id, key.shard)), self._holders.get(worker_id)
        if slot is not None and slot.key == key:
            del self._slots[worker_id, key.shard]
        # Before this report arrived, the worker may have moved on to another version or payload.
        if holder is None or holder.policy_version != key.policy_version or (slot is not None and slot.key != key):
            return
        if is_complete:
            holder.keys.add(replace(key, base_version=None))
        else:
            holder.keys.discard(key)

    def forget(self, worker_id: str) -> None:
        """Remove a worker that has left or is dead; if it returns, it is a new one."""
        self._holders.pop(worker_id, None)
        for taken in [taken for taken in self._slots if taken[0] == worker_id]:
            del self._slots[taken]

    def _hear(self, puller: Peer, key: PayloadKey, failed: set[str]) -> None:
        """Record that the puller is alive and moves on to this payload: it drops its other payloads of this shard, and
        other versions of the other shards. Holders that it reports as `failed` become suspect."""
        holder = self._holders.setdefault(puller.worker_id, Holder(puller))
        now = time.monotonic()
        holder.peer, holder.is_suspect, holder.heard_at = puller, False, now
        holder.policy_version = key.policy_version
        for worker_id in [worker_id for worker_id, other in self._holders.items() if other.heard_at < now - FORGET_S]:
            self.forget(worker_id)
        kept = {held for held in holder.keys if held.policy_version == key.policy_version and held.shard != key.shard}
        holder.keys = kept | {key}
        for other in self._holders.values():
            if other.peer.address in failed and other is not holder:
                other.is_suspect = True

    def _may_feed(self, holder: Holder, key: PayloadKey, puller: Peer, failed: set[str]) -> bool:
        address = holder.peer.address
        is_reachable = bool(address) and (not is_ambiguous(address) or distance(holder.peer, puller) == 0)
        return key in holder.keys and is_reachable and not holder.is_suspect and address not in failed

    def _fed_by(self, ancestor: str, shard: int) -> set[str]:
        """Return the worker and those whose bytes come from it."""
        children: dict[str, list[str]] = {}
        for (worker_id, taken_shard), slot in self._slots.items():
            if taken_shard == shard:
                children.setdefault(slot.source, []).append(worker_id)
        fed, waiting = {ancestor}, [ancestor]
        while waiting:
            pullers = children.get(waiting.pop(), [])
            fed.update(pullers)
            waiting += pullers
        return fed

    def _loads(self, shard: int) -> Counter[str]:
        """Count the pulls that each source serves to other machines now."""
        now, loads = time.monotonic(), Counter[str]()
        for (worker_id, taken_shard), slot in self._slots.items():
            holder = self._holders.get(worker_id)
            is_on = taken_shard == shard and slot.until > now and (slot.source == ROOT or slot.source in self._holders)
            if not is_on or holder is None or holder.is_suspect:
                continue
            if distance(self._peer(slot.source, shard), holder.peer) > 0:
                loads[slot.source] += 1
        return loads

    def _has_room(self, worker_id: str, shard: int, puller: Peer, loads: Counter[str]) -> bool:
        limit = self._egress if worker_id == ROOT else self._fanout
        return loads[worker_id] < limit or distance(self._peer(worker_id, shard), puller) == 0

    def _depth(self, worker_id: str, shard: int) -> int:
        depth = 0
        while (slot := self._slots.get((worker_id, shard))) is not None:
            worker_id, depth = slot.source, depth + 1
        return depth

    def _peer(self, worker_id: str, shard: int) -> Peer:
        return self._roots[shard] if worker_id == ROOT else self._holders[worker_id].peer


def distance(source: Peer, puller: Peer) -> int:
    """Return 0 for the same machine, 1 for the same zone, 2 for further away or unknown."""
    if source.host_id and source.host_id == puller.host_id:
        return 0
    return 1 if source.zone and source.zone == puller.zone else 2


@lru_cache(maxsize=10_000)
def is_ambiguous(address: str) -> bool:
    """Return whether `host:port` means a different machine on each machine: loopback, or no address at all."""
    host = host_of(address)
    return is_loopback(host) or host in UNSPECIFIED
