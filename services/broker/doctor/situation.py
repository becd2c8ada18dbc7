"""The ledger's data of one active job at one moment, read once, to be explained. Nothing is written here."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from onbeat.config import JobConfig
from onbeat.contracts.records import Event, Finding, TrainerRecord, WorkerRecord
from onbeat.contracts.states import JobState
from onbeat.streams import inspection
from onbeat.streams.inspection import PromptLease
from onbeat.streams.ledger import Ledger
from onbeat.streams.process_ends import PROCESS_ENDED
from onbeat.streams.records import Fields


@dataclass(frozen=True)
class Unit:
    """An iteration or evaluation whose prompts are out."""

    name: str
    fields: Fields
    waiting: list[str]  # entries of the prompts whose groups are not accepted


@dataclass(frozen=True)
class Situation:
    """The data of an active job, read once. Times are by the Redis clock."""

    job_id: str
    now: float
    fields: Fields
    config: JobConfig
    iterations: list[Unit]  # opened and not committed
    evaluations: list[Unit]  # not ended
    leases: dict[str, PromptLease]  # leases by entry
    workers: dict[str, WorkerRecord]  # workers of the pool
    trainers: dict[str, TrainerRecord]  # trainers of the pool
    events: list[Event]  # newest first
    num_before: int  # pending jobs of the pool that are older

    @property
    def owner(self) -> str:
        return self.fields.get("owner", "nobody")

    @property
    def lease_left_s(self) -> float:
        """The seconds left of the trainer's lease; negative: the seconds since it expired."""
        return float(self.fields.get("lease_until", "0")) - self.now

    @property
    def silent_s(self) -> float:
        """The seconds without progress."""
        return max(0.0, self.now - float(self.fields["progress_at"]))

    @property
    def state_since_s(self) -> float:
        moves = (event.time for event in self.events if event.kind == "job.state")
        return max(0.0, self.now - next(moves, float(self.fields["created_at"])))

    def end_of_owner(self) -> Event | None:
        """Return the event of the end of the job's trainer, as its supervisor saw it; None once one has taken over."""
        for event in self.events:
            if event.kind == "job.taken_over" or event.data.get("before") == JobState.PENDING:
                return None
            if event.kind == PROCESS_ENDED and event.data.get("process") == self.owner:
                return event
        return None

    def live_trainers(self, state: str) -> list[str]:
        return [t.id for t in self.trainers.values() if t.state == state and t.is_alive(self.now)]

    def busy_trainers(self) -> str:
        """Return `trainer-a trains job-1` of each living trainer with another job; '' if there is none."""
        busy = [t for t in self.trainers.values() if t.job_id not in (None, self.job_id) and t.is_alive(self.now)]
        return ", ".join(f"{trainer.id} trains {trainer.job_id}" for trainer in busy)

    def starting_trainer(self) -> str:
        """Return `trainer-a is starting` for one that loads its libraries; '' if none does."""
        starting = [trainer.id for trainer in self.trainers.values() if trainer.is_starting(self.now)]
        return f"{starting[0]} is starting" if starting else ""

    def live_workers(self) -> list[WorkerRecord]:
        return [worker for worker in self.workers.values() if worker.is_alive(self.now)]

    def find(self, sentence: str, **details: Any) -> Finding:
        return Finding(sentence=sentence, job_id=self.job_id, **details)


def held_by_worker(leases: Iterable[PromptLease]) -> dict[str, list[PromptLease]]:
    held: dict[str, list[PromptLease]] = {}
    for lease in leases:
        if not lease.is_handed_back:
            held.setdefault(lease.worker, []).append(lease)
    return held


async def read_situation(ledger: Ledger, fields: Fields) -> Situation:
    """Read a job's situation. Raises ValidationError when the job is not of this version."""
    job_id, config = fields["id"], JobConfig.of_job(fields)
    iterations, evaluations = [], []
    for number in range(int(fields["next_iteration"]), int(fields["num_opened"])):
        waiting = await inspection.waiting_entries(ledger, job_id, number)
        iterations.append(Unit(f"iteration {number}", await ledger.iterations.fields(job_id, number), waiting))
    for number in await ledger.evaluations.open_ones(job_id):
        waiting = await inspection.waiting_entries(ledger, job_id, number, is_evaluation=True)
        unit_fields = await ledger.evaluations.fields(job_id, number)
        evaluations.append(Unit(f"evaluation {number}", unit_fields, waiting))
    trainers = {trainer.id: trainer for trainer in await ledger.trainers.records(config.pool)}
    now = await ledger.now()
    (num_before,) = await ledger.lists.places(config.pool, [job_id])
    return Situation(
        job_id=job_id,
        now=now,
        fields=fields,
        config=config,
        iterations=iterations,
        evaluations=evaluations,
        leases=await inspection.read_leases(ledger, job_id),
        workers={worker.id: worker for worker in await ledger.workers.records(config.pool)},
        trainers=trainers,
        events=await inspection.newest_events(ledger, job_id),
        num_before=num_before or 0,
    )
