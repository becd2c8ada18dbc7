"""The trainer's whole step, by its real loop from a recorded stream: pack, forward of up to three policies, backward,
rescale, GAC, clip, AdamW on float32 masters, snapshot with its delta.

First a small model in float32: this device must arrive where the CPU does. Then a large one in bfloat16, timed.
"""

import gc
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch

from onbeat.config import JobConfig
from onbeat.streams.codec import Response, RolloutGroup, VersionSpan
from services.trainer.checkpoints.store import TrainState
from services.trainer.loop import TrainLoop
from services.trainer.memory_plan import Placement, measure_sizes, plan_trainer
from services.trainer.model.model import DTYPES, Passes
from services.trainer.passes.choice import choose_passes
from services.trainer.policy import Policy
from services.trainer.replay import NoCheckpoints, RecordedJob
from services.trainer.world import World

from .models import SIZES, random_config, random_model
from .part import Findings, Place, run_part

CPU = torch.device("cpu")
NUM_ITERATIONS, NUM_GROUPS = 3, 4
SMALL = (11, 7, 3)  # tokens of prompt and response, responses
LARGE = (512, 256, 8)
# The limits are for the gradient's norm, and for the weights' mean gap as a share of the way that all steps could move
# one. Another attention on the CPU has 1e-6.
NORM_GAP, WEIGHT_GAP = 1e-3, 1e-3
PLAN_GAP = 0.1  # share of the peak
GAIN = 8.0  # random weights are so small that every softmax is flat


def job_config(
    objective: str, has_reference: bool, dtype: str, num_updates: int, shape: tuple[int, int, int]
) -> JobConfig:
    return JobConfig.model_validate(
        {
            "model": {"path": "random", "dtype": dtype},
            "data": {"type": "jsonl", "path": "none.jsonl"},
            "reward": {"name": "exact"},
            "rollout": {
                "num_prompts_per_iteration": NUM_GROUPS,
                "num_samples_per_prompt": shape[2],
                "max_response_tokens": shape[1],
            },
            "objective": {"type": objective, "kl": {"coef": 0.05 if has_reference else 0.0}},
            "optimizer": {"learning_rate": 1e-5 if dtype == "bfloat16" else 1e-3},
            "training": {
                "num_updates_per_iteration": num_updates,
                "max_tokens_per_micro_batch": 8192,
                "has_gradient_checkpointing": True,
            },
            "gac": {"mode": "control"},
            "schedule": {"num_iterations": NUM_ITERATIONS},
        }
    )


def recorded_stream(shape: tuple[int, int, int], vocabulary: int) -> list[RolloutGroup]:
    """Return all groups of the job, of that many tokens at most; rewards differ within each."""
    generator = torch.Generator().manual_seed(0)
    prompt_length, response_length, group_size = shape

    def tokens(length: int) -> list[int]:
        return torch.randint(vocabulary, (length,), generator=generator).tolist()

    def response(iteration: int, member: int) -> Response:
        length = response_length - member % 3
        return Response(
            token_ids=tokens(length),
            rollout_logprobs=(-torch.rand(length, generator=generator)).tolist(),
            version_spans=[VersionSpan(policy_version=iteration, start=0, end=length)],
            finish_reason="stop",
            reward=float(member % 2),
        )

    return [
        RolloutGroup(
            group_id=f"{iteration}-{index}",
            iteration=iteration,
            policy_version=iteration,
            prompt_token_ids=tokens(prompt_length),
            responses=[response(iteration, member) for member in range(group_size)],
        )
        for iteration, index in product(range(NUM_ITERATIONS), range(NUM_GROUPS))
    ]


def train(
    model: Any, config: JobConfig, groups: list[RolloutGroup], device: torch.device
) -> tuple[Policy, RecordedJob]:
    """Run the job to its end."""
    updates = config.training.num_updates_per_iteration
    size = NUM_GROUPS // updates
    batches = [[str(index) for index in range(start, start + size)] for start in range(0, NUM_GROUPS, size)]
    micro_batches = {
        iteration: [[f"{iteration}-{index}" for index in batch] for batch in batches]
        for iteration in range(NUM_ITERATIONS)
    }
    policy = Policy.create(model, config, World(device=device))
    job = RecordedJob(groups, micro_batches)
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = NoCheckpoints(Path(folder), keep=1)
        TrainLoop(job, config, policy, TrainState("job", "random"), checkpoints).run()
    return policy, job


