"""The progress of a job that is followed, as the broker last reported it."""

import asyncio
from collections.abc import Sequence
from statistics import median

from onbeat.client import AsyncClient
from onbeat.contracts.records import (
    Diagnosis,
    EvaluationRecord,
    Event,
    Finding,
    IterationRecord,
    JobRecord,
    WorkerRecord,
)
from onbeat.contracts.states import EvaluationState, IterationState, JobState
from onbeat.terminal.report import num_tokens

YOUNG_S = 10.0  # a problem that began later may end by itself: services that start together look for each other
LONG_WAIT_S = 20.0  # waiting for less time, or for less than an iteration takes, is normal
NUM_RECENT = 5  # iterations that means are taken over
TRAINING = "training on groups of iteration"
START_STEPS = (
    "step 1 of 4: a trainer starts and takes the job, usually 5 to 20 s",
    "step 2 of 4: the trainer loads the model, usually 5 to 30 s",
    "step 3 of 4: rollouts load it into their engine, usually 20 to 60 s",
    "step 4 of 4: the first responses are generated",
)
START_STEPS_OF_EXAMPLES = (  # no rollout has to start
    "step 1 of 3: a trainer starts and takes the job, usually 5 to 20 s",
    "step 2 of 3: the trainer loads the model, usually 5 to 30 s",
    "step 3 of 3: the first examples are trained",
)


