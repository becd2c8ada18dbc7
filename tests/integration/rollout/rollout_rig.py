"""A running job with a fake trainer, and rollouts in this process: for tests of the rollout loop on real Redis."""

import asyncio
import functools
import inspect
import json
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from onbeat.config import JobConfig
from onbeat.contracts.states import IterationState, JobState, Verdict
from onbeat.engines import EngineBroken
from onbeat.machine.processor import Hardware
from onbeat.streams.codec import GroupFailure, Message, PromptTask, Reward, RolloutGroup
from onbeat.streams.ledger import Ledger
from onbeat.weights.host import host_id
from onbeat.weights.wire import Peer
from services.rollout.__main__ import root_cause
from services.rollout.attach import Factories, SourceFactory
from services.rollout.chat.server import create_chat_server
from services.rollout.settings import Settings
from services.rollout.worker import Worker
from tests.rollout_fakes import FakeEngine, FakeTrainer, manifest_of
from tests.world import job_body

CONTEXT_TOKENS = 128
NEW = Hardware("Newer", "AVX-512 with bfloat16", "native")
G = 2


@functools.cache
def build_model_files() -> dict[str, bytes]:
    from tests.tiny_models import build_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        build_tokenizer().save_pretrained(folder)
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    config = {"model_type": "llama", "max_position_embeddings": CONTEXT_TOKENS}
    return {**files, "config.json": json.dumps(config).encode()}


def job_config(pool: str, num_prompts: int, max_group_attempts: int, max_staleness: int, **sections: dict) -> dict:
    bound = {"mode": "bounded", "max_staleness": max_staleness} if max_staleness else {}
    counts = {"num_prompts_per_iteration": num_prompts, "max_group_attempts": max_group_attempts}
    config = job_body(
        pool=pool,
        model={"path": "fake"},
        data={"task": "chain_sum", "type": "reasoning_gym"},
        reward={"max_attempts": 2},
        rollout={**counts, "num_samples_per_prompt": G, "max_response_tokens": 16},
        schedule={"num_iterations": 10, **bound},
    )
    return JobConfig.model_validate(config | sections).model_dump(mode="json")


