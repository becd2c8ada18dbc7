"""Shared-prompt packing: forward and backward of one group against one-by-one batching, on the same single core.

One-by-one is the usual batch [G, Lp + Lr] (equal lengths: no padding) through transformers' SDPA attention, the head on
response positions only and by the same code. The bound is the ratio of counted operations: linear layers per place,
attention per visible pair, the head per response token. Figures are medians over rounds (`groups.alternate`). A share
above 1 means that one-by-one spends more per counted operation (its rows take the slower bfloat16 kernel on few keys,
or leave the cache).

Then a row of several groups whose prompts have the same beginning, which is computed once, is compared with a row whose
prompts differ in their first token, so that each computes its own beginning.
"""

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from gpu_check.groups import alternate, counted_operations, make_group, one_by_one, packed
from harness import command_line, quickstart_model, save, start

from onbeat.streams.codec import RolloutGroup
from services.trainer.batch import pack
from services.trainer.model.model import load_model, use_attention

# (Lp, Lr, G) and the goal there: a share of the counted ratio, or at least not slower.
GOALS = {(512, 64, 8): 0.93, (1024, 100, 8): 0.93, (45, 22, 8): 0.93, (32, 256, 8): None}
PREFIX, OWN, RESPONSE, GROUP, NUM_GROUPS = 256, 16, 16, 4, 4  # tokens: shared, own, of a response
REPETITIONS, CORE = 5, 1


def by_rows(model: Any, group: RolloutGroup) -> None:
    one_by_one(model, group, torch.device("cpu")).sum().backward()


def seconds(run: Callable[..., None], model: Any, *groups: RolloutGroup) -> float:
    started = time.perf_counter()
    run(model, *groups)
    elapsed_s = time.perf_counter() - started
    model.zero_grad(set_to_none=True)
    return elapsed_s


def measure(packing: Any, plain: Any, shape: tuple[int, int, int]) -> dict[str, Any]:
    group = make_group(*shape)
    rounds = alternate(lambda: seconds(packed, packing, group), lambda: seconds(by_rows, plain, group), REPETITIONS)
    ratio = statistics.median(separate_s / packed_s for separate_s, packed_s in rounds)
    separate, together = counted_operations(packing, group)
    share = ratio * together / separate
    goal = GOALS[shape]
    return {
        "prompt_response_group": shape,
        "ratio": ratio,
        "counted_ratio": separate / together,
        "share_of_counted": share,
        "goal": f"share of counted >= {goal}" if goal else "ratio >= 1",
        "is_met": share >= goal if goal else ratio >= 1,
        "one_by_one_s": statistics.median(separate_s for separate_s, _ in rounds),
        "packed_s": statistics.median(packed_s for _, packed_s in rounds),
        "ratios": [separate_s / packed_s for separate_s, packed_s in rounds],
    }


def measure_prefix(model: Any) -> dict[str, Any]:
    alike = [make_group(PREFIX + OWN, RESPONSE, GROUP) for _ in range(NUM_GROUPS)]
    apart = [make_group(PREFIX + OWN, RESPONSE, GROUP) for _ in range(NUM_GROUPS)]
    for index, group in enumerate(alike):
        group.prompt_token_ids[PREFIX] = index
    for index, group in enumerate(apart):
        group.prompt_token_ids[0] = index
    shared_places, places = (len(pack(groups, torch.device("cpu")).token_ids) for groups in (alike, apart))
    rounds = alternate(lambda: seconds(packed, model, *alike), lambda: seconds(packed, model, *apart), REPETITIONS)
    return {
        "prefix_own_response_group_groups": (PREFIX, OWN, RESPONSE, GROUP, NUM_GROUPS),
        "ratio": statistics.median(apart_s / shared_s for apart_s, shared_s in rounds),
        "places_ratio": places / shared_places,
        "apart_s": statistics.median(apart_s for apart_s, _ in rounds),
        "shared_s": statistics.median(shared_s for _, shared_s in rounds),
    }


def main() -> None:
    os.sched_setaffinity(0, {CORE})
    torch.set_num_threads(1)
    source = str(quickstart_model())
    packing = load_model(source, torch.bfloat16, torch.device("cpu"))
    plain = load_model(source, torch.bfloat16, torch.device("cpu"))
    use_attention(plain, "sdpa")
    shapes = [measure(packing, plain, shape) for shape in GOALS]
    how = {"repetitions": REPETITIONS, "core": CORE, "precision": "bfloat16"}
    save("shared_prompt", {"shapes": shapes, "prefix": measure_prefix(packing), **how})


if __name__ == "__main__":
    start(command_line(__doc__))
    main()
