"""The session of one job on this trainer: load or resume, serve weights, train."""

import hashlib
import json
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from onbeat.config import JobConfig
from onbeat.contracts.data_folder import JOB_FILE
from onbeat.machine.malloc import give_back_freed, give_back_large_at_once
from onbeat.objectives import check_installed
from services.trainer.chat_template import check_chat_template
from services.trainer.checkpoints.saver import shortage_warning
from services.trainer.checkpoints.store import CheckpointStore, TrainState, folder_name, number_of
from services.trainer.device import pin_cores
from services.trainer.job.session import JobSession
from services.trainer.loop import TrainLoop
from services.trainer.model.bundled import resolve_model
from services.trainer.model.exported_files import exported_files
from services.trainer.model.lora import reach
from services.trainer.model.model import model_files
from services.trainer.model.whole import left_out, named
from services.trainer.policy import Policy, load_policy
from services.trainer.rows import RowRecorder
from services.trainer.settings import Settings
from services.trainer.stop_check import check_stops
from services.trainer.teacher import check_record, load_teacher
from services.trainer.weights.store import take_snapshot
from services.trainer.world import World

logger = logging.getLogger(__name__)

Tracking = Callable[[Path], AbstractContextManager[object]]  # the job's folder -> a block in which the job is tracked


def run_job(settings: Settings, job: JobSession, world: World, tracking: Tracking = nullcontext) -> None:
    """Train to the last iteration, together with the world's other ranks.

    Raises what ends a job early: JobCancelled, JobFailed, LeaseLost, PeerLost, ValueError.
    """
    config = job.config
    check_installed(config.objective)
    if world.size > 1 and config.schedule.iteration_deadline_s >= settings.peer_timeout_s:
        raise ValueError(
            f"schedule.iteration_deadline_s is {config.schedule.iteration_deadline_s:.0f}, but this trainer's ranks "
            f"wait for one another {settings.peer_timeout_s:.0f} s only; lower the first or raise ONBEAT_PEER_TIMEOUT_S"
        )
    is_sharded = world.size > 1 and settings.parallelism == "fsdp"
    is_cpu = world.device.type == "cpu"
    num_cores = pin_cores(settings.cpu_cores, world.local_rank, world.local_size) if is_cpu else 0
    if is_sharded:
        give_back_large_at_once()
    torch.manual_seed(config.seed)
    source = resolve_model(config.model.path, settings.cache_dir)
    check_prompts(source, job, is_main=world.is_main)
    cores = f" ({num_cores} cores)" if num_cores else ""
    logger.info("job %s: loading %s on %s%s, %s", job.job_id, source, world.device, cores, describe(world, is_sharded))
    policy, reason = load_policy(source, config, world, is_sharded)
    policy.teacher = load_teacher(config, policy.model, source, settings.cache_dir, world, is_sharded)
    give_back_freed()  # loading took the model's size twice
    if policy.teacher is not None:
        check_record(policy.teacher, job.record_teacher(policy.teacher.digest))
    if world.is_main:
        report_models(job, policy, source, reason)
    folder = settings.data_dir / "jobs" / job.job_id
    checkpoints = CheckpointStore(
        folder / "checkpoints",
        keep=config.checkpoint.keep,
        world=world,
        writer=job.epoch,
        timeout_s=settings.checkpoint_timeout_s,
        while_waiting=job.lease.progress,
    )
    check_not_ahead(checkpoints, job.num_committed())
    restored = restore(checkpoints, job.job_id, config, policy)
    if restored is not None and world.is_main:  # the checkpoint's writer may have died before reporting it
        job.checkpointed(0, restored.next_iteration, str(checkpoints.path(restored.next_iteration)))
    if world.is_main and (problem := shortage_warning(checkpoints, policy, config)):
        logger.warning("job %s: %s", job.job_id, problem)
        job.emit("job.warning", problem)
    if config.num_supervised and world.is_main:
        job.rows = RowRecorder.create(job.lease, config, source, policy.model, settings.trainer_id)
    state = restored or begin(settings.data_dir, job.job_id, config, policy)
    files = model_files(source, policy.compute_dtype, config.model.chat_template)
    job.serve_weights(files, settings, policy.holders)
    if world.is_main:
        exported = exported_files(source, policy.compute_dtype, config.model.chat_template)
        policy.files = exported | {JOB_FILE: describe_job(job.job_id, config)}
    try:
        with tracking(folder) if world.is_main else nullcontext():
            TrainLoop(job, config, policy, state, checkpoints).run()
    finally:
        checkpoints.close()


