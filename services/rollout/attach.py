"""The attachment of a rollout to a job: fetch the model, start the engine on it, put the parts that serve together."""

import asyncio
import functools
import logging
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from json import JSONDecodeError
from pathlib import Path
from typing import Protocol

from onbeat.config import JobConfig
from onbeat.contracts.errors import JobNotFound, WeightsError
from onbeat.contracts.records import WeightUpdate
from onbeat.engines import BadWeightFile, Engine, EngineBroken
from onbeat.weights.client import ModelDescription, WeightsClient
from onbeat.weights.host import host_id
from onbeat.weights.pull import Pull
from onbeat.weights.security import join_address, reachable_host
from onbeat.weights.server import PayloadServer
from onbeat.weights.wire import Peer
from services.rollout import meters
from services.rollout.claim_loop import Assignment, ClaimLoop, Ends
from services.rollout.end_of_turn import add_end_of_turn
from services.rollout.engines.failure import describe_cause
from services.rollout.engines.registry import stop_engine, wait_for_engine
from services.rollout.episodes.contract import Program
from services.rollout.episodes.runner import EpisodeRunner
from services.rollout.gate import GateLimits, VersionGate
from services.rollout.generation import Generation
from services.rollout.player import Player
from services.rollout.producer import FillerByTask, GroupFiller, GroupProducer
from services.rollout.prompt_decoder import PromptDecoder
from services.rollout.prompts import PromptEncoder
from services.rollout.puller import WeightsPuller
from services.rollout.responder import Responder
from services.rollout.rewards.scorer import Scorer

logger = logging.getLogger(__name__)

REPORT_FAILURE_S = 10.0  # a trainer that restarts is back by then
ATTACH_RETRY_S = 1.0
MODEL_FILE_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".tiktoken"}

EngineFactory = Callable[[JobConfig], Engine]
SourceFactory = Callable[[str, str], WeightsClient]  # address, job id


class ModelNotLoaded(Exception):
    """The engine cannot load the job's model; the message is the innermost cause. Other jobs may be served."""

    def __init__(self, error: Exception) -> None:
        super().__init__(describe_cause(error))
        self.is_of_files = isinstance(error, BadWeightFile | JSONDecodeError)


class VisitorServer(Protocol):
    """A server beside the claim loop, for visitors of the version gate."""

    async def serve(self) -> None:
        """Serve until the session drains."""


# The last argument is set when the session drains.
VisitorFactory = Callable[[Assignment, Engine, VersionGate, PromptEncoder, asyncio.Event], VisitorServer | None]


@dataclass(frozen=True)
class Factories:
    """The functions that create what serves a job."""

    create_engine: EngineFactory
    connect_weights: SourceFactory
    serve_visitors: VisitorFactory | None = None


@dataclass(frozen=True)
class Parts:
    """The parts that serve a job once the engine has its model."""

    engine: Engine
    gate: VersionGate
    generation: Generation
    loop: ClaimLoop
    visitors: VisitorServer | None


