"""`AsyncClient`: the client of a broker for code with an event loop."""

from functools import cached_property

from onbeat.client.datasets import AsyncDatasets
from onbeat.client.jobs import AsyncJobs, parse_list
from onbeat.client.transport import Transport, checked_name, read_record
from onbeat.contracts.records import Diagnosis, PoolStatus, WorkerRecord


class AsyncClient(Transport):
    """An async REST client; use it as `async with AsyncClient(url) as client`."""

    @cached_property
    def jobs(self) -> AsyncJobs:
        return AsyncJobs(self)

    @cached_property
    def datasets(self) -> AsyncDatasets:
        return AsyncDatasets(self)

    def __repr__(self) -> str:
        return f"AsyncClient({self.base_url!r})"

    async def workers(self, pool: str | None = None) -> list[WorkerRecord]:
        """Return the rollouts of a pool (default: `default`), as of their last heartbeats."""
        return parse_list(WorkerRecord, "workers", await self.get("/v1/workers", pool=pool))

    async def pool(self, pool: str) -> PoolStatus:
        """Return the work of a pool, and the processes that are there for it."""
        name = checked_name(pool, "the name of a pool; `pool` of a job names it")
        return read_record(PoolStatus, await self.get(f"/v1/pools/{name}"))

    async def doctor(self) -> Diagnosis:
        """Return the problems of the installation, and what every active job waits for."""
        return read_record(Diagnosis, await self.get("/v1/doctor"))
