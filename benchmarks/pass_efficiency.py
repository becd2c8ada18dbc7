"""The trainer's pass against its own matrix products, and against the peak of the cores.

A pass is forward and backward of a packed row of 0.1's quick start, with the gradients added up: one row of as many
groups as the job puts into a row, and one of all groups of an iteration. Its matrix products are recorded, and run
again alone between the passes, with operands of the same shapes and strides. The peak is what a product of two square
matrices reaches on the same threads. As in the trainer, freed memory is kept.
"""

import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from gpu_check.groups import make_group
from harness import ROOT, command_line, own_dtype, quickstart_model, save, seconds, start
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from onbeat.config import JobConfig, OptimizerConfig
from onbeat.machine.malloc import KEEP_FREED
from services.trainer.batch import MicroBatch, pack
from services.trainer.model.model import DTYPES, load_model, response_logprobs
from services.trainer.model.optimizer import MasterAdamW

SHAPE = PROMPT_TOKENS, RESPONSE_TOKENS, NUM_RESPONSES = 38, 16, 8  # shape of each group
SQUARE = 2048
REPETITIONS = 9
NUM_THREADS = 2
aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.addmm_.default, aten.baddbmm_.default}


class RecordedProducts(TorchDispatchMode):
    """A recorder of the matrix products in its block, which `run` repeats on random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[tuple[Callable[..., Any], list[Any]]] = []
        self._operands: dict[Any, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            self._calls.append((func, [self._like(part) if isinstance(part, torch.Tensor) else part for part in args]))
        return func(*args, **(kwargs or {}))

    def _like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of this shape, strides and dtype, the same one for equal ones."""
        key = tensor.shape, tensor.stride(), tensor.dtype
        if key not in self._operands:
            self._operands[key] = torch.empty_strided(*key[:2], dtype=tensor.dtype).normal_(std=0.01)
        return self._operands[key]

    def run(self) -> None:
        for func, args in self._calls:
            func(*args)


def run_pass(model: Any, batch: MicroBatch) -> None:
    response_logprobs(model, batch, 1.0)[0].sum().backward()


def measure(model: Any, num_groups: int, dtype: torch.dtype) -> dict[str, float]:
    batch = pack([make_group(*SHAPE) for _ in range(num_groups)], torch.device("cpu"), is_prefix_shared=False)
    counter, products = FlopCounterMode(display=False), RecordedProducts()
    with counter:
        run_pass(model, batch)
    with products:
        run_pass(model, batch)
    left, right = (torch.randn(SQUARE, SQUARE, dtype=dtype) for _ in range(2))
    turns = []
    for _ in range(REPETITIONS + 1):
        pass_s = seconds(run_pass, model, batch)
        turns.append((pass_s, seconds(products.run), seconds(torch.mm, left, right)))
    pass_s, products_s, square_s = (statistics.median(values) for values in zip(*turns[1:], strict=True))
    reached, peak = counter.get_total_flops() / pass_s / 1e9, 2 * SQUARE**3 / square_s / 1e9
    return {
        "tokens_in_row": len(batch.token_ids),
        "pass_s": pass_s,
        "products_s": products_s,
        "times_products": statistics.median(taken[0] / taken[1] for taken in turns[1:]),
        "gflops": reached,
        "peak_gflops": peak,
        "share_of_peak": reached / peak,
    }


def main() -> None:
    if os.environ.get("GLIBC_TUNABLES") != KEEP_FREED:  # it is read when a process is started
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"GLIBC_TUNABLES": KEEP_FREED})
    torch.set_num_threads(NUM_THREADS)
    job = JobConfig.from_file(ROOT / "benchmarks/jobs/quickstart-0.1.toml")
    in_row = job.training.row_tokens // (PROMPT_TOKENS + NUM_RESPONSES * RESPONSE_TOKENS)
    dtype = DTYPES[own_dtype()]
    model = load_model(str(quickstart_model()), dtype, torch.device("cpu"))
    MasterAdamW(model, OptimizerConfig()).gradients()
    rows = {str(number): measure(model, number, dtype) for number in (in_row, job.rollout.num_prompts_per_iteration)}
    goal = "share_of_peak >= 0.85 in float32; times_products <= 1.6 in bfloat16"
    save("pass_efficiency", {"num_threads": NUM_THREADS, "goal": goal, "by_groups_in_row": rows}, own_dtype())


if __name__ == "__main__":
    start(command_line(__doc__))
    main()