class Attachment:
    """The start of a session."""

    def __init__(self, job: Assignment, factories: Factories, ends: Ends) -> None:
        self.job_id = job.job_id
        self._job, self._ends = job, ends
        self._settings, self._ledger, self._config = job.settings, job.ledger, job.config
        self._factories = factories
        self._newest_served = -1
        self._starting: Engine | None = None
        self._failure = ""  # the last reason why the model did not come
        self.has_model = asyncio.Event()

    @property
    def doing(self) -> str:
        """The step of the start, in words."""
        if self._failure:
            return f"cannot get the model from the trainer: {self._failure}"
        if self._starting is None:
            return "getting the model from the trainer"
        return getattr(self._starting, "doing", "") or "starting the engine"

    async def create_puller(self, cleanup: AsyncExitStack) -> WeightsPuller:
        """Create the puller and the server that passes on what it pulls."""
        settings, security = self._settings, self._settings.wire_security()
        peer = Peer(worker_id=settings.worker_id, host_id=host_id(), zone=settings.zone)
        is_relay = settings.weights_relay and security.can_serve
        is_kept = is_relay or self._config.model.dtype != "float32"  # deltas of float32 are as long as the weights
        puller = WeightsPuller(
            lambda address: self._factories.connect_weights(address, self.job_id),
            self._find_address,
            peer,
            find_digest=functools.partial(self._ledger.versions.digest, self.job_id),
            is_kept=is_kept,
        )
        cleanup.push_async_callback(puller.close)
        if is_relay:
            server = PayloadServer(self.job_id, puller, security)
            port = await server.start(settings.weights_host, settings.weights_port)
            cleanup.push_async_callback(server.stop)
            puller.serve_at(join_address(reachable_host(settings.weights_host, settings.weights_advertise), port))
        return puller

    async def attach(self, cleanup: AsyncExitStack, staging_dir: Path, puller: WeightsPuller) -> Parts:
        """Fetch the model, start the engine on it, and put the parts together. `cleanup` undoes it in reverse order.

        Raises ModelNotLoaded, and EngineBroken where the process has to be replaced.
        """
        description, pull = await self._fetch_model(puller)
        self.has_model.set()
        model_dir = staging_dir / "model"
        write_model_files(model_dir, description.files)
        config = self._config
        loading = asyncio.to_thread(PromptEncoder.load, model_dir, config.model.max_context_tokens, config.rendering)
        encoding = asyncio.create_task(loading, name="load the tokenizer")  # while the engine starts
        cleanup.callback(encoding.cancel)
        engine = self._starting = self._factories.create_engine(self._config)
        cleanup.push_async_exit(functools.partial(stop_engine, engine))
        await self._start_engine(engine, model_dir, pull, puller)
        encoder = await encoding
        if added := add_end_of_turn(encoder, config.rendering, model_dir):
            await self._ledger.event_log.emit(self.job_id, "rollout.stop_added", f"{self._settings.worker_id}: {added}")
        settings = self._settings
        limits = GateLimits(settings.engine_load_s, settings.chat_grace_s)
        gate = VersionGate(engine, puller, self._record_ready, await pull.known(), limits)
        cleanup.push_async_callback(gate.close)
        generation = Generation(gate, encoder)
        filler = await self._create_filler(cleanup, generation, encoder)
        decoder = PromptDecoder(encoder.tokenizer)
        producer = GroupProducer(filler, decoder, generation.busy, self._config.rollout)
        loop = ClaimLoop(self._job, engine, producer, puller.announcements, self._ends)
        cleanup.push_async_callback(loop.abandon)
        serve_visitors = self._factories.serve_visitors
        visitors = serve_visitors(self._job, engine, gate, encoder, self._ends.drain) if serve_visitors else None
        return Parts(engine, gate, generation, loop, visitors)

    async def _create_filler(
        self, cleanup: AsyncExitStack, generation: Generation, encoder: PromptEncoder
    ) -> GroupFiller:
        """Create what fills the job's groups. With environments, serve sessions to them; raises ImportError where a web
        server is missing."""
        settings, config = self._settings, self._config
        rewards = Scorer(settings.reward_processes, settings.reward_services, settings.worker_id)
        cleanup.push_async_callback(rewards.close)
        max_attempts = next((reward.max_attempts for reward in config.rewards), 1)
        responder = Responder(generation, encoder, rewards, max_attempts)
        if not config.environments:
            return responder
        from services.rollout.environments import EnvironmentProcesses
        from services.rollout.episodes.server import SessionServer

        programs = {Program.of_config(environment) for _, environment in config.environments}
        environments = EnvironmentProcesses(settings.environment_processes, programs)
        server = SessionServer()
        cleanup.push_async_callback(environments.close)
        await server.start()
        cleanup.push_async_callback(server.stop)
        max_attempts = config.environment.max_attempts if config.environment is not None else 1
        player = Player(generation, EpisodeRunner(encoder, environments, server, max_attempts))
        return FillerByTask(responder, player)

    async def _fetch_model(self, puller: WeightsPuller) -> tuple[ModelDescription, Pull]:
        """Wait for the trainer and pull its model. The caller cancels this once the job is no longer active."""
        failing_since, is_reported = time.monotonic(), False
        while True:
            try:
                description = await puller.describe()
                pull = await puller.obtain(description.policy_version, deadline_s=0)
                await pull.complete()
                self._failure = ""
                return description, pull
            except WeightsError as error:
                if str(error) != self._failure:
                    logger.warning("job %s: waiting for its trainer: %s", self.job_id, error)
                self._failure = str(error)
            if not is_reported and time.monotonic() - failing_since > REPORT_FAILURE_S:
                warning = f"{self._settings.worker_id} {self.doing}"
                await self._ledger.event_log.emit(self.job_id, "job.warning", warning)
                is_reported = True
            await asyncio.sleep(ATTACH_RETRY_S)

    async def _start_engine(self, engine: Engine, model_dir: Path, pull: Pull, puller: WeightsPuller) -> None:
        assert puller.host is not None
        (model_dir / "model.safetensors").symlink_to(puller.host.path)
        started = time.monotonic()
        with puller.reading():
            starting = asyncio.create_task(engine.start(model_dir, pull.version), name="start the engine")
            deadline_s = self._settings.engine_start_s
            await wait_for_engine(starting, deadline_s, "the start of the engine", "ONBEAT_ENGINE_START_S")
        try:
            starting.result()
        except EngineBroken:
            raise
        except Exception as error:  # engines and their libraries raise many kinds
            logger.exception("job %s: the engine cannot load the model", self.job_id)
            raise ModelNotLoaded(error) from error
        puller.mark_read(pull)
        await self._record_ready(pull, time.monotonic() - started)

    async def _record_ready(self, pull: Pull, load_s: float) -> None:
        stats, version, worker = pull.stats, pull.version, self._settings.worker_id
        is_news = 0 <= self._newest_served < version
        self._newest_served = max(self._newest_served, version)
        update = WeightUpdate(
            received_bytes=stats.received_bytes,
            sources=list(dict.fromkeys(stats.sources)),
            pull_s=stats.pull_s,
            apply_s=stats.apply_s,
            load_s=load_s,
            open_s=time.monotonic() - stats.stepped_at if is_news else None,
            held_s=time.monotonic() - stats.ended_at,
            num_faults=len(stats.faults),
            weights_digest=(await pull.known()).digest.hex(),
        )
        meters.record_update(version, stats.full_bytes, update)
        await self._ledger.versions.engine_ready(self.job_id, version, worker, update)
        for fault in stats.faults:
            await self._ledger.event_log.emit(
                self.job_id, "weights.fault", f"{worker}, policy version {version}: {fault}"
            )
        logger.info(
            "serving policy version %d: pulled %.1f of %.1f MB in %.2f s from %s, loaded in %.2f s",
            version,
            stats.received_bytes / 1e6,
            stats.full_bytes / 1e6,
            stats.pull_s,
            ", ".join(update.sources) or "nowhere",
            load_s,
        )

    async def _find_address(self) -> str:
        try:
            return (await self._ledger.jobs.fields(self.job_id))["weights_address"]
        except JobNotFound as error:
            raise WeightsError(f"job {self.job_id} is gone") from error


def write_model_files(model_dir: Path, files: dict[str, bytes]) -> None:
    """Write configuration and tokenizer, plain data only. Raises ValueError for a name that would leave the folder."""
    model_dir.mkdir()
    for name, content in files.items():
        if Path(name).name != name:
            raise ValueError(f"the trainer sent a model file named {name!r}: expected a plain file name")
        if Path(name).suffix not in MODEL_FILE_SUFFIXES:
            logger.warning("ignoring %s of the model: not a configuration or tokenizer file", name)
            continue
        (model_dir / name).write_bytes(content)
