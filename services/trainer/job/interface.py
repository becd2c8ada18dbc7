"""The job as the training loop sees it, whether it is live or recorded."""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Protocol

from onbeat.contracts.records import PublishedWeights
from onbeat.contracts.states import JobState
from onbeat.streams.codec import RolloutGroup
from services.trainer.job.status import Status
from services.trainer.spans import Span
from services.trainer.stats import Advantages
from services.trainer.supervised import SupervisedRow
from services.trainer.weights.store import Snapshot


class JobCancelled(Exception):
    """The user cancelled; stop at the next safe point."""


class Stopped(Exception):
    """This process was asked to stop; the job goes on elsewhere."""


class CannotServe(Exception):
    """This process cannot serve weights, whatever the job: its port, host or certificates are wrong."""


@dataclass(frozen=True)
class Commit:
    """The trainer's report at the end of an iteration."""

    iteration: int
    snapshot: Snapshot  # the version that the iteration made
    metrics: dict[str, float]
    used: str  # the `used_digest` of the groups that the step was made of
    is_published: bool  # False: rollouts stay on the version that they have (`bounded` only)
    spans: Sequence[Span]
    advantages: Advantages


class Groups(Protocol):
    """The groups of a job, as one replica takes them: live (`session.GroupSource`) or recorded."""

    def num_opened(self) -> int: ...
    def accepted(self, iteration: int, known: Container[str] = ()) -> list[RolloutGroup]: ...
    def take(self, count: int, timeout_s: float) -> list[RolloutGroup]: ...
    def policy_version(self, iteration: int) -> int: ...
    def dispatched(self, iteration: int) -> set[str]: ...
    def is_drained(self, iteration: int) -> bool: ...
    def recorded_micro_batches(self, iteration: int) -> list[list[str]]: ...
    def taken(self, iteration: int) -> set[str]: ...
    def record_micro_batch(self, iteration: int, group_ids: list[str]) -> list[str]: ...


class TrainingJob(Protocol):
    """The training loop's view of its job: live (`session.JobSession`) or recorded (`replay.RecordedJob`)."""

    job_id: str
    status: Status

    @property
    def groups(self) -> Groups: ...
    def check(self) -> JobState: ...
    def num_engines_to_come(self) -> int: ...
    def record_row_tokens(self, num_tokens: int, reason: str) -> int: ...
    def record_rows(self, iteration: int) -> None: ...
    def held_out_rows(self) -> list[SupervisedRow]: ...
    def hold(self, snapshot: Snapshot, delta_bytes: int | None) -> None: ...
    def withdraw(self) -> None: ...
    def publish(self, snapshot: Snapshot, published: PublishedWeights) -> None: ...
    def commit(self, commit: Commit) -> bool: ...
    def checkpointed(self, first: int, next_iteration: int, path: str) -> None: ...
    def wait_for_evaluation(self, evaluation: int) -> dict[str, float]: ...
    def emit(self, kind: str, message: str) -> None: ...
