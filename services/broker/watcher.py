"""One active job: opens its iterations, ends it when it is stuck or abandoned. Holds nothing that must survive."""

import asyncio
import logging

from onbeat.config import JobConfig
from onbeat.errors import IllegalTransition
from onbeat.streams.codec import PromptTask
from onbeat.streams.ledger import Ledger
from onbeat.types import JobState
from services.broker.datasets import DatasetError
from services.broker.datasets.process import DatasetProcess
from services.broker.evaluations import Evaluator
from services.broker.tasks import produce_tasks

logger = logging.getLogger(__name__)

WAIT_S = 1.0  # longest time between two looks at a job
CANCEL_GRACE_S = 120.0  # a trainer that holds its lease has this long to stop after a cancel

Fields = dict[str, str]


class JobWatcher:
    def __init__(self, ledger: Ledger, process: DatasetProcess, job_id: str) -> None:
        self._ledger, self._process, self._job_id = ledger, process, job_id
        self._config: JobConfig | None = None
        self._prepared: dict[int, asyncio.Task[list[PromptTask]]] = {}
        self._evaluator = Evaluator(ledger, process, job_id)

    async def run(self) -> None:
        """Returns when the job is final. Raises JobNotFound, and redis' errors when Redis stays away."""
        cursor = "0"
        try:
            while not await self.step():
                events = await self._ledger.events(self._job_id, after=cursor, timeout_s=WAIT_S)
                cursor = events[-1].id if events else cursor
        finally:
            for task in self._prepared.values():
                task.cancel()
            await asyncio.gather(*self._prepared.values(), return_exceptions=True)
            await self._evaluator.close()

    async def step(self) -> bool:
        """Do what is undone; True when the job is final."""
        fields = await self._ledger.job_fields(self._job_id)
        state = JobState(fields["state"])
        if state.is_final:
            return True
        if self._config is None:
            self._config = JobConfig.model_validate_json(fields["config"])
        if state is JobState.PENDING:
            self._prepare(self._config, int(fields["num_opened"]))
            self._evaluator.prepare(self._config)
        elif state is JobState.RUNNING:
            await self._open_if_due(self._config, fields)
            await self._evaluator.step(self._config, fields)
            await self._fail_if_stuck(self._config)
        elif state is JobState.CANCELLING:
            await self._cancel_if_abandoned(fields)
        return False

    # ---- opening -------------------------------------------------------------------------------------------------

    async def _open_if_due(self, config: JobConfig, fields: Fields) -> None:
        """The next iteration is due when its version may generate it; a newer one is waited for while rollouts have
        prompts to claim."""
        iteration, version = int(fields["num_opened"]), int(fields.get("policy_version", "-1"))
        if iteration >= config.schedule.num_iterations:
            return
        self._prepare(config, iteration)
        if version < max(0, iteration - config.max_staleness):
            return
        if version < iteration and await self._ledger.num_unclaimed_prompts(self._job_id):
            return
        try:
            tasks = await self._take_tasks(config, iteration)
        except DatasetError as error:
            await self._move(JobState.FAILED, f"iteration {iteration} has no prompts: {error}")
            return
        reason = await self._ledger.open_iteration(self._job_id, iteration, version, tasks)
        if reason:
            logger.debug("job %s: iteration %d was not opened: %s", self._job_id, iteration, reason)
            return
        logger.info("job %s: iteration %d is open on version %d", self._job_id, iteration, version)
        self._prepare(config, iteration + 1)

    def _prepare(self, config: JobConfig, iteration: int) -> None:
        """Produce the prompts of an iteration ahead of time; those of earlier ones are forgotten."""
        for old in [number for number in self._prepared if number < iteration - 1]:
            self._prepared.pop(old).cancel()
        if iteration not in self._prepared and iteration < config.schedule.num_iterations:
            work = produce_tasks(config, iteration, self._process)
            self._prepared[iteration] = asyncio.create_task(work, name=f"prompts {self._job_id} {iteration}")

    async def _take_tasks(self, config: JobConfig, iteration: int) -> list[PromptTask]:
        """Raises DatasetError when it fails twice: ahead of time, and now."""
        try:
            return await self._prepared[iteration]
        except DatasetError as error:
            logger.warning("job %s: prompts of iteration %d failed, trying again: %s", self._job_id, iteration, error)
            return await produce_tasks(config, iteration, self._process)

    # ---- ending --------------------------------------------------------------------------------------------------

    async def _fail_if_stuck(self, config: JobConfig) -> None:
        fields = await self._ledger.job_fields(self._job_id)  # anew: we or another broker may just have moved it
        deadline_s = config.schedule.iteration_deadline_s
        silent_s = await self._ledger.now() - float(fields["progress_at"])
        if silent_s > deadline_s and not await self._evaluator.give_up(silent_s):  # it may have been what held us up
            await self._move(JobState.FAILED, await self._explain(config, fields, silent_s))

    async def _explain(self, config: JobConfig, fields: Fields, silent_s: float) -> str:
        """`iteration 3 made no progress for 1800 s: 5 of 8 groups accepted; workers seen: ...`"""
        iteration = int(fields["next_iteration"])
        opened = await self._ledger.iteration_fields(self._job_id, iteration)
        if iteration >= config.schedule.num_iterations:
            what = "all iterations are committed, but the trainer did not finish the job"
        elif opened:
            what = f"{opened['num_accepted']} of {opened['num_groups']} groups accepted"
        else:
            published = fields.get("policy_version", "none")
            what = f"not opened: it needs policy version {max(0, iteration - config.max_staleness)}, and trainer "
            what += f"{fields.get('owner')} has published {published}"
        now = await self._ledger.now()
        workers = [
            f"{worker.id} ({worker.state}, {max(0.0, now - worker.last_seen_at):.0f} s ago)"
            for worker in await self._ledger.workers(config.pool)
        ]
        seen = ", ".join(workers) or f"none in pool {config.pool}; start a rollout"
        return f"iteration {iteration} made no progress for {silent_s:.0f} s: {what}; workers seen: {seen}"

    async def _cancel_if_abandoned(self, fields: Fields) -> None:
        """A cancelled job is ended by its trainer; without one, or when it does not react, by us."""
        now = await self._ledger.now()
        has_trainer = float(fields.get("lease_until", "0")) > now
        if not has_trainer or now - float(fields["progress_at"]) > CANCEL_GRACE_S:
            await self._move(JobState.CANCELLED)

    async def _move(self, wanted: JobState, error: str = "") -> None:
        try:
            await self._ledger.move_job(self._job_id, wanted, error)
            logger.info("job %s is %s %s", self._job_id, wanted, error)
        except IllegalTransition as conflict:  # another broker or the trainer was faster
            logger.info("%s", conflict)