class JobProgress:
    """The data of a job. `look` asks the broker; everything else is derived from its answers."""

    def __init__(self, job: JobRecord, cursor: str = "0") -> None:
        """Begin to follow a job. `cursor`: id of the newest event that is no news."""
        self.job, self._known = job, order_of(cursor)
        self.iterations: dict[int, IterationRecord] = {}
        self.evaluations: dict[int, EvaluationRecord] = {}
        self.workers: Sequence[WorkerRecord] = []
        self.diagnosis: Diagnosis | None = None
        self.trainer = "not started"
        self.news: list[Event] = []  # events that have not been shown yet
        self._cursor = "0"  # the newest event that is known

    async def look(self, client: AsyncClient) -> None:
        """Ask for everything that may have changed. Raise ApiError when the job was deleted.

        The job itself comes first: when it is final, so is everything requested after it.
        """
        self.job = await client.jobs.get(self.job.id)
        for event in await client.jobs.events(self.job.id, self._cursor):
            self._cursor = event.id
            self.trainer = trainer_activity(event) or self.trainer
            if order_of(event.id) > self._known:
                self.news.append(event)
        unfinished = [number for number, record in self.evaluations.items() if not record.state.is_over]
        known = min(unfinished) - 1 if unfinished else max(self.evaluations, default=-1)
        records, evaluations, self.diagnosis, self.workers = await asyncio.gather(
            client.jobs.iterations(self.job.id, after=self.num_committed - 1),
            client.jobs.evaluations(self.job.id, after=known),
            client.jobs.explain(self.job.id),
            client.workers(self.job.pool),
        )
        self.iterations |= {record.iteration: record for record in records}
        self.evaluations |= {record.evaluation: record for record in evaluations}

    @property
    def committed(self) -> list[IterationRecord]:
        return [record for _, record in sorted(self.iterations.items()) if record.state == IterationState.COMMITTED]

    @property
    def num_committed(self) -> int:
        return self.committed[-1].iteration + 1 if self.committed else 0

    @property
    def current(self) -> IterationRecord | None:
        """The oldest iteration that is being generated, or else trained: several may be open at once."""
        records = [record for record in self.iterations.values() if record.state != IterationState.COMMITTED]
        return min(records, key=lambda record: (record.state != IterationState.OPEN, record.iteration), default=None)

    @property
    def scored(self) -> list[EvaluationRecord]:
        return [record for _, record in sorted(self.evaluations.items()) if record.state == EvaluationState.DONE]

    @property
    def starting(self) -> list[WorkerRecord]:
        """The rollouts of this job that report a step of their start."""
        ours = (worker for worker in self.workers if worker.job_id == self.job.id)
        return [worker for worker in ours if worker.doing and worker.state == "starting"]

    @property
    def start_step(self) -> str | None:
        """The step of the start that the job is at, with its usual duration; None once responses arrive, and of a job
        that waits for others."""
        current, job = self.current, self.job
        if self.committed or (current is not None and current.num_accepted) or (job.queue_position or 1) > 1:
            return None
        is_sft = (job.config.get("objective") or {}).get("type") == "sft"
        is_supervised = is_sft or job.first_iteration < job.first_after_warm_start
        steps = START_STEPS_OF_EXAMPLES if is_supervised else START_STEPS
        if job.state == JobState.PENDING:
            return steps[0]
        if job.state != JobState.RUNNING:
            return None
        if job.policy_version is None:
            return steps[1]
        if is_supervised:
            return steps[2]
        ours = [worker for worker in self.workers if worker.job_id == job.id]
        is_generating = current is not None and any(worker.state != "starting" for worker in ours)
        return START_STEPS[3 if is_generating else 2]

    @property
    def trainer_doing(self) -> str:
        """The trainer's activity in words. While no group has arrived there is nothing to train on."""
        current = self.current
        if self.trainer.startswith(TRAINING) and current is not None and current.num_accepted == 0:
            return f"waiting for the first group of iteration {current.iteration}"
        return self.trainer

    @property
    def waits_for(self) -> Finding | None:
        """The first problem that the doctor has found and that has lasted, or else the first long wait.

        No wait while rollouts start their engines: they report themselves what they do.
        """
        is_over = self.job.state.is_final
        findings = self.diagnosis.findings if self.diagnosis is not None and not is_over else []
        long_s = max(LONG_WAIT_S, self.iteration_s() or 0.0)
        problems = [
            finding
            for finding in findings
            if finding.is_problem and (finding.since_s is None or finding.since_s >= YOUNG_S)
        ]
        is_starting = len(self.starting) > 0
        waits = [
            finding
            for finding in findings
            if finding.waits_for and (finding.since_s or 0.0) >= long_s and not is_starting
        ]
        return next(iter(problems + waits), None)

    def iteration_s(self) -> float | None:
        """Return the median of the last iterations, so that one in which an engine started again does not count; the
        first one, in which it starts, never does, nor do those of a warm start."""
        alike = [record for record in self.committed[1:] if record.iteration > self.job.first_after_warm_start]
        walls = [record.wall_s for record in alike[-NUM_RECENT:] if record.wall_s is not None]
        return median(walls) if walls else None

    def time_left_s(self) -> float | None:
        iteration_s, num_left = self.iteration_s(), self.job.num_iterations - self.num_committed
        return iteration_s * num_left if iteration_s is not None and num_left and not self.job.state.is_final else None

    def tokens_per_s(self) -> float | None:
        recent = [record for record in self.committed[-NUM_RECENT:] if record.wall_s]
        wall_s = sum(record.wall_s or 0.0 for record in recent)
        return sum(map(num_tokens, recent)) / wall_s if wall_s else None


def order_of(event_id: str) -> tuple[int, ...]:
    """Return a sort key of an event's id, which is milliseconds and a number.

    >>> order_of("99-1") < order_of("100-0")
    True
    """
    return tuple(map(int, event_id.split("-")))


def trainer_activity(event: Event) -> str | None:
    """Return in words what the trainer does after this event; None if the event says nothing about it."""
    iteration = event.data.get("iteration")
    match event.kind:
        case "job.state" if event.data.get("state") == JobState.RUNNING:
            return "loading the model"
        case "job.state":
            return str(event.data.get("state", event.message)).lower()
        case "weights.published":
            return f"published policy version {event.data.get('policy_version')}"
        case "iteration.opened" if event.data.get("policy_version") == iteration:  # otherwise it is opened ahead
            return f"{TRAINING} {iteration} as they arrive"
        case "iteration.drained":
            return f"last groups and optimizer step of iteration {iteration}"
        case "checkpoint.written":
            return "checkpoint written"
        case kind if kind.startswith("trainer."):
            return event.message
    return None
