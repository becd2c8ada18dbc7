"""A pass with the trainer's lean layers against one with transformers' own, by the length of its rows.

The passes are those of an iteration of the quick start: forward, backward, and the gradients added to the masters. Both
kinds take turns in this process. What a row keeps for its backward pass is counted over what autograd saves.
"""

import statistics
from pathlib import Path
from typing import Any

import torch
from gpu_check.groups import make_group
from harness import command_line, own_dtype, quickstart_model, save, seconds, start
from transformers import AutoModelForCausalLM

from onbeat.config import OptimizerConfig
from services.trainer.batch import MicroBatch, pack
from services.trainer.model.lean_layers import use_lean_layers
from services.trainer.model.model import DTYPES, PACKED_ATTENTION, Passes, register_attention, response_logprobs
from services.trainer.model.optimizer import MasterAdamW

SHAPE = 38, 16, 8  # a group's tokens of the prompt and of each response, and its responses
NUM_GROUPS, GROUPS_IN_ROW = 8, (1, 2, 4, 8)
REPETITIONS, NUM_THREADS = 5, 2


def load(source: Path, dtype: torch.dtype, has_lean_layers: bool) -> Any:
    register_attention()
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, attn_implementation=PACKED_ATTENTION).eval()
    model.passes = Passes()
    if has_lean_layers:
        use_lean_layers(model)
    return model


def rows_of(num_groups: int) -> list[MicroBatch]:
    rows = [[make_group(*SHAPE) for _ in range(num_groups)] for _ in range(NUM_GROUPS // num_groups)]
    return [pack(groups, torch.device("cpu"), is_prefix_shared=False) for groups in rows]


def run(model: Any, optimizer: MasterAdamW, rows: list[MicroBatch]) -> None:
    optimizer.drop_gradients()
    for row in rows:
        response_logprobs(model, row, 1.0)[0].sum().backward()


def kept_bytes(model: Any, row: MicroBatch) -> int:
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs, _ = response_logprobs(model, row, 1.0)
    del logprobs
    return sum(kept.values())


def main() -> None:
    torch.set_num_threads(NUM_THREADS)
    dtype = own_dtype()
    source = quickstart_model()
    models = {name: load(source, DTYPES[dtype], name == "lean") for name in ("transformers", "lean")}
    optimizers = {name: MasterAdamW(model, OptimizerConfig()) for name, model in models.items()}
    rows = {num_groups: rows_of(num_groups) for num_groups in GROUPS_IN_ROW}
    taken: dict[tuple[str, int], list[float]] = {}
    for _ in range(REPETITIONS + 1):
        for num_groups, batch in rows.items():
            for name, model in models.items():
                taken.setdefault((name, num_groups), []).append(seconds(run, model, optimizers[name], batch))
    longest = rows[NUM_GROUPS][0]
    num_tokens = len(longest.token_ids)
    save(
        "lean_layers",
        {
            "dtype": dtype,
            "num_threads": NUM_THREADS,
            "tokens": num_tokens,
            "kept_mb_per_token": {
                name: kept_bytes(model, longest) / num_tokens / 1e6 for name, model in models.items()
            },
            "median_s_by_groups_in_row": {
                name: {str(number): statistics.median(taken[name, number][1:]) for number in rows} for name in models
            },
            "least_s_by_groups_in_row": {
                name: {str(number): min(taken[name, number][1:]) for number in rows} for name in models
            },
        },
        dtype,
    )


if __name__ == "__main__":
    start(command_line(__doc__))
    main()
