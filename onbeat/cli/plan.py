"""`onbeat plan`: what a job will need, before it runs."""

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onbeat.cli.options import App, AsJson, Broker, Job, Overrides
from onbeat.cli.service import CHILDREN, run_service

if TYPE_CHECKING:
    from onbeat.config import JobConfig
    from onbeat.local.stack import StackOptions
    from onbeat.types import JobRecord

app = App("Estimate what a job will need before it runs.")
GB = 1e9
TYPICAL_PROMPT_TOKENS = 128
OTHERS_BYTES = 330_000_000  # measured for broker, Redis and the command together

Plan = dict[str, dict[str, int]]  # bytes, by process and part


@app.command()
def memory(
    job: Job,
    overrides: Overrides = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the longest prompt.")] = 128,
    num_ranks: Annotated[int, typer.Option("--ranks", min=1, help="Trainer ranks that share one model (FSDP2).")] = 1,
    is_on_gpu: Annotated[
        bool, typer.Option("--gpu", help="Plan a trainer on a GPU of its own, with the engine on another.")
    ] = False,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Responses that an engine generates at a time.")] = 64,
    as_json: AsJson = False,
) -> None:
    """Predict the memory that a trainer and a rollout take at their peak, part by part.

    It assumes that all responses reach their limit. `model.dtype = "auto"` is planned for this machine.
    """
    from onbeat.config import JobConfig

    config = JobConfig.from_file(job, overrides)
    found = plan_memory(with_dtype(config), prompt_tokens, num_ranks, is_on_gpu, max_num_seqs)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        typer.echo("\n".join(describe(found, num_ranks, is_on_gpu)))


def with_dtype(config: "JobConfig") -> dict[str, Any]:
    """Return the job with a dtype instead of `auto`."""
    from onbeat.hardware.processor import read_processor

    fields: dict[str, Any] = config.model_dump(mode="json")
    if fields["model"]["dtype"] == "auto":
        fields["model"]["dtype"] = "bfloat16" if read_processor().bfloat16 == "native" else "float32"
    return fields


def plan_memory(job: dict[str, Any], prompt_tokens: int, num_ranks: int, is_on_gpu: bool, max_num_seqs: int) -> Plan:
    """Plan the memory of trainer and rollout. Raises ValueError where the model cannot be planned."""
    request = {"job": job, "prompt_tokens": prompt_tokens, "num_ranks": num_ranks, "is_on_host": not is_on_gpu}
    trainer = plan_of("trainer", request)
    names = {"host": "trainer", "device": "trainer's GPU"}
    plan: Plan = {names[place]: parts for place, parts in trainer["parts"].items()}
    if is_on_gpu:  # the engine has its own GPU, and vLLM takes a fixed share of it
        return plan
    rollout = {
        "model": trainer["model"],
        "num_parameters": trainer["num_parameters"],
        "dtype": job["model"]["dtype"],
        "max_model_len": job["model"]["max_context_tokens"],
        "max_num_seqs": max_num_seqs,
        "has_episodes": job["environment"] is not None,
        "cache_gib": 1.0,
    }
    return plan | plan_of("rollout", rollout)


def plan_of(service: str, request: dict[str, Any]) -> Any:
    return json.loads(run_service(f"services.{service}.memory_plan", ["/dev/stdin"], json.dumps(request)))


def describe(plan: Plan, num_ranks: int, is_on_gpu: bool) -> list[str]:
    from onbeat.hardware.accelerators import MEMORY, ROLLOUTS_MEMORY
    from onbeat.memory import read_memory

    lines = []
    for process, parts in plan.items():
        each = f", each of {num_ranks} ranks" if num_ranks > 1 and process.startswith("trainer") else ""
        lines.append(f"{sum(parts.values()) / GB:7.2f} GB  {process}{each}")
        largest_first = sorted(parts.items(), key=lambda item: -item[1])
        lines += [f"           {size / GB:7.2f} GB  {part}" for part, size in largest_first]
    if is_on_gpu:
        return [*lines, f"besides, the engine takes a share of its GPU: {MEMORY} (default {ROLLOUTS_MEMORY})"]
    total = OTHERS_BYTES + sum(
        sum(parts.values()) * (num_ranks if process == "trainer" else 1) for process, parts in plan.items()
    )
    available = read_memory().available_bytes
    lines.append(f"{total / GB:7.2f} GB  in all, with broker and Redis; {available / GB:.2f} GB are available here")
    if total > available:
        lines.append(
            "That is too much for this machine: lower training.max_tokens_per_micro_batch, set "
            "training.has_gradient_checkpointing, or add a [lora] section"
        )
    return lines


