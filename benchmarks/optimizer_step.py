"""An optimizer step of the quick start's model, against a copy of the bytes that a step must move.

A step begins when all gradients have added up: it rescales and clips them, and steps every bucket. It must read the
gradients twice (for their norm, and for AdamW), read and write masters and both moments, and write the parameters. The
copy reads and writes as many bytes together, on the same threads; so does a pass that changes a tensor in place, which
is faster, since memory that a copy overwrites is read first. All take turns. The goal: at most 1.3 times as long as the
copy. As in the trainer, freed memory is kept.
"""

import os
import statistics
import sys

import torch
from harness import command_line, own_dtype, quickstart_model, save, seconds, start

from onbeat.config import OptimizerConfig
from onbeat.machine.malloc import KEEP_FREED
from services.trainer.model.model import DTYPES, load_model
from services.trainer.model.optimizer import MasterAdamW

NUM_TOKENS = 3.0
NUM_THREADS = 2
REPETITIONS = 15
GOAL = 1.3
FLOAT32 = 4  # bytes


def make_gradients(optimizer: MasterAdamW, seed: int) -> None:
    torch.manual_seed(seed)
    for gradient in optimizer.gradients().values():
        gradient.normal_(std=0.01)  # the norm is above the limit: they are clipped


def take_step(optimizer: MasterAdamW) -> None:
    optimizer.rescale(NUM_TOKENS)
    optimizer.clip()
    optimizer.step()


def moved_bytes(optimizer: MasterAdamW) -> int:
    """Return the bytes that a step must read and write."""
    num_masters = sum(master.numel() for master in optimizer.masters.values())
    written = sum(
        parameter.nbytes for name, parameter in optimizer.parameters.items() if parameter is not optimizer.masters[name]
    )
    return num_masters * FLOAT32 * (2 + 3 * 2) + written


def main() -> None:
    if os.environ.get("GLIBC_TUNABLES") != KEEP_FREED:  # it is read when a process is started
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"GLIBC_TUNABLES": KEEP_FREED})
    torch.set_num_threads(NUM_THREADS)
    optimizer = MasterAdamW(
        load_model(str(quickstart_model()), DTYPES[own_dtype()], torch.device("cpu")), OptimizerConfig()
    )
    num_bytes = moved_bytes(optimizer)
    source = torch.randn(num_bytes // 2 // FLOAT32)
    target = torch.empty_like(source)
    turns = []
    for turn in range(REPETITIONS + 1):
        make_gradients(optimizer, turn)
        turns.append((seconds(take_step, optimizer), seconds(target.copy_, source), seconds(source.neg_)))
    step_s, copy_s, in_place_s = (statistics.median(values) for values in zip(*turns[1:], strict=True))
    measured = {
        "step_s": step_s,
        "copy_s": copy_s,
        "in_place_s": in_place_s,
        "times_copy": statistics.median(step / copy for step, copy, _ in turns[1:]),
        "times_in_place": statistics.median(step / in_place for step, _, in_place in turns[1:]),
        "moved_bytes": num_bytes,
    }
    save("optimizer_step", {"num_threads": NUM_THREADS, "goal": f"times_copy <= {GOAL}", **measured}, own_dtype())


if __name__ == "__main__":
    start(command_line(__doc__))
    main()
