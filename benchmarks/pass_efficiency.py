"""The trainer's pass against the peak of the cores: forward and backward of a packed row of the quick start.

The operations are those that PyTorch counts in the pass's matrix products. The peak is what a product of two square
matrices reaches on the same threads, between the passes, in the same dtype. As in the trainer, gradients add up over
the passes, and freed memory is kept.
"""

import os
import statistics
import sys
from typing import Any

import torch
from gpu_check.groups import make_group
from harness import ROOT, command_line, own_dtype, quickstart_model, save, seconds, start
from torch.utils.flop_counter import FlopCounterMode

from onbeat.config import JobConfig
from onbeat.machine.malloc import KEEP_FREED
from services.trainer.batch import MicroBatch, pack
from services.trainer.model.model import DTYPES, load_model, response_logprobs

SHAPE = PROMPT_TOKENS, RESPONSE_TOKENS, NUM_RESPONSES = 38, 16, 8  # shape of each group
SQUARE = 2048
REPETITIONS = 7
NUM_THREADS = 2


def run_pass(model: Any, batch: MicroBatch) -> None:
    response_logprobs(model, batch, 1.0)[0].sum().backward()


def count_operations(model: Any, batch: MicroBatch) -> int:
    counter = FlopCounterMode(display=False)
    with counter:
        run_pass(model, batch)
    return counter.get_total_flops()


def measure(dtype_name: str) -> dict[str, Any]:
    dtype = DTYPES[dtype_name]
    model = load_model(str(quickstart_model()), dtype, torch.device("cpu"))
    row_tokens = JobConfig.from_file(ROOT / "benchmarks/jobs/quickstart-0.1.toml").training.row_tokens
    num_groups = row_tokens // (PROMPT_TOKENS + NUM_RESPONSES * RESPONSE_TOKENS)
    batch = pack([make_group(*SHAPE) for _ in range(num_groups)], torch.device("cpu"), is_prefix_shared=False)
    operations = count_operations(model, batch)
    left, right = (torch.randn(SQUARE, SQUARE, dtype=dtype) for _ in range(2))
    rounds = []
    for _ in range(REPETITIONS + 1):
        rounds.append((seconds(run_pass, model, batch), seconds(torch.mm, left, right)))
    pass_s, square_s = (statistics.median(values) for values in zip(*rounds[1:], strict=True))
    reached, peak = operations / pass_s / 1e9, 2 * SQUARE**3 / square_s / 1e9
    return {
        "dtype": dtype_name,
        "tokens_in_row": len(batch.token_ids),
        "pass_s": pass_s,
        "gflops": reached,
        "peak_gflops": peak,
        "share_of_peak": reached / peak,
    }


def main() -> None:
    if os.environ.get("GLIBC_TUNABLES") != KEEP_FREED:  # it is read when a process is started
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"GLIBC_TUNABLES": KEEP_FREED})
    torch.set_num_threads(NUM_THREADS)
    result = {"num_threads": NUM_THREADS, "goal": "share_of_peak >= 0.85 in float32", "pass": measure(own_dtype())}
    save("pass_efficiency", result, own_dtype())


if __name__ == "__main__":
    start(command_line(__doc__))
    main()
