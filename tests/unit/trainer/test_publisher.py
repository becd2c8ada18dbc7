"""Several ranks publish versions, each rank in a thread of this process: who holds what, and that all agree."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import pytest
import torch

from services.trainer import publisher
from services.trainer.checkpoints.store import TrainState
from services.trainer.gac import GacAction, GacDecision, GradientControl
from services.trainer.policy import Policy, is_served_in_place
from services.trainer.publisher import Publisher
from services.trainer.replay import NoCheckpoints
from services.trainer.stats import IterationStats
from services.trainer.weights.store import WeightStore
from services.trainer.world import World
from tests.trainer_fixtures import RecordedJob, job_config, recorded_iterations, tiny_config, tiny_model, train

NUM_RANKS = 3
HOLD_S = 0.2


@dataclass
class Table:
    """Table on which the threads lay their messages."""

    size: int
    messages: dict[int, bytes] = field(default_factory=dict)

    def __post_init__(self):
        self.barrier = threading.Barrier(self.size, timeout=10)


@dataclass(frozen=True)
class ThreadWorld(World):
    table: Table | None = None

    def all_gather_bytes(self, content):
        self.table.messages[self.rank] = content
        self.table.barrier.wait()
        gathered = [self.table.messages[rank] for rank in range(self.size)]
        self.table.barrier.wait()
        return gathered


class StoringJob(RecordedJob):
    """Holds versions as a trainer's rank does; the last rank is slow at it."""

    def __init__(self, config, rank, everybody):
        super().__init__(config, [])
        self.rank, self.everybody, self.store = rank, everybody, WeightStore(num_kept=2)

    def hold(self, snapshot, delta_bytes):
        time.sleep(HOLD_S if self.rank == NUM_RANKS - 1 else 0)
        super().hold(snapshot, delta_bytes)
        self.store.add(snapshot, delta_bytes)

    def publish(self, snapshot, published):
        super().publish(snapshot, published)
        version = snapshot.policy_version
        self.holders_when_published = [job.rank for job in self.everybody if version in job.held]
        self.announcement = published


def publish_twice(tmp_path, is_sharded, divergences=(0.0,) * NUM_RANKS, **schedule):
    """Versions 0 and 1; some of the first and all of the last tensor move. Returns the ranks' (publishers, jobs)."""
    config = job_config(schedule={"num_iterations": 3, **schedule})
    models = [tiny_model(tiny_config(vocab_size=4000), torch.float32) for _ in range(NUM_RANKS)]
    table, jobs = Table(NUM_RANKS), []
    jobs += [StoringJob(config, rank, jobs) for rank in range(NUM_RANKS)]

    def run_rank(rank):
        world = ThreadWorld(rank, NUM_RANKS, table=table)
        policy = replace(Policy.create(models[rank], config, world), is_sharded=is_sharded)
        checkpoints = NoCheckpoints(tmp_path, keep=1)
        state = TrainState("job", "tiny")
        publisher = Publisher(jobs[rank], config, policy, state, checkpoints)
        publisher.start()
        with torch.no_grad():
            models[rank].model.embed_tokens.weight[:100] += 1
            models[rank].model.norm.weight += 1
        sums, values = {"token/divergence": divergences[rank]}, {"train/grad_norm": 0.0}
        stats = IterationStats(0, sums, values=values)
        publisher.publish(publisher.finish_version(0, stats), stats)
        return publisher

    with ThreadPoolExecutor(NUM_RANKS) as threads:
        return list(threads.map(run_rank, range(NUM_RANKS))), jobs


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """Publish twice. The first tensor is most of the model: rank 0 has nothing and rank 1 only this tensor."""
    return publish_twice(tmp_path_factory.mktemp("sharded"), is_sharded=True)


def test_deltas_of_all_shards_decide_and_are_announced(sharded):
    _, jobs = sharded
    snapshots = [job.store.get(1) for job in jobs]
    shards = [sum(map(len, snapshot.buffers)) for snapshot in snapshots]
    deltas = [snapshot.delta.plan.size_bytes for snapshot in snapshots]
    assert (shards[0], deltas[0]) == (0, 0)
    assert all(0 < delta < shard for delta, shard in zip(deltas[1:], shards[1:], strict=True))
    for job in jobs:
        assert [step.size_bytes for step in job.store.steps(0, 1)] == [sum(deltas)]
    assert jobs[0].announcement.delta_bytes == sum(deltas)


def test_version_is_announced_only_when_all_ranks_hold_shards(sharded):
    _, (main, *others) = sharded
    assert main.published == [0, 1]
    assert [job.published for job in others] == [[], []]
    assert main.holders_when_published == [0, 1, 2]


def test_whole_replicas_that_serve_nothing_hold_no_versions(tmp_path):
    _, (main, *others) = publish_twice(tmp_path, is_sharded=False)
    assert main.held == main.published == [0, 1]
    assert [job.held for job in others] == [[], []]


