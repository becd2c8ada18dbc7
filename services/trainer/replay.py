"""Record and replay: run iterations again from their stream, anywhere, and say whether the bits agree.

    python -m services.trainer.replay JOB ITERATION      (what `onbeat replay` calls; settings as for the trainer)

A replay starts from the newest checkpoint before the iteration, or from the job's model, and repeats the recorded
micro-batches. Equal bits need the same device kind and number of threads, and a job that one process trained: several
add up in another order. Elsewhere compare the metrics.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from onbeat.config import JobConfig
from onbeat.contracts.errors import OnbeatError
from onbeat.contracts.states import IterationState, JobState
from onbeat.objectives import check_installed
from onbeat.streams.codec import RolloutGroup
from onbeat.streams.connection import describe_loss
from onbeat.streams.ledger import Ledger
from services.device import choose_device
from services.trainer.attention import PLANNERS
from services.trainer.attention.npu import plan_npu
from services.trainer.checkpoints.store import CheckpointStore
from services.trainer.device import make_deterministic, pin_cores
from services.trainer.job.interface import Commit, Groups
from services.trainer.job.status import Status
from services.trainer.loop import TrainLoop
from services.trainer.model.bundled import resolve_model
from services.trainer.policy import load_policy
from services.trainer.session import begin, restore
from services.trainer.settings import Settings
from services.trainer.supervised import SupervisedRow
from services.trainer.teacher import check_record, load_teacher
from services.trainer.world import World

MicroBatches = dict[int, list[list[str]]]  # group ids of each micro-batch, by iteration


class RecordedJob:
    """A job and its groups, which are all in the past, with the micro-batches in which they were trained. Commits go
    nowhere, digests are kept."""

    job_id = "replay"

    def __init__(self, groups: Iterable[RolloutGroup], micro_batches: MicroBatches) -> None:
        self.status = Status()
        self.groups: Groups = self
        self._groups, self._micro_batches = list(groups), micro_batches
        self.digests: dict[int, str] = {}  # iteration -> digest of the weights after it
        self.metrics: dict[int, dict[str, float]] = {}

    def num_opened(self) -> int:
        return max(self._micro_batches) + 1

    def accepted(self, iteration: int, known: Container[str] = ()) -> list[RolloutGroup]:
        return [group for group in self._groups if group.iteration == iteration]

    def take(self, count: int, timeout_s: float) -> list[RolloutGroup]:
        return []

    def policy_version(self, iteration: int) -> int:
        return next(group.policy_version for group in self._groups if group.iteration == iteration)

    def dispatched(self, iteration: int) -> set[str]:
        return {group.group_id for group in self._groups if group.iteration == iteration}

    def is_drained(self, iteration: int) -> bool:
        return True

    def recorded_micro_batches(self, iteration: int) -> list[list[str]]:
        return self._micro_batches[iteration]

    def taken(self, iteration: int) -> set[str]:
        return {group_id for batch in self._micro_batches[iteration] for group_id in batch}

    def record_micro_batch(self, iteration: int, group_ids: list[str]) -> list[str]:
        raise AssertionError(f"iteration {iteration} was not recorded in full")

    def num_engines_to_come(self) -> int:
        return 0

    def record_row_tokens(self, num_tokens: int, reason: str) -> int:
        raise AssertionError("the tokens of a row were recorded before the first pass")

    def check(self) -> JobState:
        return JobState.RUNNING

    def commit(self, commit: Commit) -> bool:
        self.digests[commit.iteration] = commit.snapshot.manifest.digest.hex()
        self.metrics[commit.iteration] = commit.metrics
        return True

    def _ignore(self, *args: Any, **options: Any) -> None:
        pass

    def wait_for_evaluation(self, evaluation: int) -> dict[str, float]:
        return {}

    def held_out_rows(self) -> list[SupervisedRow]:
        return []

    hold = withdraw = publish = checkpointed = emit = record_rows = _ignore


class NoCheckpoints(CheckpointStore):
    """A replay leaves nothing behind."""

    def save(self, *args: Any, **options: Any) -> None:
        pass


async def read_record(
    ledger: Ledger, job_id: str, first: int, last: int
) -> tuple[list[RolloutGroup], MicroBatches, list[str]]:
    """Read the groups, micro-batches and committed digests of iterations first..last. Raises OnbeatError when one is
    missing."""
    groups: list[RolloutGroup] = []
    micro_batches: MicroBatches = {}
    digests = []
    for iteration in range(first, last + 1):
        fields = await ledger.iterations.fields(job_id, iteration)
        if fields.get("state") != IterationState.COMMITTED:
            raise OnbeatError(f"iteration {iteration} of job {job_id} is not committed, so there is nothing to replay")
        accepted = await ledger.iterations.accepted_groups(job_id, iteration)
        if len(accepted) != int(fields["num_groups"]):
            raise OnbeatError(
                f"iteration {iteration}: only {len(accepted)} of {fields['num_groups']} groups are recorded"
            )
        groups += accepted
        recorded = await ledger.iterations.micro_batches(job_id, iteration)
        micro_batches[iteration] = [group_ids for _, group_ids in recorded]
        digests.append(fields["weights_digest"])
    return groups, micro_batches, digests


def replay(settings: Settings, job_id: str, iteration: int) -> dict[str, object]:
    """Train an iteration again and return a report. Raises OnbeatError or ValueError with what to do."""

    async def fields_of() -> dict[str, str]:
        return await Ledger(settings.connect_redis()).jobs.fields(job_id)

    async def record(first: int) -> tuple[list[RolloutGroup], MicroBatches, list[str]]:
        return await read_record(Ledger(settings.connect_redis()), job_id, first, iteration)

    fields = asyncio.run(fields_of())
    config = JobConfig.of_job(fields)
    check_installed(config.objective)
    if config.fork is not None and iteration < config.fork.iteration:
        raise OnbeatError(f"iteration {iteration} is one of job {config.fork.job}, which {job_id} was forked from")
    asyncio.run(record(iteration))  # an iteration that cannot be replayed is refused before the model is loaded
    device = choose_device(settings.device)
    if device.type == "cpu":
        pin_cores(settings.cpu_cores)
    make_deterministic(device)
    source = resolve_model(config.model.path, settings.cache_dir)
    world = World(device=device)
    policy, _ = load_policy(source, config, world, is_sharded=False)
    policy.teacher = load_teacher(config, policy.model, source, settings.cache_dir, world, is_sharded=False)
    if policy.teacher is not None:
        check_record(policy.teacher, fields.get("teacher_digest", ""))
    recorded = CheckpointStore(settings.data_dir / "jobs" / job_id / "checkpoints", keep=1)
    state = restore(recorded, job_id, config, policy, before=iteration)
    state = state or begin(settings.data_dir, job_id, config, policy)
    groups, micro_batches, digests = asyncio.run(record(state.next_iteration))
    until_then = config.schedule.model_copy(update={"num_iterations": iteration + 1, "stop_without_signal": None})
    start = config.warm_start
    if start is not None:  # no gate and no measurement belong to a replay
        start = start.model_copy(update={"min_pass_at_k": None, "held_out": None})
    shortened = config.model_copy(update={"schedule": until_then, "warm_start": start})
    job = RecordedJob(groups, micro_batches)
    with tempfile.TemporaryDirectory() as scratch:
        TrainLoop(job, shortened, policy, state, NoCheckpoints(Path(scratch), keep=1)).run()
    return {
        "job_id": job_id,
        "iteration": iteration,
        "replayed_from": state.next_iteration,
        "device": str(device),
        "bits_agree": job.digests[iteration] == digests[-1],
        "weights_digest": {"recorded": digests[-1], "replayed": job.digests[iteration]},
        "metrics": job.metrics[iteration],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Replay a committed iteration and compare the bits.")
    parser.add_argument("job_id")
    parser.add_argument("iteration", type=int)
    arguments = parser.parse_args()
    PLANNERS["npu"] = plan_npu
    try:
        settings = Settings()
        result = replay(settings, arguments.job_id, arguments.iteration)
    except (OnbeatError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except RedisError as error:
        sys.stderr.write(f"{describe_loss(settings.connect_redis(), error)}\n")
        return 2
    sys.stdout.write(json.dumps(result, indent=2) + "\n")
    return 0 if result["bits_agree"] else 1


if __name__ == "__main__":
    sys.exit(main())
