"""The limit on pending jobs of each API key, so that no caller can fill the queue for the others.

The ledger counts again in the step that creates or resumes a job, so that requests at once, to one broker or several,
stay within it. This look before it spares the review of jobs that would be refused.
"""

from dataclasses import dataclass

from onbeat.contracts.errors import TooManyPending
from onbeat.streams.ledger.job_lists import JobLists

ANYBODY = "anybody"  # the submitter of all jobs if there are no API keys


@dataclass(frozen=True)
class Quota:
    lists: JobLists
    limit: int

    async def check(self, submitter: str) -> None:
        """Raise TooManyPending if the submitter has no place left."""
        if (num_pending := await self.lists.num_waiting_of(submitter)) >= self.limit:
            raise TooManyPending(num_pending, self.limit)
