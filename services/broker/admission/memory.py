"""The memory that a new job would take, by the programs of `onbeat plan memory`, where their packages are installed."""

import importlib.util
import json
from typing import Any

from onbeat.config import JobConfig
from onbeat.contracts.memory_plan import planned_dtype, rollout_request, trainer_request
from onbeat.machine.processor import read_processor
from onbeat.process.children import ChildDied, ChildProcess

PLAN_S = 60.0  # time for a program to start, import PyTorch and build the model without its weights
GB = 1e9
USUAL_PROMPT_TOKENS = 128  # if the prompts could not be counted
BY_MEMORY = (
    "memory is not predicted here, as max_tokens_per_micro_batch = 'auto' takes rows as long as the trainer's memory "
    "allows: `onbeat plan memory` on its machine says how long, and has the parts"
)
NO_TORCH = (
    "memory is not predicted where the broker runs, since PyTorch is not installed there: use `onbeat plan memory`"
)


async def describe_memory(config: JobConfig, prompt_tokens: int | None) -> str:
    """Return how much memory trainer and rollout take at their peak on a CPU, or why that is unknown, as a sentence.

    `prompt_tokens`: of the longest prompt that is known.
    """
    if importlib.util.find_spec("torch") is None:
        return NO_TORCH
    if config.training.max_tokens_per_micro_batch == "auto":
        return BY_MEMORY
    job = config.model_dump(mode="json")
    job["model"]["dtype"] = planned_dtype(config.model.dtype, read_processor().bfloat16 == "native")
    try:
        trainer = await ask("trainer", trainer_request(job, prompt_tokens or USUAL_PROMPT_TOKENS))
        rollout = await ask("rollout", rollout_request(job, trainer, bool(config.environments)))
    except ChildDied as error:
        return f"memory is not predicted: {error.last_words or error}"
    except TimeoutError:
        return f"memory is not predicted: the plan took longer than {PLAN_S:g} s; use `onbeat plan memory`"
    peaks = {"trainer": trainer["parts"]["host"]} | rollout
    words = ", ".join(f"{name} {sum(parts.values()) / GB:.1f} GB" for name, parts in peaks.items())
    return (
        f"memory at the peak on a CPU, if all responses reach their limit: {words} (`onbeat plan memory` has the parts)"
    )


async def ask(service: str, request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of the service's planner. Raises ChildDied, TimeoutError."""
    child = await ChildProcess.start("the plan of the memory", f"services.{service}.memory_plan", "/dev/stdin")
    try:
        await child.send(request, PLAN_S)
        child.end_input()
        answer: dict[str, Any] = json.loads(await child.receive(PLAN_S))
        return answer
    finally:
        await child.kill()
