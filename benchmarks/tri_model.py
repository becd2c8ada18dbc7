"""The time and peak memory of policy, old and reference on one micro-batch: one pass against three separate workers.

    tri_model              packed and planned once; forward of three, backward of the policy
    separate, packed       each of the three packs and plans for itself
    separate, one_by_one   each of the three pads a row per response, the prompt repeated
    without_old, ...       the tri-model pass without what the algebra does not need
    checkpointed_*         the tri-model pass with gradient checkpointing of the policy
    lora_*                 the policy with adapters; its reference is the policy without them, no third copy

Times are from one process, which takes the ways in turn: medians, and ratios of the same turn. Memory is from fresh
processes: the peak between loaded weights and the end of the pass, minus what Python and its libraries took before;
separate workers are added up. Optimizer state is left out: it is the same for all.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from harness import save

from onbeat.config import LoraConfig
from onbeat.streams.codec import Response, RolloutGroup
from services.trainer.batch import pack
from services.trainer.model.bundled import prepare
from services.trainer.model.lora import add_adapters
from services.trainer.model.model import (
    PACKED_ATTENTION,
    enable_gradient_checkpointing,
    frozen_base,
    load_model,
    prepare_inputs,
    response_logprobs,
    tri_model_logprobs,
    use_attention,
)

SHAPES = {"quickstart": (8, 45, 22, 8), "long_prompt": (1, 512, 64, 8)}  # groups, Lp, Lr, G
MEMORY_RUNS = (
    "tri_model",
    "lora_tri_model",
    "checkpointed_tri_model",
    "policy",
    "frozen",
    "policy_one_by_one",
    "frozen_one_by_one",
)
CORE, CPU = 1, torch.device("cpu")


def make_groups(num_groups: int, prompt_length: int, response_length: int, group_size: int) -> list[RolloutGroup]:
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(1000, 40_000, (count,), generator=generator).tolist()

    def responses() -> list[Response]:
        zeros = [0.0] * response_length
        return [Response(token_ids=tokens(response_length), rollout_logprobs=zeros) for _ in range(group_size)]

    return [
        RolloutGroup(group_id=f"0-{index}", prompt_token_ids=tokens(prompt_length), responses=responses())
        for index in range(num_groups)
    ]


def load_policy(is_checkpointed: bool = False) -> Any:
    source = str(prepare("smollm2-135m-instruct", Path.home() / ".cache" / "onbeat"))
    model = load_model(source, torch.bfloat16, CPU)
    if is_checkpointed:
        enable_gradient_checkpointing(model)
    return model


def tri_model(groups: list[RolloutGroup], policy: Any, old: Any | None, reference: Any | None) -> None:
    tri_model_logprobs(policy, old, reference, pack(groups, CPU), 1.0)[0].trainer.sum().backward()


def alone(groups: list[RolloutGroup], model: Any, is_policy: bool) -> None:
    """Run one worker's part, from its own packing on."""
    with torch.set_grad_enabled(is_policy):
        logprobs, _ = response_logprobs(model, pack(groups, CPU), 1.0)
    if is_policy:
        logprobs.sum().backward()


def separate(groups: list[RolloutGroup], models: list[Any]) -> None:
    for model in models:
        alone(groups, model, is_policy=model is models[0])


def ways(groups: list[RolloutGroup], models: list[Any], checkpointed: Any) -> dict[str, Callable[[], Any]]:
    policy, old, reference = models
    return {
        "tri_model": lambda: tri_model(groups, policy, old, reference),
        "separate_packed": lambda: separate(groups, models),
        "separate_one_by_one": lambda: separate(groups, models),
        "without_old": lambda: tri_model(groups, policy, None, reference),
        "without_reference": lambda: tri_model(groups, policy, old, None),
        "policy_only": lambda: tri_model(groups, policy, None, None),
        "checkpointed_tri_model": lambda: tri_model(groups, checkpointed, old, reference),
        "packing_and_planning": lambda: prepare_inputs(policy, pack(groups, CPU)),
    }


def measure_time(repetitions: int) -> dict[str, Any]:
    policy, checkpointed = load_policy(), load_policy(is_checkpointed=True)
    models = [policy, frozen_base(policy), frozen_base(policy)]
    results = {}
    for shape, sizes in SHAPES.items():
        seconds: dict[str, list[float]] = {}
        tri_model(make_groups(*sizes), *models)  # warms up
        for _ in range(repetitions):
            for name, run in ways(make_groups(*sizes), models, checkpointed).items():
                for model in models:
                    use_attention(model, "sdpa" if name.endswith("one_by_one") else PACKED_ATTENTION)
                started = time.perf_counter()
                run()
                seconds.setdefault(name, []).append(time.perf_counter() - started)
                policy.zero_grad(set_to_none=True)
                checkpointed.zero_grad(set_to_none=True)
        results[shape] = {
            "seconds": {name: statistics.median(values) for name, values in seconds.items()},
            "times_the_tri_model": {
                name: statistics.median(a / b for a, b in zip(values, seconds["tri_model"], strict=True))
                for name, values in seconds.items()
            },
        }
    return results


def run_for_memory(run: str, shape: str) -> dict[str, int]:
    """Run one pass in this process; return the bytes before the weights, and the peak above that afterwards."""
    import peft.tuners.lora  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    groups = make_groups(*SHAPES[shape])
    runtime_bytes = status_bytes("VmRSS")
    policy = load_policy(is_checkpointed=run.startswith("checkpointed"))
    if run.startswith("lora"):
        add_adapters(policy, LoraConfig(), seed=0)
        old, reference = frozen_base(policy), policy
    elif run.endswith("tri_model"):
        old, reference = frozen_base(policy), frozen_base(policy)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    if run.endswith("tri_model"):
        tri_model(groups, policy, old, reference)
    else:
        use_attention(policy, "sdpa" if run.endswith("one_by_one") else PACKED_ATTENTION)
        is_policy = run.startswith("policy")
        alone(groups, policy.requires_grad_(is_policy), is_policy)
    return {"runtime_bytes": runtime_bytes, "peak_bytes": status_bytes("VmHWM") - runtime_bytes}


def status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure_memory() -> dict[str, Any]:
    results = {}
    for shape in SHAPES:
        found = {}
        for run in MEMORY_RUNS:
            command = [sys.executable, __file__, "--memory", run, shape]
            found[run] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        peak = {run: numbers["peak_bytes"] for run, numbers in found.items()}
        results[shape] = {
            "tri_model_bytes": peak["tri_model"],
            "separate_packed_bytes": peak["policy"] + 2 * peak["frozen"],
            "separate_one_by_one_bytes": peak["policy_one_by_one"] + 2 * peak["frozen_one_by_one"],
            "lora_tri_model_bytes": peak["lora_tri_model"],
            "checkpointed_tri_model_bytes": peak["checkpointed_tri_model"],
            "policy_only_bytes": peak["policy"],
            "runtime_bytes_of_each_process": statistics.median_low([run["runtime_bytes"] for run in found.values()]),
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--memory", nargs=2, metavar=("RUN", "SHAPE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {CORE})
    torch.set_num_threads(1)
    if arguments.memory:
        print(json.dumps(run_for_memory(*arguments.memory)))
        return
    result = {
        "shapes_groups_prompt_response_group": SHAPES,
        "time": measure_time(arguments.repetitions),
        "memory": measure_memory(),
        "repetitions": arguments.repetitions,
        "core": CORE,
        "precision": "bfloat16",
        "model": "SmolLM2-135M",
    }
    save("tri_model", result)


if __name__ == "__main__":
    main()
