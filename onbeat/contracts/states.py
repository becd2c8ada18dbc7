"""Job, iteration, evaluation and group: their states and legal moves."""

from enum import StrEnum


class JobState(StrEnum):
    PENDING = "PENDING"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    CANCELLING = "CANCELLING"
    CANCELLED = "CANCELLED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @property
    def is_final(self) -> bool:
        return not JOB_MOVES[self]


#   PENDING --> RUNNING --> SUCCEEDED | FAILED
#      |         |   ^
#      |         v   |
#      |        PAUSED
#      |         |
#      |   RUNNING | PAUSED --> CANCELLING --> CANCELLED
#      +--> CANCELLED
# A pending or paused job can also fail: its model may not load, its trainer may never come back. None of these moves
# leaves a final state: only its user brings a job that is over back to PENDING (`Jobs.resume`).
JOB_MOVES: dict[JobState, frozenset[JobState]] = {
    JobState.PENDING: frozenset({JobState.RUNNING, JobState.CANCELLED, JobState.FAILED}),
    JobState.RUNNING: frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.PAUSED, JobState.CANCELLING}),
    JobState.PAUSED: frozenset({JobState.RUNNING, JobState.CANCELLING, JobState.FAILED}),
    JobState.CANCELLING: frozenset({JobState.CANCELLED, JobState.FAILED}),
    JobState.CANCELLED: frozenset(),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
}


class IterationState(StrEnum):
    """The states of an iteration: OPEN (prompts are out) -> DRAINED (all groups accepted) -> COMMITTED (step done)."""

    OPEN = "OPEN"
    DRAINED = "DRAINED"
    COMMITTED = "COMMITTED"


class EvaluationState(StrEnum):
    """The states of an evaluation: OPEN (prompts are out) -> DRAINED (all groups accepted) -> DONE (scored); or FAILED,
    which does not fail the job."""

    OPEN = "OPEN"
    DRAINED = "DRAINED"
    DONE = "DONE"
    FAILED = "FAILED"

    @property
    def is_over(self) -> bool:
        return self in (EvaluationState.DONE, EvaluationState.FAILED)


class EpisodeFailureKind(StrEnum):
    """The reason why a try of an episode has no result."""

    RAISED = "raised"  # the environment raised an exception
    TIMEOUT = "timeout"  # it ran longer than `environment.timeout_s`
    CRASHED = "crashed"  # the process ended
    MEMORY = "memory"  # the process exceeded its memory limit
    OUTPUT = "output"  # it printed too much
    INVALID = "invalid"  # the returned object is no Outcome
    LOAD = "load"  # it cannot be imported or built
    NO_CALL = "no_call"  # it never called the policy
    UNREACHABLE = "unreachable"  # a server that it needs could not be reached


class Verdict(StrEnum):
    """The submission script's verdict on a group."""

    ACCEPTED = "accepted"
    STALE = "stale"  # wrong version or iteration: generate it again
    DUPLICATE = "duplicate"  # another worker's group was accepted first
    LOST = "lost"  # the worker does not hold the group's lease: another one does
    CLOSED = "closed"  # the job is not running
