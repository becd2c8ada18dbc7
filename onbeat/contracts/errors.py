"""The errors that a caller can handle. HTTP and gRPC map them once, at their own edge."""

from typing import Any


class OnbeatError(Exception):
    """The base of all errors that Onbeat raises on purpose."""


class UnnamedBroker(OnbeatError):
    """Something was to be changed at a broker that may only be read: no address was named, and no stack runs here."""


class JobNotFound(OnbeatError):
    def __init__(self, job_id: str) -> None:
        super().__init__(f"there is no job {job_id!r}; `onbeat jobs list` shows the jobs of this broker")


class IllegalTransition(OnbeatError):
    """A job was asked to move along an edge that its state machine does not have. `problem`: instead of `wanted`."""

    def __init__(self, job_id: str, current: str, wanted: str = "", problem: str = "") -> None:
        if (current, wanted) == ("PENDING", "PAUSED"):
            problem = " and waits in the queue: only a running job can be paused; cancel it instead"
        super().__init__(f"job {job_id} is {current}{problem or f' and cannot become {wanted}'}")
        self.current = current


class NotRunningYet(IllegalTransition):
    def __init__(self, job_id: str, current: str) -> None:
        remedy = "; only a running job can be paused: cancel it instead"
        super().__init__(job_id, current, problem=f": it waits in the queue{remedy}")


class JobNotFinal(IllegalTransition):
    def __init__(self, job_id: str, current: str) -> None:
        super().__init__(job_id, current, problem="; only a job that is over can be deleted: cancel it first")


class CannotResume(IllegalTransition):
    """The job cannot be resumed. `reason`: why not, and what to do instead."""

    def __init__(self, job_id: str, current: str, reason: str) -> None:
        super().__init__(job_id, current, problem=f": {reason}")


class JobDeleted(OnbeatError):
    def __init__(self, job_id: str) -> None:
        super().__init__(f"job {job_id} was deleted; take a new Idempotency-Key for a new job")


class TooManyPending(OnbeatError):
    """An API key has as many pending jobs as it may have."""

    def __init__(self, num_pending: int, limit: int) -> None:
        super().__init__(
            f"{num_pending} jobs of this API key are pending, and at most {limit} may be (ONBEAT_MAX_PENDING_JOBS of "
            "the broker); wait until some have started, or cancel some"
        )


class LeaseLost(OnbeatError):
    """Another process owns the job now, or the job is over; a process that sees this must stop touching it."""

    def __init__(self, job_id: str, reason: str = "has another trainer now") -> None:
        super().__init__(f"job {job_id} {reason}")


class JobFailed(OnbeatError):
    """The job cannot go on; the message is the reason shown to the user."""


class StreamLost(JobFailed):
    """A stream of an existing job is missing."""

    def __init__(self, job_id: str, name: str) -> None:
        super().__init__(
            f"the stream {name} of job {job_id} is gone from Redis: its key was deleted, or Redis lost data. What "
            "was in it is lost; find out who writes to this Redis besides Onbeat, and submit the job again"
        )


class GroupsTrimmed(JobFailed):
    """The groups of an old iteration are no longer kept. This ends the job if its trainer cannot do without them."""

    def __init__(self, job_id: str, iteration: int, first_kept: int) -> None:
        super().__init__(
            f"the groups of iteration {iteration} of job {job_id} are no longer kept (retention.rollout_iterations), "
            f"only those from iteration {first_kept} on"
        )


class WeightsError(OnbeatError):
    """A weights transfer was incomplete, corrupt or for a version that no source holds. Nothing was applied."""


class VersionNotHeld(WeightsError):
    """The trainer does not hold the version: not yet, or not any more."""


class ApiError(OnbeatError):
    """The broker answered with a problem document (RFC 9457). `rows`: counts of a refused job's data, as RowCounts."""

    def __init__(
        self,
        status: int,
        title: str,
        detail: str,
        errors: list[dict[str, str]] | None = None,
        rows: list[dict[str, Any]] | None = None,
    ) -> None:
        lines = [f"{title} ({status}): {detail}" if detail else f"{title} ({status})"]
        lines += [f"  {e.get('field', '?')}: {e.get('message', '')}" for e in errors or []]
        super().__init__("\n".join(lines))
        self.status, self.title, self.detail = status, title, detail
        self.errors, self.rows = errors or [], rows or []
