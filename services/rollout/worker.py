"""The rollout replica: it finds a running job of the pool, serves it, and repeats. No other replica depends on it."""

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import Iterator, Mapping

from pydantic import ValidationError

from onbeat.config import JobConfig
from onbeat.contracts.deadlines import HEARTBEAT_S
from onbeat.contracts.records import EngineFailure, WorkerRecord
from onbeat.contracts.states import JobState
from onbeat.machine.malloc import give_back_freed
from onbeat.machine.memory import read_memory
from onbeat.machine.processor import Hardware
from onbeat.streams.best_effort import best_effort
from onbeat.streams.inspection import existing_jobs
from onbeat.streams.ledger import Ledger
from services.rollout.attach import Factories, ModelNotLoaded
from services.rollout.choice import Candidate, choose_job, find_move
from services.rollout.claim_loop import Assignment
from services.rollout.deadlines import FAREWELL_S
from services.rollout.session import SERVED_STATES, RolloutSession
from services.rollout.settings import Settings

logger = logging.getLogger(__name__)

FIND_JOB_S = 0.5
STATE_CHECK_S = 0.1  # a change of state is reported this soon
MOVE_CHECK_S = 15.0  # a move has to be due at two checks in a row


class Worker:
    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        hardware: Hardware,
        factories: Factories,
        devices: list[str] | None = None,
    ) -> None:
        """Take the jobs of one pool. `devices`: those that the engine computes on, for heartbeats; None: not known."""
        self._settings, self._ledger, self._hardware, self._devices = settings, ledger, hardware, devices
        self._factories = factories
        self._stopping = asyncio.Event()
        self._session: RolloutSession | None = None
        self._unsuited_for: list[str] = []  # active jobs that this rollout cannot serve
        self._is_unsuited = False  # these are all jobs of the pool
        self._engine_failures: dict[str, EngineFailure] = {}  # failures by id, while the job is active

    async def run(self) -> None:
        """Serve jobs until `stop` is called. Raises what this process cannot cure: Redis errors, EngineBroken, ..."""
        try:
            # At once: others count it when they choose.
            await self._ledger.workers.heartbeat(self._settings.pool, self._record())
            await self._ledger.workers.forget_old(self._settings.pool)
            async with asyncio.TaskGroup() as tasks:
                background = [tasks.create_task(work) for work in (self._send_heartbeats(), self._move_if_needed())]
                await self._serve_jobs()
                for task in background:
                    task.cancel()
        finally:
            await self._say_farewell()

    def stop(self) -> None:
        """Finish what is in flight, then end; when called again, end at once."""
        logger.info("asked to stop")
        self._stopping.set()
        if self._session is not None:
            self._session.stop()

    @property
    def job_id(self) -> str | None:
        return self._session.job_id if self._session is not None else None

    async def _serve_jobs(self) -> None:
        logger.info("%s waits for jobs of pool %s", self._settings.worker_id, self._settings.pool)
        while not self._stopping.is_set():
            job = await self._find_job()
            if job is None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), FIND_JOB_S)
                continue
            if self._stopping.is_set():
                return
            await self._serve(job)
            gc.collect()
            give_back_freed()

    async def _serve(self, job: Candidate) -> None:
        """Serve a job until this rollout leaves it, which is at once if the engine cannot load its model."""
        self._session = RolloutSession(
            Assignment(self._settings, self._ledger, job.job_id, job.config), self._factories
        )
        logger.info("serving job %s", job.job_id)
        await self._emit(job.job_id, "worker.joined", self._settings.worker_id)
        try:
            await self._session.run()
        except* ModelNotLoaded as errors:
            error = next(leaf for leaf in leaves_of(errors) if isinstance(leaf, ModelNotLoaded))
            failure = EngineFailure(epoch=job.epoch, cause=str(error), is_of_files=error.is_of_files)
            self._engine_failures[job.job_id] = failure
            message = f"{self._settings.worker_id}: the engine cannot load the model: {error}"
            await self._emit(job.job_id, "worker.model_failed", message)
        await self._emit(job.job_id, "worker.left", self._settings.worker_id)
        self._session = None  # it holds the pulled weights

    async def _find_job(self) -> Candidate | None:
        running = [job for job in await self._candidates() if not job.is_paused]
        if not running:
            return None
        workers = await self._ledger.workers.live(self._settings.pool)
        job = choose_job(running, workers, self._settings.worker_id)
        if job.config.model.dtype == "bfloat16" and self._hardware.bfloat16 == "emulated":
            slow = "expect it to be many times slower than in float32"
            warning = f"computes in the job's bfloat16 without instructions for it: {slow} ({self._hardware})"
            await self._warn(job.job_id, warning)
        return job

    async def _move_if_needed(self) -> None:
        """Leave the job for one that has no rollout, once `find_move` has returned it twice in a row."""
        due_before = None
        while True:
            await asyncio.sleep(MOVE_CHECK_S)
            workers = await self._ledger.workers.live(self._settings.pool)
            move = find_move(await self._candidates(), workers, self._settings.worker_id)
            due = (self.job_id, move.job_id) if move is not None else None
            if self._session is not None and due is not None and due == due_before:
                logger.info("leaving job %s: job %s has no rollout", *due)
                self._session.leave()
            due_before = due

    async def _candidates(self) -> list[Candidate]:
        """Return the pool's jobs that can be served, oldest first. Users of the others are warned once."""
        candidates, unsuited_for, warnings = [], [], []
        jobs = await existing_jobs(self._ledger, await self._ledger.lists.started())
        for job_id, fields in jobs.items():
            is_ours = fields.get("pool") == self._settings.pool and fields["state"] in SERVED_STATES
            if not is_ours or "weights_address" not in fields:
                continue
            config = self._read_config(fields)
            failure = self._engine_failures.get(job_id)
            if isinstance(config, JobConfig) and not config.has_rollouts:
                continue
            if isinstance(config, JobConfig) and (failure is None or failure.epoch != fields["epoch"]):
                is_paused = fields["state"] == JobState.PAUSED
                candidates.append(Candidate(job_id, config, is_paused, fields["epoch"]))
                continue
            unsuited_for.append(job_id)
            if isinstance(config, JobConfig):  # the engine failed, which was reported then
                continue
            if job_id not in self._unsuited_for:
                warnings.append((job_id, f"does not serve the job: {config}"))
        self._unsuited_for, self._is_unsuited = unsuited_for, bool(unsuited_for) and not candidates
        still_failed = [job_id for job_id in self._engine_failures if job_id in unsuited_for]
        self._engine_failures = {job_id: self._engine_failures[job_id] for job_id in still_failed}
        for job_id, warning in warnings:
            await self._warn(job_id, warning)
        return candidates

    def _read_config(self, fields: Mapping[str, str]) -> JobConfig | str:
        """Return the job as this rollout would serve it, or why it cannot serve it."""
        try:
            config = JobConfig.of_job(fields)
        except (ValidationError, LookupError) as error:
            return f"it runs another version of Onbeat, which does not know the job: {error}"
        if config.model.dtype == "bfloat16" and self._hardware.bfloat16 == "missing":
            reason = f"its {self._hardware} cannot compute in the job's bfloat16"
            return f"{reason}; submit the job with model.dtype = auto or float32"
        return config

    async def _warn(self, job_id: str, problem: str) -> None:
        warning = f"{self._settings.worker_id} {problem}"
        logger.warning("job %s: %s", job_id, warning)
        await self._ledger.event_log.emit(job_id, "job.warning", warning)

    async def _emit(self, job_id: str, kind: str, message: str) -> None:
        await self._ledger.event_log.emit(job_id, kind, message, {"worker_id": self._settings.worker_id})

    async def _send_heartbeats(self) -> None:
        """Send a heartbeat every HEARTBEAT_S and at every change."""
        last, last_sent = None, 0.0
        while True:
            record = self._record()
            place = (record.job_id, record.state, record.doing, record.policy_version)
            current = (*place, record.unsuited_for, record.engine_failures)
            if current != last or time.monotonic() - last_sent >= HEARTBEAT_S:
                await self._ledger.workers.heartbeat(self._settings.pool, record)
                last, last_sent = current, time.monotonic()
            await asyncio.sleep(STATE_CHECK_S)

    def _record(self) -> WorkerRecord:
        settings = self._settings
        record = WorkerRecord(
            id=settings.worker_id,
            state="unsuited" if self._is_unsuited else "idle",
            lease_s=settings.lease_s,
            num_devices=settings.tensor_parallel_size,
            hardware=str(self._hardware),
            bfloat16=self._hardware.bfloat16,
            unsuited_for=self._unsuited_for,
            engine_failures=dict(self._engine_failures),
            host=read_memory(),
            devices=self._devices,
        )
        return record if self._session is None else record.model_copy(update=self._session.report())

    async def _say_farewell(self) -> None:
        with best_effort(f"Redis still lists {self._settings.worker_id}"):
            async with asyncio.timeout(FAREWELL_S):
                await self._ledger.workers.remove(self._settings.pool, self._settings.worker_id)


def leaves_of(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """Yield the errors of a group and of the groups in it."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from leaves_of(error)
        else:
            yield error
