"""Which job of its pool a rollout serves. A pure rule on heartbeats, the same for all: nobody hands out places.

A rollout that is free goes where rollouts are fewest for what an iteration needs. It stays until the job ends, and
moves only where a job has none: a move costs an engine's start, so evenness alone is not worth one.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from onbeat.config import JobConfig
from onbeat.types import WorkerRecord


@dataclass(frozen=True)
class Candidate:
    """A job of the pool whose trainer serves weights."""

    job_id: str
    config: JobConfig
    is_paused: bool = False

    @property
    def num_responses(self) -> int:
        """Of an iteration."""
        return self.config.rollout.num_prompts_per_iteration * self.config.rollout.num_samples_per_prompt


def choose_job(jobs: Sequence[Candidate], workers: Sequence[WorkerRecord], worker_id: str) -> Candidate:
    """For a rollout without a job. `jobs`: running, the oldest first, at least one; `workers`: alive.

    Others without a job are placed by the same rule, in the order of their ids: so those that look at the same moment
    do not all go to the same place.
    """
    num_served = Counter(worker.job_id for worker in workers if worker.state != "draining")
    free = {worker.id for worker in workers if worker.job_id is None} | {worker_id}
    for free_id in sorted(free):
        chosen = min(jobs, key=lambda job: num_served[job.job_id] / job.num_responses)  # of equals the oldest
        if free_id == worker_id:
            break
        num_served[chosen.job_id] += 1
    return chosen


def find_move(jobs: Sequence[Candidate], workers: Sequence[WorkerRecord], worker_id: str) -> Candidate | None:
    """The job that this rollout is to leave its own for; None for all but one of the pool's rollouts.

    Somebody moves to a running job that has no rollout, from the job that has most for its needs and keeps one (none
    while it is paused). Not while anybody is on the way: who that is helps, or changes the picture.
    """
    if any(worker.job_id is None or worker.state == "draining" for worker in workers):
        return None
    members = {job.job_id: sorted(worker.id for worker in workers if worker.job_id == job.job_id) for job in jobs}
    starving = [job for job in jobs if not members[job.job_id] and not job.is_paused]
    givers = [job for job in jobs if len(members[job.job_id]) > (0 if job.is_paused else 1)]
    if not starving or not givers:
        return None
    giver = max(givers, key=lambda job: (job.is_paused, len(members[job.job_id]) / job.num_responses))
    return starving[0] if members[giver.job_id][0] == worker_id else None
