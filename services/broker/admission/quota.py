"""The limit on pending jobs of each API key, so that no caller can fill the queue for the others."""

import contextlib
from collections import Counter
from collections.abc import AsyncIterator

from onbeat.contracts.errors import OnbeatError
from onbeat.streams.ledger.job_lists import JobLists

ANYBODY = "anybody"  # the submitter of all jobs if there are no API keys


class QuotaExceeded(OnbeatError):
    def __init__(self, num_waiting: int, limit: int) -> None:
        super().__init__(
            f"{num_waiting} jobs of this API key are pending, and at most {limit} may be (ONBEAT_MAX_PENDING_JOBS of "
            "the broker); wait until some have started, or cancel some"
        )


class Quota:
    """The quota of one broker. Several brokers may admit a few more: none sees the jobs that others are creating."""

    def __init__(self, lists: JobLists, limit: int) -> None:
        self._lists, self._limit = lists, limit
        self._being_created: Counter[str] = Counter()

    @contextlib.asynccontextmanager
    async def place(self, submitter: str) -> AsyncIterator[None]:
        """Hold a place while a job is being created. Raises QuotaExceeded."""
        self._being_created[submitter] += 1
        try:
            num_before = await self._lists.num_waiting_of(submitter) + self._being_created[submitter] - 1
            if num_before >= self._limit:
                raise QuotaExceeded(num_before, self._limit)
            yield
        finally:
            self._being_created[submitter] -= 1
