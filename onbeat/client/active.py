"""The jobs of a broker that are not over, and the newest iteration of a job."""

import asyncio

from onbeat.client.asynchronous import AsyncClient
from onbeat.contracts.errors import ApiError
from onbeat.contracts.records import MAX_LISTED_JOBS, IterationRecord, JobRecord
from onbeat.contracts.states import IterationState, JobState

NUM_NEWEST = 200  # jobs of any state in the first request


async def find_active(client: AsyncClient) -> list[JobRecord]:
    """Return jobs that are not over, at most MAX_LISTED_JOBS of each state."""
    newest = await client.jobs.list(limit=NUM_NEWEST)
    lists = [newest]
    if len(newest) == NUM_NEWEST:  # there are more
        states = [state for state in JobState if not state.is_final]
        lists += await asyncio.gather(*(client.jobs.list(state, MAX_LISTED_JOBS) for state in states))
    known = {job.id: job for jobs in lists for job in jobs}  # as last seen: a job may be in two lists
    return [job for job in known.values() if not job.state.is_final]


async def newest_iteration(client: AsyncClient, job: JobRecord) -> IterationRecord | None:
    """Return the newest committed iteration of a job; None without one of its own."""
    if job.next_iteration <= job.first_iteration:
        return None
    try:
        records = await client.jobs.iterations(job.id, after=job.next_iteration - 2)
    except ApiError as error:
        if error.status == 404:  # the job was just deleted
            return None
        raise
    committed = [record for record in records if record.state is IterationState.COMMITTED]
    return committed[-1] if committed else None
