"""The watcher of one active job: it opens the job's iterations, and ends the job when it is stuck or abandoned. It
holds no state that must survive."""

import logging
import time

from pydantic import ValidationError

from onbeat.config import JobConfig
from onbeat.config.explain import first_wrong
from onbeat.contracts.errors import IllegalTransition, StreamLost
from onbeat.contracts.sharing import sharing_of
from onbeat.contracts.states import JobState
from onbeat.streams import inspection
from onbeat.streams.ledger import Ledger
from onbeat.streams.records import Fields
from services.broker.datasets import DatasetError
from services.broker.datasets.process import DatasetProcess
from services.broker.deadlines import (
    ARRIVAL_S,
    CANCEL_GRACE_S,
    JOB_FAILS,
    num_lost_trainers,
    queued_at,
    trainers_away_s,
)
from services.broker.doctor.explain import explain_work
from services.broker.engine_failures import why_not_loaded
from services.broker.evaluations import Evaluator
from services.broker.prompts import Contents, JobPrompts
from services.broker.tasks import longest_first

logger = logging.getLogger(__name__)

WAIT_S = 1.0  # longest time between two looks at a job
PENDING_WAIT_S = 5.0  # longest time between two looks at a job that no trainer has started
MAX_REASONS = 8  # findings that are stored with a failure


def read_config(fields: Fields) -> JobConfig | None:
    """Return the job's configuration; None for another version's, whose broker conducts it. The doctor says so, too."""
    try:
        return JobConfig.of_job(fields)
    except ValidationError as error:
        logger.warning("job %s is left to brokers of another version of Onbeat: %s", fields["id"], first_wrong(error))
        return None


