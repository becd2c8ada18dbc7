"""REST of pools: their work and their processes, the numbers that an autoscaler asks for."""

from typing import Annotated

from fastapi import APIRouter, Path

from onbeat.contracts.records import PoolStatus
from onbeat.contracts.states import JobState
from onbeat.streams.inspection import existing_jobs, stream_lengths
from services.broker.api.context import Broker
from services.broker.api.problems import documented

router = APIRouter(prefix="/v1/pools", tags=["pools"], responses=documented(422, 503))

STARTED = (JobState.RUNNING, JobState.PAUSED, JobState.CANCELLING)

PoolName = Annotated[str, Path(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]


@router.get("/{pool}")
async def get_pool(pool: PoolName, broker: Broker) -> PoolStatus:
    """Count the waiting prompts, trainers and rollouts of a pool, for autoscalers. An unknown pool has zeros.

    Waiting prompts are those of running jobs that have no accepted group yet.
    """
    ledger = broker.ledger
    trainers, now = await ledger.trainers.records(pool), await ledger.now()
    status = PoolStatus(
        pool=pool,
        num_trainers=sum(trainer.is_alive(now) for trainer in trainers),
        num_starting_trainers=sum(trainer.is_starting(now) for trainer in trainers),
        num_rollouts=len(await ledger.workers.live(pool)),
    )
    started = await existing_jobs(ledger, await ledger.lists.started())
    ours = {job_id: fields["state"] for job_id, fields in started.items() if fields.get("pool") == pool}
    waiting = await ledger.lists.num_waiting(pool)
    status.num_jobs = waiting + sum(state in STARTED for state in ours.values())
    for job_id, state in ours.items():
        if state == JobState.RUNNING:
            lengths = await stream_lengths(ledger, job_id)
            status.num_prompts += lengths.num_prompts
            status.num_unclaimed_prompts += lengths.num_unclaimed
    return status
