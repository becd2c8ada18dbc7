"""The way from an optimizer step to a version that rollouts can pull: copies to the host, the snapshot, what overlaps.

The copy is timed as the trainer does it, into memory of an older version, and into pinned memory. Digests (BLAKE3),
checksums (XXH3) and deltas are made by threads of the trainer while the device is at the next parameters; what one core
does of them in a second is measured by weights_pull.py and delta_codec.py.
"""

import time
from functools import partial

import torch
from xxhash import xxh3_128_digest

from onbeat.config import OptimizerConfig
from onbeat.weights import delta
from services.trainer.model.optimizer import MasterAdamW
from services.trainer.weights.store import HostMemory, Snapshot, SnapshotWriter, take_snapshot

from .models import random_model
from .part import Findings, Place, run_part

LEARNING_RATE = 1e-6


def measure(place: Place, findings: Findings) -> None:
    size = "tiny" if place.is_tiny else "1.5B"
    model = random_model(size, place.device, torch.bfloat16)
    optimizer = MasterAdamW(model, OptimizerConfig(learning_rate=LEARNING_RATE))
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in optimizer.parameters.values())
    findings.figure(f"{size}: published bytes", bytes=num_bytes)
    time_copies(max(optimizer.parameters.values(), key=torch.Tensor.numel), place, findings)
    give_gradients(optimizer)
    optimizer.step()  # the first one makes the moments
    place.synchronize()
    started = time.perf_counter()
    snapshot = take_snapshot(0, optimizer.parameters.items())
    findings.figure("a first snapshot, nothing else to do", seconds=time.perf_counter() - started)
    time_step_and_snapshot(optimizer, snapshot, place, findings)


def give_gradients(optimizer: MasterAdamW) -> None:
    for master in optimizer.masters.values():
        master.grad = torch.randn_like(master)


def time_copies(tensor: torch.Tensor, place: Place, findings: Findings) -> None:
    num_bytes = tensor.numel() * tensor.element_size()
    rates = {"as_the_trainer": num_bytes / place.seconds(partial(HostMemory().copy, tensor), 3) / 1e9}
    if not place.is_tiny:
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        rates["pinned"] = num_bytes / place.seconds(lambda: pinned.copy_(tensor.detach(), non_blocking=True), 3) / 1e9
    findings.figure("copy to the host, GB/s", bytes=num_bytes, **rates)


def time_step_and_snapshot(optimizer: MasterAdamW, base: Snapshot, place: Place, findings: Findings) -> None:
    """Time the step alone, the snapshot after it, then both as the trainer does them."""
    give_gradients(optimizer)
    place.synchronize()
    started = time.perf_counter()
    optimizer.step()
    place.synchronize()
    step_s = time.perf_counter() - started
    started = time.perf_counter()
    before = take_snapshot(1, optimizer.parameters.items(), base=base)
    snapshot_s = time.perf_counter() - started
    give_gradients(optimizer)
    place.synchronize()
    writer = SnapshotWriter(2, before)
    started = time.perf_counter()
    optimizer.begin_step()
    for bucket in optimizer.buckets:
        optimizer.step_bucket(bucket)
        for name in bucket.names:
            writer.put(name, optimizer.parameters[name])
    written_s = time.perf_counter() - started
    snapshot = writer.finish()
    both_s = time.perf_counter() - started
    assert snapshot.delta is not None
    findings.figure(
        f"a step at learning rate {LEARNING_RATE:g} and its snapshot",
        step_alone_s=step_s,
        snapshot_alone_s=snapshot_s,
        both_as_the_trainer_s=both_s,
        of_it_after_the_step_s=both_s - written_s,
        share_of_the_shorter_that_overlaps=(step_s + snapshot_s - both_s) / min(step_s, snapshot_s),
        encoding_thread_s=snapshot.encode_s,
        delta_share_of_bytes=snapshot.delta.plan.size_bytes / snapshot.manifest.size_bytes,
    )
    check_delta(before, snapshot, findings)


def check_delta(before: Snapshot, after: Snapshot, findings: Findings) -> None:
    """Check that each tensor's delta, applied to the version before, gives this version's bits."""
    wrong = []
    for entry, old, new in zip(after.entries, before.buffers, after.buffers, strict=True):
        encoding, change = delta.encode(old, new, 2)
        target = bytearray(old)
        delta.apply(encoding, change, target, 2)
        if bytes(target) != bytes(new) or xxh3_128_digest(target) != entry.checksum:
            wrong.append(entry.name)
    findings.check(f"{len(after.entries)} deltas give the new bits", not wrong, wrong=wrong)


if __name__ == "__main__":
    run_part(measure)
