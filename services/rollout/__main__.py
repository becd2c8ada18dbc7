"""`python -m services.rollout` serves the pool's jobs until SIGTERM. Exit code 1 asks for a new process."""

import asyncio
import faulthandler
import logging
import resource
import signal
import sys

from onbeat.process.extras import require_extra

require_extra("rollout", user="the rollout", error=SystemExit)  # before the imports that would fail

from redis.exceptions import RedisError

from onbeat.config import JobConfig
from onbeat.engines import Engine
from onbeat.machine.accelerators import devices_of_this_process
from onbeat.machine.cores import run_on_cores
from onbeat.process.logging import configure
from onbeat.process.settings import read_settings, warn_of_misspelt
from onbeat.streams.best_effort import best_effort
from onbeat.streams.connection import describe_loss
from onbeat.streams.ledger import Ledger
from onbeat.streams.starting import announce_start
from onbeat.weights.client import WeightsClient
from services.rollout.attach import Factories
from services.rollout.chat.server import create_chat_server
from services.rollout.deadlines import FAREWELL_S
from services.rollout.engines.registry import check_engine, create_engine, find_hardware, prepare_engine
from services.rollout.settings import Settings
from services.rollout.worker import Worker

logger = logging.getLogger(__name__)

EXIT_DEADLINE_S = 30.0
MAX_FILES = 65_536


def main() -> int:
    settings = read_settings(Settings, "rollout")
    configure(settings.log_format)
    warn_of_misspelt(settings, "rollout")
    return asyncio.run(serve(settings))


async def serve(settings: Settings) -> int:
    try:
        return await supervise(settings)
    finally:
        # Python ends only when all threads have, and one may be stuck in an engine: then this ends the process, with 1.
        faulthandler.dump_traceback_later(EXIT_DEADLINE_S, exit=True)


async def supervise(settings: Settings) -> int:
    """Run the worker. An error that breaks it is reported once, where the user looks, and ends the process."""
    allow_many_files()
    try:
        if settings.cpu_cores:  # the engine's other processes inherit it: they must not disturb those on other cores
            run_on_cores(settings.cpu_cores)
        ledger, security = Ledger(settings.connect_redis()), settings.wire_security()
        await announce_start(ledger.redis, settings.pool, rollouts=[settings.worker_id])
        device = check_engine(settings.engine, settings.device, settings.tensor_parallel_size)
        health = settings.serve_health()
    except ValueError as error:
        logger.error("%s", error)
        return 1

    place = {
        "device": device,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "cpu_cores": settings.cpu_cores or None,
    }

    def engine_of(config: JobConfig) -> Engine:
        return create_engine(
            settings.engine,
            max_model_len=config.model.max_context_tokens,
            max_num_seqs=settings.max_num_seqs,
            has_episodes=bool(config.environments),
            dtype=config.model.dtype,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            kv_cache_gib=settings.kv_cache_gib,
            **place,
        )

    factories = Factories(
        engine_of, lambda address, job_id: WeightsClient(address, job_id, security), create_chat_server
    )
    worker = Worker(settings, ledger, find_hardware(device), factories, devices_of_this_process(device))
    watching = asyncio.create_task(health.watch(ledger.redis))
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, worker.stop)
    try:
        await ledger.redis.ping()
        prepare_engine(settings.engine, **place)  # goes on while the worker registers, waits for a job and a model
        await worker.run()
        return 0
    except Exception as error:  # the supervisor: an unknown defect ends the process, loudly
        cause = root_cause(error)
        if isinstance(cause, RedisError):
            logger.error("%s", describe_loss(ledger.redis, cause))
        else:
            logger.error("the rollout broke", exc_info=cause)
            await report(ledger, worker, settings.worker_id, cause)
        return 1
    finally:
        watching.cancel()
        await ledger.redis.aclose()


def root_cause(error: BaseException) -> BaseException:
    """Unwrap the first error of a task group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def allow_many_files() -> None:
    """Raise the limit of open files as far as the system permits: each episode of a group has a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        possible = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, possible), hard))


async def report(ledger: Ledger, worker: Worker, worker_id: str, cause: BaseException) -> None:
    """Report to the job that it lost a rollout, and why."""
    if worker.job_id is None:
        return
    message = f"{worker_id} ends: {type(cause).__name__}: {cause}"
    with best_effort("the failure could not be recorded in the job"):
        async with asyncio.timeout(FAREWELL_S):
            await ledger.event_log.emit(worker.job_id, "worker.failed", message, {"worker_id": worker_id})


if __name__ == "__main__":
    sys.exit(main())
