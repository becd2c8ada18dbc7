"""The decision whether any rollout can load a job's model, by the heartbeats of its pool. It is a pure function.

Each rollout tries the model once in an epoch of the job, that is until it is resumed or has another trainer:

    heartbeat of the rollout                             | means
    -----------------------------------------------------|---------------------------------------------------------
    alive, a failure of this epoch                       | it has tried, and serves other jobs
    serves the job, alive or silent for a short time     | it tries, or has loaded the model: the job waits for it
    alive without a job, or announces its start          | it is about to try, unless it cannot serve the job
    serves another job                                   | it has not tried, and is not waited for

A rollout that died while it loaded the model, as from a lack of memory, leaves no failure: it tries again.
"""

from collections.abc import Sequence

from onbeat.contracts.records import WorkerRecord
from services.broker.deadlines import RECENT_S


def why_not_loaded(job_id: str, epoch: str, workers: Sequence[WorkerRecord], now: float) -> str:
    """Return why no rollout can load the job's model, with the rollouts that tried; '' while one may."""
    failures = {
        worker.id: failure
        for worker in workers
        if worker.is_alive(now) and (failure := worker.engine_failures.get(job_id)) and failure.epoch == epoch
    }
    if not failures:
        return ""
    others = [worker for worker in workers if worker.id not in failures]
    is_decided = any(failure.is_of_files for failure in failures.values())
    if not is_decided and any(may_load(worker, job_id, now) for worker in others):
        return ""
    rollouts: dict[str, list[str]] = {}
    for worker_id, failure in failures.items():
        rollouts.setdefault(failure.cause, []).append(worker_id)
    causes = "; ".join(f"{cause} (on {', '.join(ids)})" for cause, ids in rollouts.items())
    return f"the engine cannot load the model: {causes}"


def may_load(worker: WorkerRecord, job_id: str, now: float) -> bool:
    """Return whether the rollout has loaded the job's model, tries it, or is about to."""
    if worker.job_id == job_id:
        return worker.silence_s(now) < RECENT_S
    is_free = worker.is_alive(now) and worker.state == "idle" and worker.job_id is None
    return worker.is_starting(now) or (is_free and job_id not in worker.unsuited_for)