@pytest.mark.parametrize("is_sharded", [False, True])
def test_all_ranks_agree_to_publish_where_the_last_bit_decides(is_sharded, tmp_path):
    """1e-16 is half a bit below 1: it is lost when added to 1, unless added to its like before."""
    divergences = [1e-16, 1.0, 1e-16]
    schedule = {"mode": "bounded", "max_staleness": 2, "publish_above_kl": 1.0}
    publishers, jobs = publish_twice(tmp_path, is_sharded, divergences, **schedule)
    assert {publisher.state.published_version for publisher in publishers} == {0}
    assert [job.held for job in jobs if job.held] == [[0]] * (NUM_RANKS if is_sharded else 1)


def content_of(payloads):
    return [b"".join(payload.slices(0, payload.plan.size_bytes)) for payload in payloads]


class ServingJob(RecordedJob):
    """Holds versions as a trainer that is alone does. `seen`: what rollouts could have got of each, at once. They must
    get the same before each micro-batch."""

    def __init__(self, config, groups):
        super().__init__(config, groups)
        self.store, self.seen, self.events = WeightStore(num_kept=1), [], []

    def hold(self, snapshot, delta_bytes):
        self.store.add(snapshot, delta_bytes)
        self.events.append(snapshot.policy_version)
        payloads = [payload for payload in (snapshot.full, snapshot.delta) if payload is not None]
        self.seen.append((snapshot.manifest, [payload.plan for payload in payloads], content_of(payloads)))
        self._payloads = payloads

    def record_micro_batch(self, iteration, group_ids):
        assert content_of(self._payloads) == self.seen[-1][2], f"a version changed in iteration {iteration}"
        return super().record_micro_batch(iteration, group_ids)

    def withdraw(self):
        if self.store.versions():
            self.events.append("withdrawn")
        asyncio.run(self.store.withdraw())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_versions_in_place_are_those_that_a_copy_would_be(dtype, tmp_path, monkeypatch):
    config, groups = job_config(), recorded_iterations()
    jobs = [ServingJob(config, groups) for _ in range(2)]
    models = [tiny_model(dtype=dtype) for _ in jobs]
    train(config, groups, tmp_path / "in place", model=models[0], job=jobs[0])
    monkeypatch.setattr(publisher, "is_served_in_place", lambda config: False)
    train(config, groups, tmp_path / "copied", model=models[1], job=jobs[1])
    assert jobs[0].seen == jobs[1].seen
    assert jobs[0].events == [0, "withdrawn", 1, "withdrawn", 2, "withdrawn", 3]
    assert jobs[1].events == [0, 1, 2, 3]
    held = [dict(job.store.get(3).tensors()) for job in jobs]
    for model, tensors, is_view in zip(models, held, (True, False), strict=True):
        is_same = {parameter.data_ptr() == tensors[name].data_ptr() for name, parameter in model.named_parameters()}
        assert is_same == {is_view}
    files = [(tmp_path / folder / "checkpoints" / "iteration-000003") for folder in ("in place", "copied")]
    assert len({(folder / "model.safetensors").read_bytes() for folder in files}) == 1


@pytest.mark.parametrize("objective", ["grpo", "online_dpo"])
def test_version_stays_as_it_is_through_the_first_update(objective, tmp_path):
    config = job_config(objective={"type": objective}, training={"num_updates_per_iteration": 2})
    job = ServingJob(config, recorded_iterations())
    train(config, recorded_iterations(), tmp_path, job=job)
    assert job.events == [0, 1, 2, 3]


def test_version_without_a_step_ends_the_pulls_of_the_one_before(tmp_path, monkeypatch):
    config, groups = job_config(gac={"mode": "control"}), recorded_iterations()
    monkeypatch.setattr(GradientControl, "apply", lambda self, gradients: GacDecision(GacAction.SKIP, None))
    job = ServingJob(config, groups)
    train(config, groups, tmp_path, job=job)
    assert job.events == [0, "withdrawn", 1, "withdrawn", 2, "withdrawn", 3]


def test_memory_is_given_back_before_and_after_a_version(tmp_path, monkeypatch):
    config, groups = job_config(), recorded_iterations()
    job, take_snapshot = ServingJob(config, groups), Publisher._snapshot

    def take_noted(self):
        job.events.append("taken")
        return take_snapshot(self)

    monkeypatch.setattr(Publisher, "_snapshot", take_noted)
    monkeypatch.setattr(publisher, "give_back_if_scarce", lambda: job.events.append("given back"))
    train(config, groups, tmp_path, job=job)
    later = [event for version in (1, 2, 3) for event in ("withdrawn", "given back", "taken", "given back", version)]
    assert job.events == ["taken", 0, *later]


@pytest.mark.parametrize(
    "sections",
    [
        {"schedule": {"mode": "bounded"}},
        {"training": {"num_updates_per_iteration": 2}},
        {"training": {"num_updates_per_iteration": 2}, "objective": {"type": "online_dpo"}},
        {"evaluation": {"data": {"type": "reasoning_gym", "task": "chain_sum"}}},
        {"lora": {"rank": 4}},
    ],
    ids=["stale", "several updates", "no ratio", "evaluated", "adapters"],
)
def test_versions_that_are_needed_during_a_step_are_copies(sections):
    assert is_served_in_place(job_config())
    assert not is_served_in_place(job_config(**sections))
