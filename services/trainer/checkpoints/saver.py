"""The checkpoints of a job: whether they fit on the disk, when one is due, what happens without disk space."""

import logging
import math
import time

from onbeat.config import JobConfig
from onbeat.contracts.errors import JobFailed
from onbeat.machine.disk_space import GB, shortage
from services.trainer.checkpoints.store import CheckpointStore, NotWritten, TrainState
from services.trainer.job.interface import TrainingJob
from services.trainer.model.exported_weights import conversion
from services.trainer.model.lora import published_sizes
from services.trainer.policy import Policy
from services.trainer.weights.store import Snapshot

logger = logging.getLogger(__name__)

# Tries of a checkpoint that the job needs. They are counted, not timed, so that all ranks give up together.
NUM_TRIES, RETRY_S = 20, 30.0
FLOAT32_BYTES = 4


class CheckpointSaver:
    """The saver of checkpoints. Every rank has one and calls it at the same points; only that of rank 0 reports.

    Its methods take the state that training has reached, and the newest version of the weights, which is exported.
    """

    def __init__(self, job: TrainingJob, policy: Policy, store: CheckpointStore, durable_until: int) -> None:
        """Continue a job whose iterations before `durable_until` are in a checkpoint."""
        self._job, self._policy, self._store = job, policy, store
        self._durable_until = durable_until
        self._has_failed = False  # a checkpoint could not be written

    def wait_for_reader(self) -> None:
        """Wait until no checkpoint reads the state that the next step changes."""
        self._job.status.wait_for_reader()
        self._store.wait_until_read()

    def save_if_due(self, config: JobConfig, state: TrainState, newest: Snapshot) -> bool:
        """Return whether a checkpoint is due; its writing goes on in the background."""
        done = state.next_iteration
        is_last = done == config.schedule.num_iterations
        if not is_last and done % config.checkpoint.every_iterations:
            return False
        self._job.status.write_checkpoint(done)
        try:
            self._store.wait()
        except NotWritten as error:
            self._go_on_without(error)
        self.report_finished()  # all ranks agree on the previous checkpoint now
        self._save(state, newest)
        if self._has_failed and self._durable_until == config.first_iteration:  # the disk may be too small for any
            self._insist(state, newest, "the first one")
        return True

    def finish(self, state: TrainState, newest: Snapshot) -> None:
        """Wait until everything is on disk. Raises JobFailed when it cannot be written after repeated tries."""
        self._insist(state, newest, "the last one")

    def leave(self, state: TrainState, newest: Snapshot) -> bool:
        """Write a checkpoint because the job or this process is to stop, so that the next trainer has nothing to
        repeat. The process that stops this one sets the time for it; else the next trainer starts from an older one.
        Return whether the checkpoint is on disk."""
        done = state.next_iteration
        self._job.status.write_last_checkpoint(done)
        try:
            self._store.wait()
            self.report_finished()
            if done > self._durable_until:
                self._save(state, newest)
                self._store.wait()
                self.report_finished()
        except JobFailed as error:  # NotWritten included
            logger.warning("job %s: %s; the next trainer repeats what is not in a checkpoint", self._job.job_id, error)
        return self._durable_until == done

    def report_finished(self) -> None:
        """Report checkpoints that are on disk by now; only then may the groups that they contain be dropped."""
        try:
            finished = self._store.finished()
        except NotWritten as error:
            self._go_on_without(error)
            finished = self._store.finished()  # tries before the failed one
        for next_iteration, path in finished:
            if self._policy.world.is_main:
                self._job.checkpointed(self._durable_until, next_iteration, str(path))
            self._durable_until = next_iteration

    def _save(self, state: TrainState, newest: Snapshot) -> None:
        snapshots = self._policy.held.items()
        older = {version: held.tensors() for version, held in snapshots if version < state.policy_version}
        policy, convert = self._policy, conversion(self._policy.model)
        tensors, is_sharded = policy.state_tensors(), policy.is_sharded
        self._store.save(state, newest.tensors(), tensors, policy.files, older, is_sharded, convert)

    # ---- without disk space ------------------------------------------------------------------------------------------

    def _go_on_without(self, error: NotWritten) -> None:
        """Continue without it. Nothing is lost: the previous checkpoint stays valid, with the groups since in Redis."""
        self._has_failed = True
        since = f"until the next one the groups from iteration {self._durable_until} on stay in Redis"
        self._report_failure(f"{error}; training goes on without it, {since}")

    def _insist(self, state: TrainState, newest: Snapshot, which_one: str) -> None:
        """Wait until the newest checkpoint is on disk, also for disk space. Raises NotWritten after the last try."""
        for num_tries in range(1, NUM_TRIES + 1):
            self._job.status.wait_for_checkpoint(state.next_iteration)
            try:
                self._store.wait()
                break
            except NotWritten as error:
                if num_tries == NUM_TRIES:
                    raise
                self._wait_for_space(error, num_tries, which_one)
                self._save(state, newest)
        self.report_finished()

    def _wait_for_space(self, error: NotWritten, num_tries: int, which_one: str) -> None:
        """Wait before the next try. Raises what `job.check` does: the job may be cancelled or have another trainer."""
        if num_tries == 1:
            self._report_failure(
                f"{error}; it is {which_one} and tried again, for {NUM_TRIES * RETRY_S / 60:.0f} minutes"
            )
        self._job.status.wait_for_disk_space(error, num_tries + 1, NUM_TRIES, RETRY_S)
        deadline = time.monotonic() + RETRY_S
        while (left_s := deadline - time.monotonic()) > 0:
            self._job.check()
            time.sleep(min(left_s, 0.5))

    def _report_failure(self, message: str) -> None:
        if self._policy.world.is_main:
            logger.error("job %s: %s", self._job.job_id, message)
            self._job.emit("checkpoint.failed", message)


def state_bytes(config: JobConfig, num_trained: int) -> int:
    """Return the size of what the optimizer continues from: masters, both moments, GAC's last gradient."""
    return num_trained * (3 + (config.gac.mode != "off")) * FLOAT32_BYTES


def checkpoint_bytes(policy: Policy, config: JobConfig) -> int:
    """Return the size of one whole checkpoint without its small files: the optimizer's state, the weights, versions
    that open iterations are generated with, and the one at the end of a warm start that a KL term pulls towards."""
    num_trained = sum(parameter.numel() for parameter in policy.optimizer.parameters.values())
    version_bytes = sum(published_sizes(policy.model).values()) * policy.compute_dtype.itemsize
    return state_bytes(config, num_trained) + version_bytes * (1 + config.max_staleness + config.has_started_reference)


def shortage_warning(checkpoints: CheckpointStore, policy: Policy, config: JobConfig) -> str:
    """Return a warning if the disk cannot hold all retained checkpoints and the one being written; '' if it can."""
    size = checkpoint_bytes(policy, config)
    num_folders = min(
        config.checkpoint.keep + 1, math.ceil(config.schedule.num_iterations / config.checkpoint.every_iterations)
    )
    there = sum(
        file.stat().st_size for folder in checkpoints.complete() for file in folder.rglob("*") if file.is_file()
    )
    content = f"this job's checkpoints (at most {num_folders} of {size / GB:.1f} GB at a time)"
    problem = shortage(checkpoints.folder, max(0, num_folders * size - there), content)
    return f"{problem}; free disk space, or checkpoints cannot be written" if problem else ""
