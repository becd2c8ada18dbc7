"""Checks of a tensor: by its digest; without a ledger, by the checksum for bytes from the trainer that named them.

`forged` bytes stand for a collision: the manifest has their checksum and the digest of the true ones.
"""

import asyncio
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
import torch
from xxhash import xxh3_128_digest

from onbeat.contracts.errors import WeightsError
from onbeat.weights.client import Itinerary
from onbeat.weights.host import full_plan
from onbeat.weights.wire import PayloadKey, Peer, Step, Tensor
from services.rollout.puller import WeightsPuller
from services.trainer.weights.store import take_snapshot

TRAINER, RELAY, PEER = "trainer:1", "relay:2", "peer:3"
SIZE_A, SIZE_B = 4000, 2000  # bytes of the tensors
SIZE = SIZE_A + SIZE_B
SOON_S = 10.0


def weights():
    generator = torch.Generator().manual_seed(0)
    sizes = {"a": SIZE_A, "b": SIZE_B}
    return {name: torch.randn(size // 2, generator=generator).bfloat16() for name, size in sizes.items()}


def content_of(snapshot):
    return b"".join(bytes(buffer) for buffer in snapshot.buffers)


def inverted(start, end):
    return TRUE[:start] + bytes(255 ^ byte for byte in TRUE[start:end]) + TRUE[end:]


def with_checksums(manifest, checksums):
    """Return the manifest with these checksums, but with its own digests."""
    tensors = tuple(Tensor.FromString(tensor.SerializeToString()) for tensor in manifest.tensors)
    for tensor, checksum in zip(tensors, checksums, strict=True):
        tensor.checksum = checksum
    return replace(manifest, tensors=tensors)


def with_checksums_of(manifest, content):
    parts = [content[start:end] for start, end in pairwise(manifest.starts)]
    return with_checksums(manifest, map(xxh3_128_digest, parts))


SNAPSHOT = take_snapshot(1, weights().items())
TRUE = content_of(SNAPSHOT)
FORGED = inverted(0, SIZE_A)  # all of the first tensor
COLLIDING = with_checksums_of(SNAPSHOT.manifest, FORGED)


@dataclass
class Sent:
    """Bytes that a source sends of a payload before it breaks."""

    address: str
    content: bytes
    end: int = SIZE


@dataclass
class Network:
    """A trainer, and who else is named: for each payload its sources one after the other, and its plan."""

    itineraries: list[Itinerary]
    sources: dict[PayloadKey, list[Sent]]
    plans: dict = field(default_factory=dict)  # plans of deltas
    now: dict = field(default_factory=dict)

    def connect(self, address):
        return At(self, address)


@dataclass(eq=False)
class At:
    """See `WeightsClient`."""

    network: Network
    address: str

    async def itinerary(self, version, base_version=None):
        first, *later = self.network.itineraries
        self.network.itineraries = later or [first]
        return first

    async def locate(self, key, puller, failed):
        if not self.network.sources[key]:
            raise WeightsError("no source is left")
        sent = self.network.now[key] = self.network.sources[key].pop(0)
        return sent.address

    async def pull(self, key, offset_bytes=0, slowest_s=0.0):
        sent = self.network.now[key]
        assert sent.address == self.address
        yield self.network.plans.get(key) or full_plan(self.network.itineraries[0].manifest, key.shard)
        await asyncio.sleep(0)
        if sent.content[offset_bytes : sent.end]:
            yield memoryview(sent.content)[offset_bytes : sent.end]
        if sent.end < len(sent.content):
            raise WeightsError("it breaks")

    async def finish(self, key, worker_id, is_complete):
        pass

    async def close(self):
        pass


@pytest.fixture
async def pulled():
    """Pulls a version over a network, in which it has one copy: what that holds then, and the pull."""
    pullers = {}

    async def find_trainer():
        return TRAINER

    async def pull(network, version=1, find_digest=None, deadline_s=SOON_S):
        if id(network) not in pullers:
            peer = Peer(worker_id="r0")
            pullers[id(network)] = WeightsPuller(network.connect, find_trainer, peer, find_digest=find_digest)
        puller = pullers[id(network)]
        pull = puller.start(version, deadline_s)
        async with asyncio.timeout(SOON_S):
            await pull.complete()
        return bytes(puller.host.data), pull

    yield pull
    for puller in pullers.values():
        await puller.close()


def in_full(*sent, manifest=COLLIDING):
    return Network([Itinerary(manifest)], {PayloadKey(1): list(sent)})


# ---- from the trainer ------------------------------------------------------------------------------------------------


async def in_the_ledger(version):
    return SNAPSHOT.manifest.digest.hex()


BREAKS, WRONG_DIGEST = "it breaks", "a of version 1 does not match its digest"


def corrupt(position):
    sent = [Sent(TRAINER, inverted(position, position + 1)), Sent(TRAINER, TRUE)]
    return sent, SNAPSHOT.manifest, None, TRUE, ["of version 1 does not match its checksum"]


def mixed(*sent):
    """Return a row whose forged bytes are not all the trainer's: only what agrees with the digest is taken."""
    faults = [BREAKS if part.end < SIZE else WRONG_DIGEST for part in sent]
    return [*sent, Sent(PEER, TRUE)], COLLIDING, None, TRUE, faults


@pytest.mark.parametrize(
    ("sent", "manifest", "find_digest", "held", "faults"),
    [
        pytest.param([Sent(TRAINER, FORGED)], COLLIDING, None, FORGED, [], id="checksum alone"),
        pytest.param(
            [Sent(TRAINER, FORGED, end=100), Sent(TRAINER, FORGED)], COLLIDING, None, FORGED, [BREAKS], id="resumed"
        ),
        pytest.param(*corrupt(0), id="corrupt first byte"),
        pytest.param(*corrupt(SIZE_A - 1), id="corrupt end of a"),
        pytest.param(*corrupt(SIZE_A), id="corrupt start of b"),
        pytest.param(*corrupt(SIZE - 1), id="corrupt last byte"),
        pytest.param(
            [Sent(TRAINER, FORGED), Sent(TRAINER, TRUE)],
            with_checksums(SNAPSHOT.manifest, [b"", b""]),
            None,
            TRUE,
            [WRONG_DIGEST],
            id="no checksums",
        ),
        # The manifest has the ledger's digest, and checksums of whoever sent it: they are no proof.
        pytest.param(
            [Sent(TRAINER, FORGED), Sent(PEER, TRUE)], COLLIDING, in_the_ledger, TRUE, [WRONG_DIGEST], id="ledger"
        ),
        pytest.param(*mixed(Sent(RELAY, FORGED)), id="relay"),
        pytest.param(*mixed(Sent(RELAY, FORGED, end=1), Sent(TRAINER, FORGED)), id="relay's first byte"),
        pytest.param(*mixed(Sent(TRAINER, FORGED, end=SIZE_A - 1), Sent(RELAY, FORGED)), id="relay's last byte"),
        pytest.param(
            *mixed(Sent(TRAINER, FORGED, end=1), Sent(RELAY, FORGED, end=2), Sent(TRAINER, FORGED)),
            id="relay's byte between",
        ),
        pytest.param(*mixed(Sent(RELAY, FORGED, end=0), Sent(TRAINER, FORGED)), id="relay's plan"),
        pytest.param(*mixed(Sent(RELAY, FORGED), Sent(TRAINER, FORGED)), id="all, and then all from the trainer"),
    ],
)
async def test_checksums_count_for_bytes_of_the_trainer_alone(pulled, sent, manifest, find_digest, held, faults):
    held_in_the_end, pull = await pulled(in_full(*sent, manifest=manifest), find_digest=find_digest)
    assert held_in_the_end == held
    assert len(pull.stats.faults) == len(faults)
    assert all(fault in noted for fault, noted in zip(faults, pull.stats.faults, strict=True))


async def test_damaged_checksum_fails_pulls_until_a_whole_manifest(pulled):
    damaged = with_checksums_of(SNAPSHOT.manifest, inverted(0, SIZE))
    network = in_full(Sent(TRAINER, TRUE), Sent(TRAINER, TRUE), Sent(TRAINER, TRUE), manifest=damaged)
    network.itineraries.append(Itinerary(SNAPSHOT.manifest))
    held, pull = await pulled(network)
    assert held == TRUE
    assert all("does not match its checksum" in fault for fault in pull.stats.faults)


def test_digest_of_a_version_covers_weights_and_not_checksums():
    """Jobs record it, and a replay by another release is compared with it."""
    assert COLLIDING.digest == SNAPSHOT.manifest.digest


# ---- with the ledger's digest ----------------------------------------------------------------------------------------


async def test_weights_of_another_digest_than_the_ledgers_are_refused(pulled):
    zeros = take_snapshot(1, [(name, torch.zeros_like(tensor)) for name, tensor in weights().items()])
    network = in_full(Sent(TRAINER, content_of(zeros)), manifest=zeros.manifest)
    with pytest.raises(WeightsError, match="trainer:1 answers with other weights than the trainer has announced"):
        await pulled(network, find_digest=in_the_ledger, deadline_s=0.0)


async def test_version_is_not_believed_before_its_announcement(pulled):
    announced = ["", SNAPSHOT.manifest.digest.hex()]

    async def find_digest(version):
        return announced.pop(0)

    held, pull = await pulled(in_full(Sent(TRAINER, TRUE), manifest=SNAPSHOT.manifest), find_digest=find_digest)
    assert held == TRUE
    assert "has not announced policy version 1 in the ledger yet" in pull.stats.faults[0]


# ---- from anybody else -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forged", ["a", "b"])
async def test_only_the_trainers_own_shard_is_checked_by_checksums(pulled, forged):
    start, end = (0, SIZE_A) if forged == "a" else (SIZE_A, SIZE)
    content = inverted(start, end)
    manifest = with_checksums_of(replace(SNAPSHOT.manifest, shard_starts=(1,)), content)
    other_rank = [Sent("rank:1", content[SIZE_A:]), Sent(PEER, TRUE[SIZE_A:])]
    sources = {PayloadKey(1): [Sent(TRAINER, content[:SIZE_A])], PayloadKey(1, None, 1): other_rank}
    held, pull = await pulled(Network([Itinerary(manifest)], sources))
    assert held == (FORGED if forged == "a" else TRUE)
    assert ["b of version 1 does not match its digest" in fault for fault in pull.stats.faults] == [True] * (
        forged == "b"
    )


# ---- a chain of deltas -----------------------------------------------------------------------------------------------


def moved(tensors, names, places):
    after = {name: tensor.clone() for name, tensor in tensors.items()}
    for name in names:
        after[name][places] *= 1.5
    return after


def chain(first_from, then_from, then_changes):
    """Version 0 is held; two true steps lead to 2, whose checksum of `a` is damaged. Also the bytes of version 2."""
    tensors = [weights()]
    tensors += [moved(tensors[0], ["a"], slice(0, 20))]
    tensors += [moved(tensors[1], then_changes, slice(50, 90))]
    snapshots = [take_snapshot(0, tensors[0].items())]
    snapshots += [take_snapshot(1, tensors[1].items(), base=snapshots[0])]
    snapshots += [take_snapshot(2, tensors[2].items(), base=snapshots[1])]
    base, newest = snapshots[0].manifest, snapshots[2].manifest
    damaged = with_checksums(newest, [bytes(16), newest.tensors[1].checksum])
    steps = (Step(policy_version=1, base_version=0), Step(policy_version=2, base_version=1))
    sources, plans = {PayloadKey(0): [Sent(TRAINER, content_of(snapshots[0]))]}, {}
    for address, change in ((first_from, snapshots[1].delta), (then_from, snapshots[2].delta)):
        size = change.plan.size_bytes
        sources[change.key], plans[change.key] = [Sent(address, b"".join(change.slices(0, size)), size)], change.plan
    sources[PayloadKey(2)] = [Sent(PEER, content_of(snapshots[2]))]  # the try after one that fails is in full
    network = Network([Itinerary(base), Itinerary(damaged, steps), Itinerary(newest)], sources, plans)
    return network, content_of(snapshots[2])


@pytest.mark.parametrize("then_changes", [["b"], ["a"], ["a", "b"]])
@pytest.mark.parametrize("first_from", [TRAINER, RELAY])
@pytest.mark.parametrize("then_from", [TRAINER, RELAY])
async def test_checksums_count_if_every_step_is_the_trainers(pulled, first_from, then_from, then_changes):
    network, true = chain(first_from, then_from, then_changes)
    await pulled(network, 0)
    held, pull = await pulled(network, 2)
    assert held == true
    is_checked_by_checksum = (first_from, then_from) == (TRAINER, TRAINER)
    assert ["a of version 2 does not match its checksum" in fault for fault in pull.stats.faults] == [
        True
    ] * is_checked_by_checksum