class JobWatcher:
    def __init__(self, ledger: Ledger, process: DatasetProcess, job_id: str) -> None:
        self._ledger, self._job_id = ledger, job_id
        self._config: JobConfig | None = None  # also None: it is of another version of Onbeat
        self._config_text: tuple[str | None, ...] = ()
        self._prompts = JobPrompts(ledger, process, job_id)
        self._evaluator = Evaluator(ledger, process, job_id)
        self._wait_s, self._began = WAIT_S, time.monotonic()
        self._seen_epoch = "0"  # epoch of the trainer whose predecessors have been counted
        self._progress_at, self._progress_seen = "", 0.0  # the latter by time.monotonic()

    async def run(self) -> None:
        """Run until the job is final. Raises JobNotFound, and Redis errors when Redis stays unreachable."""
        cursor = "0"
        try:
            while not await self.step():
                events = await self._ledger.event_log.read(self._job_id, after=cursor, timeout_s=self._wait_s)
                cursor = events[-1].id if events else cursor
        finally:
            await self._prompts.close()
            await self._evaluator.close()

    async def step(self) -> bool:
        """Take the actions that are due. Return whether the job is final."""
        fields = await self._ledger.jobs.fields(self._job_id)
        state = JobState(fields["state"])
        if state.is_final:
            return True
        self._wait_s = PENDING_WAIT_S if state is JobState.PENDING else WAIT_S
        if state is JobState.CANCELLING:
            await self._cancel_if_abandoned(fields)
            return False
        text = fields["config"], fields.get("dtype")
        if text != self._config_text:  # a resume may have added iterations
            self._config, self._config_text = read_config(fields), text
        if (config := self._config) is None:
            return False
        if state is JobState.PENDING:
            self._prompts.prepare(config, int(fields["num_opened"]))
            self._evaluator.prepare(config)
            deadline_s = config.schedule.start_deadline_s
            if time.monotonic() - self._began > min(ARRIVAL_S, deadline_s):
                await fail_if_nobody_comes(self._ledger, fields, deadline_s)
        elif state is JobState.RUNNING:
            await self._conduct(config, fields)
        return False

    async def _conduct(self, config: JobConfig, fields: Fields) -> None:
        try:
            await self._ledger.rollout.check_streams(self._job_id)
        except StreamLost as error:
            return await try_move(self._ledger, self._job_id, JobState.FAILED, str(error))
        await self._open_if_due(config, fields)
        await self._evaluator.step(config, fields)
        await self._fail_if_trainers_are_lost(config, fields)
        await self._fail_if_stuck(config)

    # ---- opening -------------------------------------------------------------------------------------------------

    async def _open_if_due(self, config: JobConfig, fields: Fields) -> None:
        """Open the next iteration as soon as the published version may generate it, or as its rows may be trained."""
        iteration, version = int(fields["num_opened"]), int(fields.get("policy_version", "-1"))
        if iteration >= config.schedule.num_iterations:
            return
        self._prompts.prepare(config, iteration)
        if not await self._is_due(config, fields, iteration, version):
            return
        try:
            contents = await self._prompts.take(config, iteration)
        except DatasetError as error:
            reason = f"iteration {iteration} has no {'rows' if config.is_supervised(iteration) else 'prompts'}: {error}"
            return await try_move(self._ledger, self._job_id, JobState.FAILED, reason)
        if reason := await self._open(config, iteration, version, contents):
            logger.debug("job %s: iteration %d was not opened: %s", self._job_id, iteration, reason)
            return
        logger.info("job %s: iteration %d is open on version %d", self._job_id, iteration, version)
        await record_sharing(self._ledger, fields)
        self._prompts.prepare(config, iteration + 1)

    async def _is_due(self, config: JobConfig, fields: Fields, iteration: int, version: int) -> bool:
        """Return whether an iteration may open. A supervised one follows the commit of the one before, whose version
        need not be published. While rollouts still have prompts to claim, others wait for a newer version."""
        if config.is_supervised(iteration):
            return version >= 0 and int(fields["next_iteration"]) >= iteration
        if version < max(0, iteration - config.max_staleness):
            return False
        return version >= iteration or not await self._ledger.rollout.num_unclaimed_prompts(self._job_id)

    async def _open(self, config: JobConfig, iteration: int, version: int, contents: Contents) -> str:
        """Open an iteration with its prompts or rows. Return '' or the reason why it was not opened."""
        opening = self._ledger.iterations
        if contents.rows:
            return await opening.open_rows(self._job_id, iteration, contents.rows, contents.held_out)
        num_prompts = config.rollout.num_prompts_per_iteration
        first, spares = list(contents.tasks[:num_prompts]), contents.tasks[num_prompts:]
        if config.rollout.dispatch == "longest_first":
            first = await longest_first(self._ledger, self._job_id, first)
        return await opening.open(self._job_id, iteration, version, first, spares, contents.choice)

    # ---- ending --------------------------------------------------------------------------------------------------

    async def _fail_if_stuck(self, config: JobConfig) -> None:
        """Fail a job in which this watcher has seen no progress for too long. Time in which all services were down, or
        their machine slept, does not count."""
        fields = await self._ledger.jobs.fields(self._job_id)  # again: the job may just have changed
        if fields["progress_at"] != self._progress_at:
            self._progress_at, self._progress_seen = fields["progress_at"], time.monotonic()
        if await self._waits_its_turn(config, fields):
            self._progress_seen = time.monotonic()
        deadline_s, silent_s = config.schedule.iteration_deadline_s, time.monotonic() - self._progress_seen
        if silent_s > WAIT_S:  # rollouts need not be looked at while groups arrive
            workers, now = await self._ledger.workers.records(config.pool), await self._ledger.now()
            if reason := why_not_loaded(self._job_id, fields["epoch"], workers, now):
                return await try_move(self._ledger, self._job_id, JobState.FAILED, reason, JobState.RUNNING)
        if silent_s > deadline_s and not await self._evaluator.give_up(silent_s):  # it may have blocked the job
            is_done = int(fields["next_iteration"]) >= config.schedule.num_iterations
            if is_done and float(fields.get("lease_until", "0")) + ARRIVAL_S > await self._ledger.now():
                return  # the job's trainer, or the next one, writes the last checkpoint, and has its own limits
            start = f"iteration {fields['next_iteration']} made no progress for {silent_s:.0f} s"
            await fail_with_findings(self._ledger, self._job_id, f"{start} (schedule.iteration_deadline_s)")

    async def _waits_its_turn(self, config: JobConfig, fields: Fields) -> bool:
        """Return whether no trainer has the job, and living ones of its pool train other jobs, as after a resume."""
        now = await self._ledger.now()
        if float(fields.get("lease_until", "0")) > now:
            return False
        trainers = await self._ledger.trainers.records(config.pool)
        return any(trainer.is_alive(now) and trainer.job_id not in (None, self._job_id) for trainer in trainers)

    async def _fail_if_trainers_are_lost(self, config: JobConfig, fields: Fields) -> None:
        """Fail a job that has lost too many trainers in a row, instead of handing it to the next one for ever."""
        if fields["epoch"] == self._seen_epoch:
            return
        self._seen_epoch = fields["epoch"]
        limit = config.schedule.max_lost_trainers
        if int(fields["epoch"]) > limit:
            num_lost = num_lost_trainers(await inspection.newest_events(self._ledger, self._job_id))
            if num_lost >= limit:
                reason = f"{num_lost} trainers in a row were lost (schedule.max_lost_trainers)"
                await fail_with_findings(self._ledger, self._job_id, reason)

    async def _cancel_if_abandoned(self, fields: Fields) -> None:
        """End a cancelled job if its trainer, which normally ends it, is gone or does not react."""
        now = await self._ledger.now()
        has_trainer = float(fields.get("lease_until", "0")) > now
        if not has_trainer or now - float(fields["progress_at"]) > CANCEL_GRACE_S:
            await try_move(self._ledger, self._job_id, JobState.CANCELLED)


