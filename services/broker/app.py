"""The broker as an ASGI application: REST on one side, the conductor on the other, the ledger between them."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from fastapi import FastAPI

from onbeat.streams.ledger import Ledger
from services.broker.admission.quota import Quota
from services.broker.admission.review import Admission
from services.broker.api import dashboard, datasets, health, jobs, pools, preview, problems, reference, samples, stream
from services.broker.api.context import Context
from services.broker.auth import KeyRing, RateLimit
from services.broker.chat import routes as chat
from services.broker.chat.desk import ChatDesk
from services.broker.conductor import Conductor
from services.broker.datasets.process import DatasetPool, DatasetProcess
from services.broker.metrics import Meters
from services.broker.middleware import BodyLimit, BodyRule, Envelope, Gate
from services.broker.notices import Notifier
from services.broker.retention import Retention
from services.broker.settings import Settings
from services.broker.silence import watch_silence
from services.broker.uploads import Uploads
from services.broker.views.live import JobStreams
from services.broker.views.timeline import Timelines

if TYPE_CHECKING:
    from services.broker.tracing.exporter import Tracer

logger = logging.getLogger(__name__)

PATTERN_S = 2.0  # time for compiling the regular expression of a reward
ADMISSION_IDLE_S = 10.0  # then the processes of admission end until the next job comes
NUM_ADMISSIONS = 2  # jobs whose data is opened at a time: each may take the memory of a data process


def create_app(
    settings: Settings,
    ledger: Ledger,
    *,
    on_conductor_end: Callable[[], None] = lambda: None,
    is_stopping: Callable[[], bool] = lambda: False,
) -> FastAPI:
    """Create the app, whose lifespan runs the conductor; `on_conductor_end` is called if it gives up.

    Raises ValueError for a keys file that is missing or broken.
    """
    meters = Meters()
    background = BackgroundWork(settings, ledger, meters, on_conductor_end)
    # The conductor has another process, so that an odd job at the door cannot hold up the jobs inside.
    data_dir, memory_mb, timeout_s = settings.data_dir, settings.dataset_memory_mb, settings.admission_timeout_s
    admission_data = DatasetPool(
        [DatasetProcess(data_dir, timeout_s, memory_mb, ADMISSION_IDLE_S) for _ in range(NUM_ADMISSIONS)]
    )
    admission_patterns = DatasetProcess(data_dir, PATTERN_S, memory_mb, ADMISSION_IDLE_S)
    streams = JobStreams(ledger, is_stopping, max_watchers=max(1, settings.max_connections // 2))

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        background.start()
        try:
            yield
        finally:
            await background.close()
            await streams.close()
            await admission_data.close()
            await admission_patterns.close()

    refusals = problems.documented(401, 403, 429)
    app = FastAPI(
        title="Onbeat broker", version="1", lifespan=lifespan, docs_url=None, redoc_url=None, responses=refusals
    )
    app.state.context = Context(
        ledger=ledger,
        quota=Quota(ledger.lists, settings.max_pending_jobs),
        admission=Admission(admission_data, admission_patterns, settings.has_model_folders),
        meters=meters,
        is_conducting=background.is_conducting,
        is_read_only=settings.is_read_only,
        streams=streams,
        timelines=Timelines(ledger),
        uploads=Uploads(settings.data_dir, settings.max_dataset_bytes),
        data_dir=settings.data_dir.resolve(),
    )
    app.state.chats = ChatDesk(ledger, settings, is_stopping)
    add_middleware(app, settings, meters)
    problems.install(app)
    app.include_router(health.doctor)  # before those of jobs: else JOB:explain is a job's id
    for api in (chat, dashboard, datasets, jobs, preview, samples, stream, pools, health, reference):
        app.include_router(api.router)
    return app


def add_middleware(app: FastAPI, settings: Settings, meters: Meters) -> None:
    """Add the middleware, the innermost first. Raises ValueError for a keys file that is missing or broken."""
    keys = KeyRing(settings.api_keys_file) if settings.api_keys_file else None
    limit = RateLimit(settings.requests_per_s, settings.request_burst)
    timeout_s, remedy = settings.request_timeout_s, "the broker's ONBEAT_MAX_DATASET_BYTES sets the limit"
    rule = BodyRule(settings.max_body_bytes, timeout_s)
    upload_rule = BodyRule(settings.max_dataset_bytes, settings.upload_timeout_s, timeout_s, remedy)
    app.add_middleware(BodyLimit, rule=rule, upload_rule=upload_rule)
    is_local, is_read_only = not settings.allow_anonymous, settings.is_read_only
    app.add_middleware(Gate, keys=keys, limit=limit, is_local=is_local, is_read_only=is_read_only)
    app.add_middleware(Envelope, meters=meters)


class BackgroundWork:
    """The work beside the requests: the conductor, the removal of old jobs, the watch over silence and, where they are
    on, notices and tracing.

    `on_end` is called when one of the first three gives up.
    """

    def __init__(self, settings: Settings, ledger: Ledger, meters: Meters, on_end: Callable[[], None]) -> None:
        self._data = DatasetProcess(settings.data_dir, settings.dataset_timeout_s, settings.dataset_memory_mb)
        self._ledger = ledger
        self._conductor = Conductor(ledger, self._data, settings.redis_retry_s)
        self._retention = Retention(ledger, settings.job_retention_days)
        self._tracer = create_tracer(settings, ledger, meters)
        has_notices = bool(settings.notify_command or settings.notify_url) and not settings.is_read_only
        self._notifier = Notifier(ledger, settings) if has_notices else None
        self._on_end = on_end
        self._is_read_only = settings.is_read_only
        self._tasks: list[asyncio.Task[None]] = []  # the conductor first

    def start(self) -> None:
        if self._is_read_only:
            return
        self._tasks = [
            asyncio.create_task(self._conductor.run(), name="conductor"),
            asyncio.create_task(self._retention.run(), name="retention"),
            asyncio.create_task(watch_silence(self._ledger), name="silence"),
        ]
        if self._notifier:
            self._tasks.append(asyncio.create_task(self._notifier.run(), name="notices"))
        for task in self._tasks:
            task.add_done_callback(lambda ended: report_end(ended, self._on_end))
        if self._tracer:
            self._tracer.start()

    def is_conducting(self) -> bool:
        return self._is_read_only or (bool(self._tasks) and not self._tasks[0].done())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._notifier:
            await self._notifier.close()
        if self._tracer:
            await self._tracer.close()
        await self._data.close()


def create_tracer(settings: Settings, ledger: Ledger, meters: Meters) -> "Tracer | None":
    if settings.otlp_endpoint is None:
        return None
    from services.broker.tracing.exporter import Tracer  # only then: it needs packages of OpenTelemetry

    return Tracer(ledger, settings, meters)


def report_end(task: asyncio.Task[None], on_end: Callable[[], None]) -> None:
    if task.cancelled():
        return
    error = task.exception()
    logger.critical("the control loop gave up (%s): %s: %s", task.get_name(), type(error).__name__, error)
    on_end()
