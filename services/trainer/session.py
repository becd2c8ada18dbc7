"""One job on this trainer: load or resume, serve weights, train."""

import logging

import torch

from onbeat.config import JobConfig
from services.trainer.checkpoint import CheckpointStore, TrainState
from services.trainer.device import choose_device, pin_cores
from services.trainer.link import JobLink
from services.trainer.loop import TrainLoop
from services.trainer.model import model_files, resolve_model
from services.trainer.policy import load_policy
from services.trainer.settings import Settings

logger = logging.getLogger(__name__)


def run_job(settings: Settings, link: JobLink, config: JobConfig) -> TrainState:
    """Train to the last iteration. Raises what ends a job early: JobCancelled, JobFailed, LeaseLost, ValueError."""
    device = choose_device(settings.device)
    num_cores = pin_cores(settings.cpu_cores) if device.type == "cpu" else 0
    torch.manual_seed(config.seed)
    source = resolve_model(config.model.path, settings.cache_dir)
    logger.info("job %s: loading %s on %s%s", link.job_id, source, device, f" ({num_cores} cores)" if num_cores else "")
    policy, reason = load_policy(source, config, device)
    if reason:
        message = f"responses are trained one by one, which is slower: {reason}"
        logger.warning("job %s: %s", link.job_id, message)
        link.emit("trainer.not_packed", message)
    checkpoints = CheckpointStore(settings.data_dir / "jobs" / link.job_id / "checkpoints", config.checkpoint.keep)
    restored = checkpoints.restore(link.job_id, config.model.path, policy.load_state_tensors)
    if restored is not None:  # whoever wrote it may have died before telling
        link.checkpointed(0, restored.next_iteration, str(checkpoints.path(restored.next_iteration)))
    state = restored or TrainState.fresh(link.job_id, config.model.path)
    files = model_files(source)
    link.serve_weights(files, settings.weights_host, settings.weights_port, settings.weights_advertise)
    return TrainLoop(link, config, policy, state, checkpoints, files).run()