def job_memory_warning(job: "JobRecord", broker: Broker, say: Callable[[str], None]) -> AbstractContextManager[None]:
    """Warn like `memory_warning` if the job belongs to the data folder's stack and has no committed iteration yet."""
    from pydantic import ValidationError

    from onbeat.config import JobConfig
    from onbeat.local.stack import StackOptions
    from onbeat.local.state import resolve_data_dir, running_stack

    folder = resolve_data_dir(broker.data_dir)
    stack = running_stack(folder)
    if stack is None or (broker.url and broker.url != stack.url) or job.next_iteration > job.first_iteration:
        return nullcontext()
    try:
        return memory_warning(JobConfig.model_validate(job.config), StackOptions(folder), say)
    except ValidationError:  # the objective may be installed only where the broker runs
        return nullcontext()


@contextmanager
def memory_warning(config: "JobConfig", options: "StackOptions", say: Callable[[str], None]) -> Iterator[None]:
    """Print one warning if the job may need more memory than is free here. A thread plans it while the block runs.

    Memory that a running stack of the data folder holds counts as free. There is no warning for a job that cannot be
    planned, a bundled model that is not converted yet, another engine than vLLM, or a machine with accelerators.
    """
    from onbeat.hardware.accelerators import available_devices
    from onbeat.local.state import held_bytes, running_stack
    from onbeat.memory import read_memory

    stack = running_stack(options.data_dir)
    num_rollouts, engine = (stack or options).num_rollouts, (stack or options).engine
    if available_devices(os.environ)[1] or engine != "vllm" or not is_converted(config.model.path):
        yield
        return
    held, is_over = held_bytes(stack.pid) if stack else 0, threading.Event()
    available = read_memory().available_bytes + held  # before anything is started

    def compare() -> None:
        try:
            plan = plan_memory(with_dtype(config), TYPICAL_PROMPT_TOKENS, 1, is_on_gpu=False, max_num_seqs=64)
        except (ValueError, OSError):
            return
        if (text := shortage_text(plan, num_rollouts, available)) and not is_over.is_set():
            say(text)

    thread = threading.Thread(target=compare, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        while thread.is_alive():  # it may start another child
            for child in list(CHILDREN):
                child.kill()
            thread.join(0.05)


def is_converted(model_path: str) -> bool:
    """Return False for a bundled model that no trainer has converted yet, because planning would convert it, too."""
    from onbeat.bundled import CACHE_DIR, is_complete, model_folder

    if not model_path.startswith("bundled:"):
        return True
    cache_dir = Path(os.environ.get("ONBEAT_CACHE_DIR") or CACHE_DIR)
    return is_complete(model_folder(cache_dir, model_path.removeprefix("bundled:")))


def shortage_text(plan: Plan, num_rollouts: int, available_bytes: int) -> str:
    """Return a warning for a job that needs more memory than is free; '' if it fits.

    >>> shortage_text({"trainer": {"weights": 4_000_000_000}}, 1, 2_000_000_000).partition(":")[0]
    'memory'
    """
    sizes = {name: sum(parts.values()) * (1 if name == "trainer" else num_rollouts) for name, parts in plan.items()}
    total = OTHERS_BYTES + sum(sizes.values())
    if total <= available_bytes:
        return ""
    parts = ", ".join(f"{name} {size / GB:.1f}" for name, size in sizes.items())
    return (
        f"memory: at its peak the job may take {total / GB:.1f} GB ({parts}), and {available_bytes / GB:.1f} GB were "
        "free before the start. If the machine becomes slow: lower training.max_tokens_per_micro_batch, set "
        "training.has_gradient_checkpointing, or add a [lora] section (`onbeat plan memory` shows each part)"
    )