def compare_with_cpu(objective: str, has_reference: bool, place: Place, findings: Findings) -> None:
    """Train on the device and on the CPU, and compare; on a CPU the bits must be the same."""
    config = job_config(objective, has_reference, "float32", num_updates=2, shape=SMALL)
    groups = recorded_stream(SMALL, SIZES["tiny, few tokens"][5])
    policies, jobs = {}, {}
    for name, device in {"reference": CPU, "device": place.device, "again": place.device}.items():
        torch.manual_seed(0)
        model = random_model("tiny, few tokens", CPU, torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(GAIN)
        policies[name], jobs[name] = train(model.to(device), config, groups, device)
    compared = (jobs["reference"], jobs["device"])
    norms = [[metrics["train/grad_norm"] for metrics in job.metrics.values()] for job in compared]
    norm_gap = max(abs(ours - theirs) / theirs for theirs, ours in zip(*norms, strict=True))
    masters = [policy.optimizer.masters for policy in policies.values()]
    gaps = torch.cat([(ours.cpu() - masters[0][name]).abs().flatten() for name, ours in masters[1].items()])
    num_steps = policies["device"].optimizer.num_steps
    weight_gap = (gaps.mean() / (config.optimizer.learning_rate * num_steps)).item()
    findings.check(
        f"{objective}, {with_reference(has_reference)}: {num_steps} steps as on the CPU, float32",
        norm_gap <= NORM_GAP and weight_gap <= WEIGHT_GAP,
        gap_of_gradient_norm=norm_gap,
        gap_of_weights=weight_gap,
        same_bits=jobs["reference"].digests == jobs["device"].digests,
    )
    findings.check(
        f"{objective}, {with_reference(has_reference)}: a second run has the same bits",
        jobs["device"].digests == jobs["again"].digests,
    )


def plan_bytes(config: JobConfig, model_config: Any, prompt_tokens: int) -> dict[str, int]:
    """Return the plan of `onbeat plan memory` for the device's memory, in bytes."""
    sizes = measure_sizes(config, model_config, Passes(), prompt_tokens)
    return plan_trainer(config, sizes, Placement(is_on_host=False))["device"]


def time_job(objective: str, has_reference: bool, place: Place, findings: Findings) -> Policy:
    size, shape = ("tiny", SMALL) if place.is_tiny else ("1.5B", LARGE)
    config = job_config(objective, has_reference, "bfloat16", num_updates=1, shape=shape)
    planned = plan_bytes(config, random_config(size), shape[0])
    place.reset_peak()
    model = random_model(size, place.device, DTYPES["bfloat16"])
    if not place.is_tiny:
        passes, reason = choose_passes(model.config, sum(shape), place.device, DTYPES["bfloat16"])
        findings.check("the trainer packs rows here", passes.is_packed, reason=reason)
    started = time.perf_counter()
    policy, job = train(model, config, recorded_stream(shape, SIZES[size][5]), place.device)
    wall_s, last = time.perf_counter() - started, job.metrics[NUM_ITERATIONS - 1]
    name = f"{size}, {objective}, {with_reference(has_reference)}, {NUM_GROUPS} groups of {shape}, bfloat16"
    findings.figure(
        name,
        last_iteration={key: last[key] for key in ("train/micro_batches_s", "train/step_s", "train/snapshot_s")},
        trained_tokens=last["train/trained_tokens"],
        grad_norm=last["train/grad_norm"],
        job_s=wall_s,
        planned_parts_gib={part: size_bytes / 2**30 for part, size_bytes in planned.items()},
    )
    if (peak_gib := place.peak_gib()) is not None:
        planned_gib = sum(planned.values()) / 2**30
        is_near = abs(planned_gib - peak_gib) <= PLAN_GAP * peak_gib
        findings.check(f"{name}: the plan of memory", is_near, peak_gib=peak_gib, planned_gib=planned_gib)
    findings.check(f"{name}: each iteration has other weights", len(set(job.digests.values())) == NUM_ITERATIONS)
    return policy


def time_barrier(policy: Policy, place: Place, findings: Findings) -> None:
    """Time the parts of the barrier one by one, on gradients of random numbers."""
    optimizer, seconds = policy.optimizer, {}
    for master in optimizer.masters.values():
        master.grad = torch.randn_like(master)
    parts = {
        "rescale": lambda: optimizer.rescale(2.0),
        "gac": lambda: policy.control.apply(optimizer.gradients()),
        "clip": optimizer.clip,
        "fused_adamw": optimizer.step,
    }
    for name, run in parts.items():
        place.synchronize()
        started = time.perf_counter()
        run()
        place.synchronize()
        seconds[f"{name}_s"] = time.perf_counter() - started
    num_parameters = sum(master.numel() for master in optimizer.masters.values())
    findings.figure(f"barrier of {num_parameters:,} parameters", **seconds)


def check_fused_adamw(place: Place, findings: Findings) -> None:
    """Compare fused AdamW with PyTorch's plain one in float64, over ten steps."""
    generator = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(100_003, generator=generator), torch.randn(10, 100_003, generator=generator)
    copies = []
    for is_fused, dtype, device in ((True, torch.float32, place.device), (False, torch.float64, CPU)):
        weights = start.to(device, dtype, copy=True).requires_grad_()
        adamw = torch.optim.AdamW([weights], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=is_fused)
        for gradient in gradients:
            weights.grad = gradient.to(device, dtype)
            adamw.step()
        copies.append(weights.detach().cpu().double())
    gap = (copies[0] - copies[1]).abs().max().item()
    findings.check("fused AdamW against the plain one in float64, 10 steps of 0.001", gap <= 1e-5, largest_gap=gap)


def with_reference(has_reference: bool) -> str:
    return "with a reference" if has_reference else "without a reference"


def measure(place: Place, findings: Findings) -> None:
    check_fused_adamw(place, findings)
    for objective, has_reference in product(("grpo", "gspo"), (False, True)):
        compare_with_cpu(objective, has_reference, place, findings)
    try:
        for objective, has_reference in (("gspo", False), ("grpo", True)):
            policy = time_job(objective, has_reference, place, findings)
            time_barrier(policy, place, findings)
            del policy
            gc.collect()  # only this frees a model that is wrapped for checkpointing
    except torch.OutOfMemoryError as error:
        findings.leave_out(f"the large model's step does not fit into the card's free memory: {error}")


if __name__ == "__main__":
    run_part(measure)
