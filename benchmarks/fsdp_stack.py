"""The memory of a job on a large random model, with two FSDP2 ranks and real rollouts.

    python benchmarks/fsdp_stack.py bfloat16    LoRA, 1.0B parameters; needs a processor that multiplies bfloat16
    python benchmarks/fsdp_stack.py float32     LoRA, 0.67B parameters, into benchmarks/results/fsdp_stack_float32.json

It is the local stack with vLLM, whose trainer is started by torchrun. Three iterations of tiny responses. A random
model gets no reward, so the job has a KL term: without one its groups would be left out. With LoRA it needs no second
model for it.

With LoRA in bfloat16 the ranks hold 2 bytes a parameter, and 4 in versions while one is made; rollout and engine hold
2 each: 10 GB for a billion parameters, and 20 in float32, besides programs, caches and activations: more than 24 GB
have. Without instructions for bfloat16 a backward pass over a billion parameters takes longer than the deadline.
"""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdp_memory import BILLION, CASES, LORA, Case, peaks, write_model
from harness import command_line, note_redis, save, start, temporary_folder
from memory import Sampler, peak_of

from onbeat.contracts.states import JobState
from onbeat.local.supervisor import ServiceSpec
from onbeat.machine.memory import read_memory
from tests.e2e.stack import RunningStack, running, tiny_job

NUM_RANKS, NUM_ITERATIONS = 2, 3
DEADLINE_S = 1500.0
POLL_S = 0.5
STACKS = {
    "bfloat16": Case(BILLION, LORA, "bfloat16"),
    "float32": CASES["lora"],
}
LEAST_BYTES = 1_000_000_000  # the job is given up when less is available: others need the machine
SECTIONS = {
    "rollout": {"num_prompts_per_iteration": 2, "num_samples_per_prompt": 4, "max_response_tokens": 8},
    "objective": {"kl": {"coef": 0.05}},
    "training": {"max_tokens_per_micro_batch": 128},
    "schedule": {"num_iterations": NUM_ITERATIONS},
}


def with_ranks(specs: list[ServiceSpec]) -> list[ServiceSpec]:
    """Let torchrun start the trainer, as two FSDP2 ranks."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
    (trainer,) = [spec for spec in specs if spec.name == "trainer"]
    env = {**trainer.env, "ONBEAT_PARALLELISM": "fsdp"}
    ranks = replace(trainer, command=[*launch, "-m", "services.trainer"], env=env)
    return [ranks if spec is trainer else spec for spec in specs]


def wait(stack: RunningStack, job_id: str) -> tuple[list[float], int]:
    """Return the peak of each rank, in GB, at the end of the job, and the least bytes that the machine had available
    meanwhile."""
    (trainer,) = [service.guard.pid for service in stack.services if service.spec.name == "trainer"]
    assert trainer is not None
    last_peaks: list[float] = []
    least_bytes = read_memory().available_bytes
    deadline = time.monotonic() + DEADLINE_S
    while not (job := stack.job(job_id)).state.is_final:
        assert time.monotonic() < deadline, f"the job takes longer than {DEADLINE_S:.0f} s"
        least_bytes = min(least_bytes, read_memory().available_bytes)
        assert least_bytes >= LEAST_BYTES, f"less than {LEAST_BYTES / 1e9:.0f} GB are left"
        last_peaks = peaks(trainer) or last_peaks
        time.sleep(POLL_S)
    assert job.state is JobState.SUCCEEDED, job.error
    return peaks(trainer) or last_peaks, least_bytes


def run(case: Case, folder: Path) -> dict[str, Any]:
    num_parameters = write_model(folder / "model", case.sizes)
    model = {"dtype": case.dtype, "max_context_tokens": 64}
    job = tiny_job(folder, model=model, **SECTIONS, **case.sections)
    before_bytes = read_memory().available_bytes
    sampler, started = Sampler(os.getpid()), time.monotonic()
    sampler.start()
    try:
        note_redis()
        with running(
            folder,
            engine="vllm",
            lease_s=30.0,
            change=with_ranks,
            rollout_cores=None,  # both have all cores
            trainer_cores=None,
        ) as stack:
            job_id = stack.client.jobs.create(job).id
            ranks, least_bytes = wait(stack, job_id)
            iterations = stack.client.jobs.iterations(job_id)
    finally:
        sampler.stop()
    services = sorted({name for sample in sampler.samples for name in sample})
    return {
        "parameters": num_parameters,
        "dtype": case.dtype,
        "iterations": len(iterations),
        "ranks_gb": ranks,
        "peak_by_service_mb": {name: peak_of(sampler.samples, name) for name in services},
        "available_gb": {"before": round(before_bytes / 1e9, 1), "least": round(least_bytes / 1e9, 1)},
        "iteration_s": [round(iteration.wall_s or 0.0, 1) for iteration in iterations],
        "wall_s": round(time.monotonic() - started),
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("stack", choices=STACKS)
    name = start(parser).stack
    with temporary_folder() as folder:
        result = run(STACKS[name], folder)
    save("fsdp_stack" if name == "bfloat16" else f"fsdp_stack_{name}", result)


if __name__ == "__main__":
    main()
