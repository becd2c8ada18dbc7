"""The rule by which a rollout chooses a job of its pool. It is a pure function of heartbeats and the same for every
rollout, so there is no central scheduler.

A free rollout joins the job with the fewest rollouts for what an iteration needs. It stays until the job ends, and
moves only to a job that has none: a move costs an engine start, so evenness alone is not worth one.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from onbeat.config import JobConfig
from onbeat.contracts.records import WorkerRecord


@dataclass(frozen=True)
class Candidate:
    """A job of the pool whose trainer serves weights."""

    job_id: str
    config: JobConfig
    is_paused: bool = False
    epoch: str = ""

    @property
    def num_responses(self) -> int:
        """The number of responses in an iteration."""
        return self.config.rollout.num_prompts_per_iteration * self.config.rollout.num_samples_per_prompt


def choose_job(jobs: Sequence[Candidate], workers: Sequence[WorkerRecord], worker_id: str) -> Candidate:
    """Return the job for a rollout that has none. `jobs`: running, oldest first, at least one; `workers`: alive.

    Other rollouts without a job are placed first by the same rule if their ids come first, so that rollouts that look
    at the same moment do not all choose the same job.
    """
    num_served = Counter(worker.job_id for worker in workers if worker.state != "draining")

    def least_served(candidates: Sequence[Candidate]) -> Candidate:
        return min(candidates, key=lambda job: num_served[job.job_id] / job.num_responses)  # ties go to the oldest

    earlier = [worker for worker in workers if worker.job_id is None and worker.id < worker_id]
    for worker in sorted(earlier, key=lambda rollout: rollout.id):
        if able := [job for job in jobs if can_serve(worker, job)]:
            num_served[least_served(able).job_id] += 1
    return least_served(jobs)


def find_move(jobs: Sequence[Candidate], workers: Sequence[WorkerRecord], worker_id: str) -> Candidate | None:
    """Return the job that this rollout should move to, or None.

    One rollout moves at a time, to a running job that has none: the first (by id) that can serve it, of the job with
    the most for its needs, which keeps one unless it is paused; paused jobs give first. No rollout moves while another
    is unassigned that could serve the job, or is draining, because that may change the picture.
    """
    members = {job.job_id: [worker for worker in workers if worker.job_id == job.job_id] for job in jobs}
    starving = [job for job in jobs if not members[job.job_id] and not job.is_paused]
    if not starving:
        return None
    unassigned = [worker for worker in workers if worker.job_id is None and can_serve(worker, starving[0])]
    if unassigned or any(worker.state == "draining" for worker in workers):
        return None
    able = {
        job_id: sorted(worker.id for worker in serving if can_serve(worker, starving[0]))
        for job_id, serving in members.items()
    }
    givers = [job for job in jobs if able[job.job_id] and len(members[job.job_id]) > (0 if job.is_paused else 1)]
    if not givers:
        return None
    giver = max(givers, key=lambda job: (job.is_paused, len(members[job.job_id]) / job.num_responses))
    return starving[0] if able[giver.job_id][0] == worker_id else None


def can_serve(worker: WorkerRecord, job: Candidate) -> bool:
    """Return whether the rollout can serve the job, as far as it is known: it may not have looked at the job yet."""
    has_dtype = job.config.model.dtype != "bfloat16" or worker.bfloat16 != "missing"
    return has_dtype and worker.state != "unsuited" and job.job_id not in worker.unsuited_for