async def fail_if_nobody_comes(ledger: Ledger, fields: Fields, deadline_s: float) -> None:
    """Fail a pending job whose pool has had no trainer for too long. While one is alive, the job waits its turn."""
    now = await ledger.now()
    if now - queued_at(fields) < deadline_s:
        return
    away_s = trainers_away_s(fields, await ledger.trainers.records(fields["pool"]), now)
    if away_s > deadline_s:
        reason = f"no trainer came for {away_s:.0f} s (schedule.start_deadline_s)"
        await fail_with_findings(ledger, fields["id"], reason, JobState.PENDING)  # a trainer may just have taken it


async def fail_with_findings(ledger: Ledger, job_id: str, reason: str, seen: JobState | None = None) -> None:
    """Fail the job, if it is still in the state `seen` (None: in any). Its error is the reason and the doctor's
    findings, except for those that announce this failure."""
    about_work = await explain_work(ledger, await ledger.jobs.fields(job_id))
    findings = [finding for finding in about_work if finding.next != JOB_FAILS]
    sentences = [finding.sentence for finding in findings[:MAX_REASONS]]
    await try_move(ledger, job_id, JobState.FAILED, "; ".join([reason, *sentences]), seen)


async def record_sharing(ledger: Ledger, fields: Fields) -> None:
    """Record what the processes of a job share, as soon as it is known and when it has changed."""
    job_id, pool = fields["id"], fields["pool"]
    workers = [worker for worker in await ledger.workers.live(pool) if worker.job_id == job_id]
    trainers = [trainer for trainer in await ledger.trainers.live(pool) if trainer.job_id == job_id]
    sharing = sharing_of(workers, trainers)
    if sharing not in (None, fields.get("sharing")):
        await ledger.jobs.record_sharing(job_id, str(sharing))


async def try_move(
    ledger: Ledger, job_id: str, wanted: JobState, error: str = "", seen: JobState | None = None
) -> None:
    try:
        await ledger.jobs.move(job_id, wanted, error, seen=seen)
        logger.info("job %s is %s %s", job_id, wanted, error)
    except IllegalTransition as conflict:  # another broker or the trainer was faster
        logger.info("%s", conflict)
