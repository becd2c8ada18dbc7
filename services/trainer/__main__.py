"""The trainer process (`python -m services.trainer`): it claims the pool's next job by lease, trains it, and repeats.

Under torchrun all ranks train the same job: rank 0 claims it and broadcasts it to the others.
"""

import functools
import gc
import json
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import AsyncIterator
from contextlib import closing, nullcontext, suppress
from types import ModuleType

from onbeat.process.extras import require_extra

require_extra("trainer", user="the trainer", error=SystemExit)  # before the imports that would fail

if __name__ == "__main__":  # before the imports that take long: those of PyTorch
    from services.trainer.announcement import announce

    announce()

from pydantic import ValidationError
from redis.exceptions import RedisError

from onbeat.config import JobConfig
from onbeat.config.explain import first_wrong
from onbeat.contracts.errors import GroupsTrimmed, IllegalTransition, JobFailed, JobNotFound, LeaseLost
from onbeat.contracts.states import JobState
from onbeat.machine.accelerators import devices_of_this_process
from onbeat.machine.cores import run_on_cores
from onbeat.machine.malloc import give_back_freed
from onbeat.machine.processor import Hardware
from onbeat.process.logging import configure
from onbeat.process.loop_thread import LoopThread
from onbeat.process.settings import read_settings, warn_of_misspelt
from onbeat.streams.connection import describe_loss
from onbeat.streams.inspection import existing_jobs
from onbeat.streams.ledger import Ledger
from onbeat.weights.security import TLS_CA, TLS_CERT
from services.device import choose_device, describe_device
from services.trainer.device import give_back_cache, make_deterministic
from services.trainer.job.interface import CannotServe, JobCancelled, Stopped
from services.trainer.job.lease import ClaimedJob, Lease
from services.trainer.job.precision import resolve_dtype
from services.trainer.job.presence import Presence
from services.trainer.job.session import JobSession
from services.trainer.job.watchdog import Watchdog, stall_limit_s
from services.trainer.settings import Settings
from services.trainer.trackers import installed_trackers
from services.trainer.trackers.follow import LeasedJob, tracking
from services.trainer.world import PeerLost, World, is_lost_peer

logger = logging.getLogger(__name__)

RESTART_CODE = 75  # EX_TEMPFAIL: asks the launcher (torchrun --max-restarts) to start all ranks again
QUEUE_AT_ONCE = 16  # queued jobs read per round trip


class RanksMustRestart(Exception):
    """A job ended early on this rank while other ranks may be waiting for it in a collective."""


def main() -> int:
    settings = read_settings(Settings, "trainer")
    configure(settings.log_format)
    warn_of_misspelt(settings, "trainer")
    stop, background = threading.Event(), LoopThread("trainer")
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: background.call_soon(stop.set))  # this thread may just hold the event's lock
    try:
        if not settings.wire_security().can_serve:
            raise ValueError(f"{TLS_CA} is set but {TLS_CERT} is not: this trainer could not serve weights")
        ledger = background.run(create_ledger(settings))
        if os.environ.get("LOCAL_RANK", "0") == "0":  # one rank per machine serves health, also while ranks gather
            background.start(settings.serve_health().watch(ledger.redis))
        background.run(ledger.redis.ping(), timeout_s=settings.redis_retry_s + 40)  # a command gives up before
        device = choose_device(settings.device)
        make_deterministic(device)
        if settings.cpu_cores and device.type == "cpu":
            run_on_cores(settings.cpu_cores)
        world = World.from_environment(device, settings.peer_timeout_s)
        place = (settings.pool, settings.trainer_id)
        devices = devices_of_this_process(device.type)
        about = (place, installed_trackers(), devices)
        heartbeat = closing(Presence(background, ledger, *about)) if world.is_main else None
        with heartbeat or nullcontext() as presence:
            serve(settings, background, ledger, stop, world, presence)
        world.close()
    except (RedisError, TimeoutError) as error:
        logger.error("%s; the job goes on when a trainer is back", describe_loss(ledger.redis, error))
        return 1
    except RanksMustRestart as reason:
        logger.warning("%s", reason)
        return RESTART_CODE
    except (PeerLost, CannotServe, ValueError) as error:
        logger.error("%s", error)
        return 1
    return 0


async def create_ledger(settings: Settings) -> Ledger:
    return Ledger(settings.connect_redis())


def serve(
    settings: Settings,
    background: LoopThread,
    ledger: Ledger,
    stop: threading.Event,
    world: World,
    presence: Presence | None,
) -> None:
    """Train one job after another until `stop` is set. Raises RanksMustRestart if one of several ranks ended early."""
    hardware = describe_device(world.device)
    if world.is_main:
        logger.info("%s waits for jobs of pool %s on %s", settings.trainer_id, settings.pool, hardware)
    while not stop.wait(0.2):
        claimed = background.run(claim_next(settings, ledger, hardware)) if world.is_main else None
        message = world.broadcast_bytes(json.dumps(claimed).encode())
        if (claimed := json.loads(message)) is None:
            import_beforehand()
            continue
        job_id, epoch, fields = claimed
        config = JobConfig.of_job({"config": fields})
        num_replicas = world.size if settings.parallelism == "ddp" else 1
        claimed_job = ClaimedJob(job_id, epoch, config, settings.lease_s, world.rank, num_replicas)
        watchdog = None
        if world.is_main:  # other ranks may wait long for rank 0; if one of them is stuck, rank 0 stalls with it
            watchdog = Watchdog(stall_limit_s(settings.stall_s, config.schedule.iteration_deadline_s))
        job = JobSession(Lease(background, ledger, claimed_job, stop, watchdog))
        if presence is not None:
            presence.job_id = job_id
        is_handover = False
        try:
            outcome, error = train(settings, job, world)
            is_handover = outcome is None
            if outcome is not None and (world.is_main or outcome is JobState.FAILED):
                finish(background, ledger, job_id, epoch, outcome, error)
        except CannotServe:
            is_handover = True  # the job need not fail after a number of such trainers
            raise
        finally:
            job.close(is_handover)
            if presence is not None:
                presence.job_id = None
        del job  # it holds the last version of the weights
        gc.collect()
        give_back_freed()
        give_back_cache(world.device)
        if world.size > 1 and outcome is not JobState.SUCCEEDED:
            raise RanksMustRestart(f"job {job_id} ended early ({outcome or 'left'}); all ranks start again")


