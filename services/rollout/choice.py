"""The rule by which a rollout chooses a job of its pool. It is a pure function of heartbeats and the same for every
rollout, so there is no central scheduler.

A free rollout joins the job with the fewest rollouts for what an iteration needs. It stays until the job ends, and
moves only to a job that has none: a move costs an engine start, so evenness alone is not worth one.
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
        """The number of responses in an iteration."""
        return self.config.rollout.num_prompts_per_iteration * self.config.rollout.num_samples_per_prompt


def choose_job(jobs: Sequence[Candidate], workers: Sequence[WorkerRecord], worker_id: str) -> Candidate:
    """Return the job for a rollout that has none. `jobs`: running, oldest first, at least one; `workers`: alive.

    Other rollouts without a job are placed by the same rule, in the order of their ids, so that rollouts that look at
    the same moment do not all choose the same job.
    """
    workers = suited(workers)
    num_served = Counter(worker.job_id for worker in workers if worker.state != "draining")
    free = {worker.id for worker in workers if worker.job_id is None} | {worker_id}
    for free_id in sorted(free):
        chosen = min(jobs, key=lambda job: num_served[job.job_id] / job.num_responses)  # ties go to the oldest
        if free_id == worker_id:
            break
        num_served[chosen.job_id] += 1
    return chosen


def suited(workers: Sequence[WorkerRecord]) -> list[WorkerRecord]:
    return [worker for worker in workers if worker.state != "unsuited"]


def find_move(jobs: Sequence[Candidate], workers: Sequence[WorkerRecord], worker_id: str) -> Candidate | None:
    """Return the job that this rollout should move to, or None.

    One rollout moves at a time, to a running job that has none: the first (by id) that can compute in its dtype, of the
    job with the most for its needs, which keeps one unless it is paused; paused jobs give first. No rollout moves while
    another is unassigned or draining, because that one may help or change the picture.
    """
    workers = suited(workers)
    if any(worker.job_id is None or worker.state == "draining" for worker in workers):
        return None
    members = {job.job_id: [worker for worker in workers if worker.job_id == job.job_id] for job in jobs}
    starving = [job for job in jobs if not members[job.job_id] and not job.is_paused]
    if not starving:
        return None
    able = {job_id: sorted(one.id for one in own if can_serve(one, starving[0])) for job_id, own in members.items()}
    givers = [job for job in jobs if able[job.job_id] and len(members[job.job_id]) > (0 if job.is_paused else 1)]
    if not givers:
        return None
    giver = max(givers, key=lambda job: (job.is_paused, len(members[job.job_id]) / job.num_responses))
    return starving[0] if able[giver.job_id][0] == worker_id else None


def can_serve(worker: WorkerRecord, job: Candidate) -> bool:
    return job.config.model.dtype != "bfloat16" or worker.bfloat16 != "missing"
