"""The tokens of a packed row that a job leaves to its trainer: chosen once, from the memory that is free, and recorded.

    the first version is published, an engine loads it, the first group of the job is accepted     now memory is known
    all ranks read what is free; the one with the least decides
    rank 0 chooses and records                                    a trainer that takes over reads the recorded number
    the first micro-batch is recorded, and the first pass runs

Supervised iterations wait for no engine: one that is still to start on this machine gets the memory that the plan of a
rollout names.
"""

import copy
import json
import subprocess

import torch

from onbeat.config import JobConfig
from onbeat.contracts.memory_plan import rollout_request
from onbeat.machine.malloc import give_back_freed
from onbeat.machine.memory import read_memory
from onbeat.process.children import command_of, last_words
from services.trainer.job.interface import TrainingJob
from services.trainer.memory_plan import (
    MOMENTS_BYTES,
    Placement,
    Sizes,
    count_pass,
    empty_model,
    empty_teacher,
    held_parts,
    pass_parts,
    version_parts,
)
from services.trainer.model.errors import TRIAL_ERRORS
from services.trainer.policy import Policy
from services.trainer.row_length import BytesOfRow, beyond_counted, bounds_of, longest_row, reserve_of
from services.trainer.world import World

GB = 1e9
PLAN_S = 300.0  # limit of the program that plans an engine, on a machine where another one may be starting
REMEDY = "give training.max_tokens_per_micro_batch a number in a new job"


def choose_row_tokens(job: TrainingJob, config: JobConfig, policy: Policy, prompt_tokens: int | None) -> JobConfig:
    """Return the job with the number that it has recorded; record it first if no trainer has. All ranks call it.

    `prompt_tokens`: of the longest prompt so far; None: there is none yet. Raises LeaseLost, and ValueError for a model
    whose memory cannot be planned.
    """
    world, recorded = policy.world, None
    available_bytes = min(map(int, world.all_gather_bytes(str(read_available(world)).encode())))
    if world.is_main:
        num_engines = job.num_engines_to_come() if world.device.type == "cpu" else 0
        for_engines = num_engines * engine_bytes(config, policy) // world.local_size if num_engines else 0
        try:
            num_tokens, reason = row_for(config, policy, prompt_tokens, available_bytes, for_engines)
        except TRIAL_ERRORS as error:
            name = type(policy.model).__name__
            raise ValueError(
                f"the memory of {name} cannot be planned ({type(error).__name__}: {error}); {REMEDY}"
            ) from error
        recorded = str(job.record_row_tokens(num_tokens, reason)).encode()
    return config.with_row_tokens(int(world.broadcast_bytes(recorded)))


def row_for(
    config: JobConfig, policy: Policy, prompt_tokens: int | None, available_bytes: int, for_engines: int
) -> tuple[int, str]:
    """Return the tokens of a row, and the sentence that says why."""
    world = policy.world
    placement = Placement(world.size if policy.is_sharded else 1, world.device.type == "cpu")
    bounds = bounds_of(config, prompt_tokens, policy.model.config.to_dict(), world.size)
    bytes_of_row = passes_of(config, policy, prompt_tokens or 1, placement, bounds.least)
    to_come = still_to_come(config, policy, placement)
    limit_bytes = available_bytes - reserve_of(available_bytes) - to_come - for_engines
    num_tokens = longest_row(bytes_of_row, limit_bytes, bounds)
    row_bytes = bytes_of_row(num_tokens)
    kind = ", as many as an update has" if num_tokens == bounds.most else ""
    for_others = f", engines that are still to start take {for_engines / GB:.1f} GB" if for_engines else ""
    reason = (
        f"rows of up to {num_tokens} tokens{kind}: {available_bytes / GB:.1f} GB of memory are free, the pass over one "
        f"takes {row_bytes / GB:.1f} GB, gradients, optimizer and versions up to {to_come / GB:.1f} GB more{for_others}"
    )
    if row_bytes > limit_bytes:
        reason += "; that may be too much: set training.has_gradient_checkpointing, or train with [lora]"
    return num_tokens, reason


def read_available(world: World) -> int:
    """Return the bytes that this rank may still take: on a CPU its share of what the machine, or the container, has."""
    if world.device.type == "cpu":
        give_back_freed()
        return read_memory().available_bytes // world.local_size
    device = torch.get_device_module(world.device)
    kept = device.memory_reserved(world.device) - device.memory_allocated(world.device)
    free, _ = device.mem_get_info(world.device)
    return int(free + kept)


def still_to_come(config: JobConfig, policy: Policy, placement: Placement) -> int:
    """Return the bytes that this trainer will hold during later passes, besides a row's, and does not hold yet; some of
    the versions may be there already.

    AdamW makes its moments in its first step, and the last gradient is kept after it; a checkpoint brings both.
    """
    sizes = Sizes.of(policy.model, pass_bytes=0, teacher=policy.teacher)
    to_come = sum(pass_parts(config, sizes, placement).values())
    if policy.optimizer.num_steps == 0:
        to_come += sizes.num_trained * MOMENTS_BYTES // placement.num_ranks
        to_come += held_parts(config, sizes, placement).get("last gradient", 0)
    if placement.is_on_host:
        to_come += sum(version_parts(config, sizes, placement, is_publishing=False).values())
    return to_come


def passes_of(config: JobConfig, policy: Policy, prompt_tokens: int, placement: Placement, least: int) -> BytesOfRow:
    """Return the function that counts the bytes of a pass over the longest row, on models without memory. `least`: the
    tokens of the shortest row."""
    teacher = policy.teacher
    with torch.random.fork_rng(devices=[]):
        model = empty_model(config, copy.deepcopy(policy.model.config), policy.model.passes)
        if teacher is not None:
            like, num_tokens = copy.deepcopy(teacher.model.config), len(teacher.is_known)
            teacher = empty_teacher(config, like, teacher.model.passes, num_tokens)

    def count(num_tokens: int) -> int:
        rows = config.with_row_tokens(num_tokens)
        pass_bytes = count_pass(model, rows, prompt_tokens, placement.num_ranks > 1, teacher)
        return pass_parts(config, Sizes.of(model, pass_bytes), placement)["activations"]

    return beyond_counted(count, least)


def engine_bytes(config: JobConfig, policy: Policy) -> int:
    """Return the memory of a rollout with its engine on a CPU, by the plan. Raises ValueError."""
    model, sizes = policy.model.config.get_text_config().to_dict(), Sizes.of(policy.model, pass_bytes=0)
    trainer = {"model": model, "num_parameters": sizes.num_parameters}
    request = rollout_request(config.model_dump(mode="json"), trainer, bool(config.environments))
    given = json.dumps(request, default=str)
    command = command_of("services.rollout.memory_plan", "/dev/stdin")
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=PLAN_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"the memory of an engine was not planned within {PLAN_S:g} s; {REMEDY}") from error
    if done.returncode != 0:
        raise ValueError(f"the memory of an engine cannot be planned ({last_words(done.stderr)}); {REMEDY}")
    return sum(sum(parts.values()) for parts in json.loads(done.stdout).values())