async def claim_next(settings: Settings, ledger: Ledger, hardware: Hardware) -> tuple[str, str, str] | None:
    """Return id, epoch and configuration (JSON, its dtype resolved) of the oldest job of the pool that is pending or
    whose trainer died."""
    async for job_id, fields in candidates(ledger, settings.pool):
        if not is_understood(job_id, fields.get("config", "")):
            continue
        epoch = await ledger.trainer.claim_job(job_id, settings.trainer_id, settings.lease_s, settings.run_id)
        if epoch is None:
            await ledger.jobs.file(job_id)  # it was in the wrong list for its state, or it has a trainer
            continue
        try:
            fields = await ledger.jobs.fields(job_id)  # it may have got more iterations before it was claimed
            config = await resolve_dtype(ledger, job_id, epoch, fields, hardware, settings)
            return job_id, epoch, config.model_dump_json()
        except (ValidationError, LookupError) as error:
            await ledger.jobs.move(job_id, JobState.FAILED, f"this trainer does not understand the job: {error}")
        except JobFailed as error:
            await ledger.jobs.move(job_id, JobState.FAILED, str(error))
        except (LeaseLost, JobNotFound):  # the job is over, or another trainer was faster
            continue
    return None


@functools.lru_cache(maxsize=1024)  # an idle trainer asks again and again
def is_understood(job_id: str, config: str) -> bool:
    """Return whether this version of Onbeat understands the job; log why not."""
    try:
        JobConfig.of_job({"config": config})
    except ValidationError as error:
        logger.warning("job %s is left to trainers of another version of Onbeat: %s", job_id, first_wrong(error))
        return False
    return True


async def candidates(ledger: Ledger, pool: str) -> AsyncIterator[tuple[str, dict[str, str]]]:
    """Yield the pool's started jobs, whose trainer may have died, and then its queue, each with its fields."""
    started = await existing_jobs(ledger, await ledger.lists.started())
    for job_id, fields in started.items():
        if fields.get("pool") == pool:
            yield job_id, fields
    for first in range(0, await ledger.lists.num_waiting(pool), QUEUE_AT_ONCE):
        queued = await ledger.lists.waiting(pool, first, QUEUE_AT_ONCE)
        existing = await existing_jobs(ledger, queued)
        for job_id in queued:
            if job_id in existing:
                yield job_id, existing[job_id]
            else:
                await ledger.lists.remove(job_id, pool)


@functools.cache  # a failed import takes seconds again each time
def import_beforehand() -> None:
    """Import what trains a job while there is none, once. A failure is left to the job, which reports it."""
    with suppress(ImportError, RuntimeError):
        import_session()


def import_session() -> ModuleType:
    """Import what trains a job, which takes seconds the first time."""
    from transformers import AutoModelForCausalLM  # noqa: F401

    from services.trainer import session
    from services.trainer.attention import PLANNERS
    from services.trainer.attention.npu import plan_npu

    PLANNERS["npu"] = plan_npu
    return session


def train(settings: Settings, job: JobSession, world: World) -> tuple[JobState | None, str]:
    """Run the job. Returns its final state and the reason; the state is None if another trainer is to continue it."""
    try:
        session = import_session()
        session.run_job(settings, job, world, functools.partial(tracking, LeasedJob(job.lease), job.job_id, job.config))
        return JobState.SUCCEEDED, ""
    except JobCancelled:
        return JobState.CANCELLED, ""
    except (LeaseLost, Stopped, JobNotFound) as reason:
        logger.warning("job %s is left to another trainer: %s", job.job_id, reason)
        return None, ""
    except (RedisError, TimeoutError, PeerLost, CannotServe):
        raise  # the job is intact in Redis; this process, or one that it needs, is not
    except GroupsTrimmed as error:
        remedy = "give this trainer the data folder of the one that wrote them, or submit the job again"
        return JobState.FAILED, f"{error}, and this trainer lacks the checkpoints after them; {remedy}"
    except (JobFailed, ValueError) as error:
        return JobState.FAILED, str(error)
    except Exception as error:  # the supervisor: an unknown defect ends the job, loudly
        logger.error("job %s broke:\n%s", job.job_id, traceback.format_exc())
        if world.size > 1 and is_lost_peer(error):
            raise PeerLost(f"rank {world.rank} of {world.size} broke: {error}") from error
        return JobState.FAILED, f"{type(error).__name__}: {error}"


def finish(background: LoopThread, ledger: Ledger, job_id: str, epoch: str, outcome: JobState, error: str) -> None:
    try:
        background.run(ledger.jobs.move(job_id, outcome, error, epoch))
    except (IllegalTransition, LeaseLost, JobNotFound) as conflict:  # another process was faster, or owns or deleted it
        logger.warning("%s", conflict)
    log = logger.error if outcome is JobState.FAILED else logger.info
    log("job %s %s %s", job_id, outcome, error)


if __name__ == "__main__":
    sys.exit(main())
