"""`onbeat plan`: what a job will need, before it runs."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onbeat.cli.options import App, AsJson, Job, Overrides
from onbeat.cli.output import print_json
from onbeat.cli.service import run_service
from onbeat.contracts.memory_plan import MAX_NUM_SEQS, planned_dtype, rollout_request, trainer_request

if TYPE_CHECKING:
    from onbeat.config import JobConfig

app = App("Estimate what a job will need before it runs.")
GB = 1e9
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
    max_num_seqs: Annotated[
        int, typer.Option(min=1, help="Responses that an engine generates at a time.")
    ] = MAX_NUM_SEQS,
    as_json: AsJson = False,
) -> None:
    """Predict the memory that a trainer and a rollout take at their peak, part by part.

    It assumes that all responses reach their limit. `model.dtype = "auto"` is planned for this machine, and so is
    `training.max_tokens_per_micro_batch = "auto"`; with --gpu, the latter is planned as a whole iteration.
    """
    from onbeat.config import JobConfig
    from onbeat.machine.processor import read_processor
    from onbeat.process.extras import require_extra

    require_extra("trainer", user="a plan of the memory")
    config = JobConfig.from_file(job, overrides)
    config = config.with_dtype(planned_dtype(config.model.dtype, read_processor().bfloat16 == "native"))
    plan, row_tokens = plan_with_rows(config, prompt_tokens, num_ranks, is_on_gpu, max_num_seqs)
    is_auto = config.training.max_tokens_per_micro_batch == "auto"
    if as_json:
        print_json(plan | {"max_tokens_per_micro_batch": row_tokens} if is_auto else plan)
        return
    if is_auto:
        reason = "a whole iteration: what fits on the GPU is not known" if is_on_gpu else "what auto would choose here"
        typer.echo(f"planned with rows of {row_tokens:,} tokens, {reason}")
    typer.echo("\n".join(describe(plan, num_ranks, is_on_gpu)))


def plan_memory(config: "JobConfig", prompt_tokens: int, num_ranks: int, is_on_gpu: bool, max_num_seqs: int) -> Plan:
    """Plan the memory of trainer and rollout. Raises ValueError where the model cannot be planned."""
    return plan_with_rows(config, prompt_tokens, num_ranks, is_on_gpu, max_num_seqs)[0]


def plan_with_rows(
    config: "JobConfig", prompt_tokens: int, num_ranks: int, is_on_gpu: bool, max_num_seqs: int
) -> tuple[Plan, int]:
    """Plan as `plan_memory` does; return the tokens of a row, too: those of the job, or that a trainer would choose."""
    from onbeat.machine.memory import read_memory

    job = config.model_dump(mode="json")
    trainer = plan_of("trainer", trainer_request(job, prompt_tokens, num_ranks, is_on_gpu))
    names = {"host": "trainer", "device": "trainer's GPU"}
    if is_on_gpu:  # the engine has its own GPU, and vLLM takes a fixed share of it
        return {names[place]: parts for place, parts in trainer["parts"].items()}, trainer["row_tokens"]
    rollout: Plan = plan_of("rollout", rollout_request(job, trainer, bool(config.environments), max_num_seqs))
    if config.training.max_tokens_per_micro_batch == "auto":
        others = OTHERS_BYTES + sum(sum(parts.values()) for parts in rollout.values())
        available_bytes = max(0, read_memory().available_bytes - others) // num_ranks
        trainer = plan_of("trainer", trainer_request(job, prompt_tokens, num_ranks, available_bytes=available_bytes))
    return {names[place]: parts for place, parts in trainer["parts"].items()} | rollout, trainer["row_tokens"]


def plan_of(service: str, request: dict[str, Any]) -> dict[str, Any]:
    answer = run_service(f"services.{service}.memory_plan", ["/dev/stdin"], json.dumps(request))
    plan: dict[str, Any] = json.loads(answer)
    return plan


def describe(plan: Plan, num_ranks: int, is_on_gpu: bool) -> list[str]:
    from onbeat.machine.accelerators import MEMORY, ROLLOUTS_MEMORY
    from onbeat.machine.memory import read_memory

    lines = []
    for process, parts in plan.items():
        suffix = f", each of {num_ranks} ranks" if num_ranks > 1 and process.startswith("trainer") else ""
        lines.append(f"{sum(parts.values()) / GB:7.2f} GB  {process}{suffix}")
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
            + (", or take a smaller teacher" if any("teacher" in parts for parts in plan.values()) else "")
        )
    return lines
