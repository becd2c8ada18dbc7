"""A job's session on this rollout: attach -> serve -> drain -> detach. Afterwards nothing of the session is left."""

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from onbeat.contracts.errors import JobNotFound, WeightsError
from onbeat.contracts.states import JobState
from onbeat.engines import EngineBroken
from onbeat.process.temporary import private_folder
from services.rollout.attach import Attachment, Factories, Parts
from services.rollout.claim_loop import Assignment, Ends
from services.rollout.puller import WeightsPuller

logger = logging.getLogger(__name__)

SERVED_STATES = (JobState.RUNNING, JobState.PAUSED)
FOLLOW_S = 1.0
WATCH_S = 1.0

T = TypeVar("T")


class RolloutSession:
    def __init__(self, job: Assignment, factories: Factories) -> None:
        self.job_id = job.job_id
        self._settings, self._ledger = job.settings, job.ledger
        self._ends = Ends()
        self._is_stopping = False
        self._attachment = Attachment(job, factories, self._ends)
        self._parts: Parts | None = None

    async def run(self) -> None:
        """Serve until the job is over or `stop` is called. Raises EngineBroken and Redis errors, and ModelNotLoaded in
        an ExceptionGroup."""
        async with AsyncExitStack() as cleanup:
            staging_dir = cleanup.enter_context(private_folder("onbeat-rollout-", self._settings.staging_dir))
            puller = await self._attachment.create_puller(cleanup)
            async with asyncio.TaskGroup() as tasks:
                early = (self._follow_job(), self._follow_weights(puller))
                background = [tasks.create_task(work) for work in early]
                parts = self._parts = await self._unless_ending(self._attachment.attach(cleanup, staging_dir, puller))
                if parts is not None:
                    steady = (parts.loop.keep_leases(), load_when_idle(parts, puller), watch_idle_engine(parts))
                    background += [tasks.create_task(work) for work in steady]
                    if parts.visitors is not None:
                        background.append(tasks.create_task(parts.visitors.serve()))
                    await parts.loop.serve()
                    await parts.loop.drain()
                for task in background:
                    task.cancel()

    def stop(self) -> None:
        """Drain and leave; when called again, leave at once."""
        if self._is_stopping:
            self._ends.abandon.set()
        self._is_stopping = True
        self._ends.drain.set()

    def leave(self) -> None:
        """Drain and leave, because another job needs this rollout more."""
        self._ends.drain.set()

    # ---- reported in heartbeats ----------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """Return the fields of a WorkerRecord that describe this session."""
        if self._parts is None:
            state = self._state("starting")
            doing = self._attachment.doing if state == "starting" else ""
            return {"job_id": self.job_id, "state": state, "doing": doing}
        flights = list(self._parts.loop.flights.values())
        busy = "updating" if self._parts.gate.is_updating else "generating" if flights else "idle"
        waits = [wait for flight in flights if (wait := flight.wait)]
        return {
            "job_id": self.job_id,
            "state": self._state(busy),
            "doing": next((doing for flight in flights if (doing := flight.doing)), ""),
            "waiting_episode": max(waits, key=lambda wait: wait.waited_s, default=None),
            "policy_version": self._parts.engine.version(),
            "num_in_flight": len(flights),
            "tokens_per_s": self._parts.generation.token_rate.per_second(),
        }

    def _state(self, otherwise: str) -> str:
        return "draining" if self._ends.drain.is_set() else otherwise

    # ---- in the background ---------------------------------------------------------------------------------------

    async def _follow_job(self) -> None:
        """Watch for the end of the job, and count the workers that share it."""
        while True:
            if not await self._is_served():
                logger.info("job %s needs no more rollouts", self.job_id)
                self._ends.drain.set()
                self._ends.abandon.set()
            if self._parts is not None:
                self._parts.loop.num_workers = 1 + await self._num_peers()
            await asyncio.sleep(FOLLOW_S)

    async def _follow_weights(self, puller: WeightsPuller) -> None:
        """Follow the weights as soon as the model is fetched, even while the engine still starts."""
        await self._attachment.has_model.wait()
        await puller.announcements.follow()

    async def _is_served(self) -> bool:
        try:
            return await self._ledger.jobs.state(self.job_id) in SERVED_STATES
        except JobNotFound:
            return False

    async def _num_peers(self) -> int:
        return sum(
            worker.job_id == self.job_id
            and worker.id != self._settings.worker_id
            and worker.state in ("idle", "updating", "generating")
            for worker in await self._ledger.workers.live(self._settings.pool)
        )

    async def _unless_ending(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of the work, or cancel the work and return None if the drain begins first."""
        working, ending = asyncio.create_task(work), asyncio.create_task(self._ends.drain.wait())
        try:
            await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            ending.cancel()
            working.cancel()
            await asyncio.wait({working})


async def watch_idle_engine(parts: Parts) -> None:
    """Raise EngineBroken when the engine dies while no group asks it; groups in flight get EngineDied themselves."""
    while hasattr(parts.engine, "is_dead"):
        await asyncio.sleep(WATCH_S)
        if parts.engine.is_dead and not parts.loop.flights:
            raise EngineBroken("the engine has died while it was idle")


async def load_when_idle(parts: Parts, puller: WeightsPuller) -> None:
    """Load each new version when it is announced, if no group is in flight, so that the first prompt need not wait."""
    while True:
        version = await puller.announcements.wait()
        if version is not None and not parts.loop.flights:
            try:
                await parts.gate.advance(version)
            except WeightsError as error:
                logger.warning("policy version %d is not loaded before it is asked for: %s", version, error)