def check_not_ahead(checkpoints: CheckpointStore, num_committed: int) -> None:
    """Raise ValueError for a checkpoint of more iterations than the job has committed."""
    newest = max(map(number_of, checkpoints.complete()), default=0)
    if newest > num_committed:
        raise ValueError(
            f"{checkpoints.folder} has a checkpoint after {newest} iterations, but this job has committed "
            f"{num_committed}: it belongs to a deleted job with the same id, or Redis lost data. Move the checkpoints "
            f"after more than {num_committed} iterations away, and resume the job"
        )


def report_models(job: JobSession, policy: Policy, source: str, reason: str) -> None:
    """Emit events about the models that were loaded. `reason`: why the policy's responses cannot be packed, or ''."""
    in_teacher = policy.teacher.reason if policy.teacher is not None else ""
    for where, why in {"a pass": reason, "a pass of the teacher": in_teacher}.items():
        if why:
            message = f"responses share no prompt in {where}, which is slower: {why}"
            logger.warning("job %s: %s", job.job_id, message)
            job.emit("trainer.not_packed", message)
    if unused := left_out(source, policy.model):
        job.emit("trainer.tensors_left_out", f"the model's files have {named(unused)} beside those of the policy")
    if job.config.lora is not None:
        job.emit("trainer.adapters", describe_reach(*reach(policy.model)))


def describe_reach(share: float, left_out: dict[str, float]) -> str:
    """Return the share of the weights that adapters reach, and the largest ones that have none."""
    largest = ", ".join(f"{name} ({other:.1%})" for name, other in list(left_out.items())[:3])
    return f"adapters reach {share:.1%} of the weights; the largest without one: {largest or 'none'}"


def describe_job(job_id: str, config: JobConfig) -> bytes:
    """Return what a checkpoint says about its job. Prompts can then be made from the folder alone, as the job made
    them."""
    return json.dumps({"id": job_id, "config": config.model_dump(mode="json")}).encode()


def check_prompts(source: str, job: JobSession, *, is_main: bool) -> None:
    """Check template and stops with the model's tokenizer, and report what users should know of them. Raises
    ValueError."""
    model = job.config.model
    note = check_chat_template(source, job.config)
    check_stops(source, job.config)
    if is_main and note:
        job.emit("job.warning", note)
    if is_main and model.chat_template is not None:
        digest = hashlib.sha256(model.chat_template.encode()).hexdigest()
        job.emit("trainer.chat_template", f"prompts have the template of the job, with the SHA-256 {digest}")


def restore(
    checkpoints: CheckpointStore, job_id: str, config: JobConfig, policy: Policy, before: int | None = None
) -> TrainState | None:
    """Load the newest checkpoint (that does not contain iteration `before`) into the policy; None: there is none.

    Raises ValueError, naming the folder, when it cannot be used.
    """
    sharded = policy.optimizer.masters if policy.is_sharded else None
    state = checkpoints.restore(job_id, config.model.path, policy.load_state_tensors, before, sharded)
    if state is not None:
        for version, tensors in checkpoints.policies(state.next_iteration).items():
            published = policy.published_shard()
            kept = ((name, tensor) for name, tensor in tensors if name in published)
            is_start = policy.started is not None and version == config.num_supervised
            holder = policy.started if is_start and policy.started is not None else policy.old
            holder.hold(take_snapshot(version, kept, published, policy.holders), oldest_wanted=0)
    return state


def begin(data_dir: Path, job_id: str, config: JobConfig, policy: Policy) -> TrainState:
    """Return where a job without a checkpoint of its own begins; load what a fork starts from into the policy.

    Raises ValueError, with what there is instead, when that checkpoint is not there.
    """
    if config.fork is None:
        return TrainState(job_id, config.model.path)
    parent, iteration = config.fork.job, config.fork.iteration
    checkpoints = CheckpointStore(data_dir / "jobs" / parent / "checkpoints", keep=1, world=policy.world)
    names = [folder.name for folder in checkpoints.complete()]
    if folder_name(iteration) not in names:
        raise ValueError(
            f"there is no {folder_name(iteration)} of job {parent} in {checkpoints.folder}, which has: "
            f"{', '.join(names) or 'none'}; fork from one of these, or give this trainer the data folder "
            "(ONBEAT_DATA_DIR) of the one that wrote it"
        )
    state = restore(checkpoints, parent, config, policy, before=iteration)
    assert state is not None, f"{folder_name(iteration)} is there"
    policy.old.snapshots.clear()  # snapshots of the parent's open iterations
    return state.forked(job_id)


def describe(world: World, is_sharded: bool) -> str:
    kind = "sharded" if is_sharded else "replicated"
    return "alone" if world.size == 1 else f"rank {world.rank} of {world.size}, {kind}"