class Rig:
    """A running job with a fake trainer, and any number of workers in this process."""

    def __init__(self, ledger: Ledger, pool: str = "", address: str = "trainer:1") -> None:
        self.ledger = ledger
        self.trainer = FakeTrainer(address, files=build_model_files(), announce=self.announce)
        self.digest_of = lambda version: manifest_of(version).digest.hex()
        self.connect: SourceFactory = self.trainer.connect
        self.pool = pool or f"p{uuid.uuid4().hex[:8]}"
        self.job_id = ""
        self.epoch = ""
        self.engines: list[FakeEngine] = []
        self.running: list[tuple[Worker, asyncio.Task[None]]] = []

    async def start_job(
        self, num_prompts: int = 4, max_group_attempts: int = 3, max_staleness: int = 0, **sections: dict
    ) -> None:
        self.job_id = uuid.uuid4().hex
        config = job_config(self.pool, num_prompts, max_group_attempts, max_staleness, **sections)
        await self.ledger.jobs.create(self.job_id, config, 10, max_staleness)
        epoch = await self.ledger.trainer.claim_job(self.job_id, "trainer", 60)
        assert epoch
        self.epoch = epoch
        await self.ledger.trainer.record_dtype(self.job_id, epoch, "bfloat16", "")
        await self.announce()

    async def replace_job(self, **changes: Any) -> None:
        await self.ledger.jobs.move(self.job_id, JobState.SUCCEEDED)
        await self.start_job(**changes)

    async def announce(self) -> None:
        newest, address = self.trainer.newest, self.trainer.address
        await self.ledger.versions.announce(self.job_id, self.epoch, newest, address, self.digest_of(newest))

    async def open(self, iteration: int, *tasks: PromptTask, version: int | None = None) -> None:
        version = iteration if version is None else version
        assert await self.ledger.iterations.open(self.job_id, iteration, version, list(tasks)) == ""

    async def skip(self, iteration: int) -> None:
        """Open an iteration whose only group fails, and commit it."""
        await self.open(iteration, self.task(iteration, 0))
        await self.fail_and_commit(iteration)

    async def fail_and_commit(self, iteration: int) -> None:
        (claim,) = await self.ledger.rollout.claim(self.job_id, "before", 1, lease_s=30.0)
        failure = GroupFailure(kind="generation_failed", message="not of interest")
        version = claim.task.policy_version
        place = {"group_id": claim.task.group_id, "iteration": iteration, "policy_version": version}
        group = RolloutGroup(**place, failure=failure, worker_id="before")
        assert await self.ledger.rollout.submit(self.job_id, claim.entry_id, group) is Verdict.ACCEPTED
        await self.commit(iteration)

    def task(self, iteration: int, index: int, **fields) -> PromptTask:
        defaults = {
            "group_id": f"{iteration}-{index}",
            "iteration": iteration,
            "policy_version": iteration,
            "messages": [Message(role="user", content="2+2=")],
            "num_samples": G,
            "max_response_tokens": 16,
            "temperature": 0.5,
            "seed": 100 + index,
            "deadline_s": 30.0,
            "reward": Reward(name="exact", options_json="{}", timeout_s=5.0, memory_limit_mb=512),
            "reward_context_json": json.dumps({"question": "2+2=", "answer": "4"}),
        }
        return PromptTask(**(defaults | fields))

    async def commit(self, iteration: int) -> None:
        """Finish the step: publish the next version."""
        await self.trainer.publish(iteration + 1)
        place = (self.job_id, self.epoch, iteration, iteration + 1)
        assert await self.ledger.trainer.commit(*place, self.digest_of(iteration + 1), {}, "used")

    async def restart_trainer_behind(self, num_iterations: int) -> None:
        """Restart a trainer that serves version 0 again and has yet to replay the rest of the job."""
        for iteration in range(num_iterations):
            await self.skip(iteration)
        self.trainer.newest = 0

    def start_worker(self, engine: FakeEngine | None = None, hardware: Hardware = NEW, **settings) -> Worker:
        engine = engine or FakeEngine()
        defaults = {"pool": self.pool, "worker_id": f"w{len(self.running)}", "lease_s": 30.0, "drain_s": 5.0}
        factories = Factories(lambda config: engine, self.connect, create_chat_server)
        worker = Worker(Settings(**(defaults | settings)), self.ledger, hardware, factories)
        self.engines.append(engine)
        self.running.append((worker, asyncio.create_task(worker.run())))
        return worker

    async def groups(self, iteration: int) -> list[RolloutGroup]:
        groups = await self.ledger.iterations.accepted_groups(self.job_id, iteration)
        return sorted(groups, key=lambda group: group.group_id)

    async def iteration(self, iteration: int) -> dict[str, str]:
        return await self.ledger.iterations.fields(self.job_id, iteration)

    async def drained(self, iteration: int, timeout_s: float = 15.0) -> list[RolloutGroup]:
        state = functools.partial(self.ledger.iterations.state, self.job_id, iteration)
        await self.until(state, IterationState.DRAINED, timeout_s)
        return await self.groups(iteration)

    async def broken(self) -> str:
        """Wait until the only worker has ended, because its engine is broken, and return why."""
        _, running = self.running.pop()
        await asyncio.wait({running}, timeout=10)
        cause = root_cause(running.exception())
        assert isinstance(cause, EngineBroken)
        return str(cause)

    async def until(self, read: Callable[[], Any], expected: object = True, timeout_s: float = 15.0) -> None:
        """Wait as `eventually` does, unless a worker fails."""
        deadline = time.monotonic() + timeout_s
        while True:
            value = read()
            if (await value if inspect.isawaitable(value) else value) == expected:
                return
            for _, task in self.running:
                if task.done() and not task.cancelled() and task.exception():
                    raise task.exception()
            assert time.monotonic() < deadline, "the condition was not met in time"
            await asyncio.sleep(0.02)

    async def until_told(self, kind: str, times: int = 1) -> list[str]:
        """Wait until there are so many events of a kind. Return the messages."""

        async def are_told() -> bool:
            return len(await self.event_messages(kind)) >= times

        await self.until(are_told)
        return await self.event_messages(kind)

    async def until_states(self, *states: str, timeout_s: float = 15.0) -> None:
        """Wait until these are the states of the pool's rollouts."""

        async def are_those() -> bool:
            return [worker.state for worker in await self.ledger.workers.records(self.pool)] == list(states)

        await self.until(are_those, timeout_s=timeout_s)

    async def event_messages(self, kind: str) -> list[str]:
        return [event.message for event in await self.ledger.event_log.read(self.job_id) if event.kind == kind]

    async def stop(self) -> None:
        for worker, _ in self.running:
            worker.stop()
            worker.stop()
        await asyncio.gather(*(task for _, task in self.running), return_exceptions=True)


@asynccontextmanager
async def serving_model(rig: Rig, folder: Path) -> AsyncIterator[Path]:
    """Serve the weights of a real tiny model over real gRPC; each version has different ones."""
    from safetensors.torch import load_file

    from services.trainer.weights.relay_tree import Sources
    from services.trainer.weights.server import WeightServer
    from services.trainer.weights.store import WeightStore, take_snapshot
    from tests.tiny_models import write_perturbed_weights, write_tied_model

    model_dir = write_tied_model(folder / "model")
    files = {path.name: path.read_bytes() for path in model_dir.iterdir() if path.suffix != ".safetensors"}
    store = WeightStore()
    store.add(take_snapshot(0, load_file(model_dir / "model.safetensors").items()))

    async def publish(version: int) -> None:
        weights = write_perturbed_weights(model_dir, folder / "next.safetensors", seed=version)
        store.add(take_snapshot(version, load_file(weights).items()))
        rig.trainer.newest = version
        await rig.announce()
        await server.announce()

    rig.digest_of = lambda version: store.get(version).manifest.digest.hex()  # type: ignore[union-attr]
    await rig.start_job()
    server = WeightServer(rig.job_id, files, store)
    rig.trainer.address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    server.sources = Sources([Peer(address=rig.trainer.address, host_id=host_id())])
    rig.trainer.publish = publish  # type: ignore[method-assign]
    await rig.announce()
    try:
        yield model_dir
    finally:
        await server.stop()
