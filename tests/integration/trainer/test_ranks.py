"""The trainer as it is started, alone and by torchrun: one job, one Redis, the same weights from one process and two.

The test plays broker and rollouts: it opens iterations by the rule of the mode and submits prepared groups. Trainers
take one job of their pool after the other: starting takes longer than training.
"""

import asyncio
import functools
import json
import os
import random
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from onbeat.config import JobConfig
from onbeat.contracts.states import JobState
from onbeat.machine.cores import available_cores
from onbeat.streams.codec import PromptTask
from onbeat.weights.client import WeightsClient
from onbeat.weights.wire import Peer
from services.rollout.puller import WeightsPuller
from services.trainer.job.lease import ClaimedJob
from services.trainer.job.session import GroupSource
from tests.tiny_models import write_tied_model
from tests.trainer_fixtures import job_config, make_group
from tests.waiting import eventually

CORES = available_cores()
NUM_ITERATIONS, NUM_GROUPS = 4, 5
LEAST_OF_LONG_GROUP = 52 + 3  # tokens: prompt and a token of each response
PERIODIC = {"mode": "periodic", "num_iterations": NUM_ITERATIONS}
BOUNDED = {"mode": "bounded", "max_staleness": 1, "num_iterations": NUM_ITERATIONS}
JOBS = {
    "two updates with kl": {
        "schedule": PERIODIC,
        "training": {"num_updates_per_iteration": 2},
        "objective": {"kl": {"coef": 0.1}},
    },
    "bounded reinforce_pp, proximal": {
        "schedule": BOUNDED,
        "objective": {"type": "reinforce_pp", "old_policy": "proximal", "importance": {"type": "truncated"}},
    },
    "lora with kl in bfloat16": {
        "schedule": PERIODIC,
        "lora": {"rank": 4},
        "objective": {"kl": {"coef": 0.1}},
        "model": {"dtype": "bfloat16"},
    },
}
AUTO = {"schedule": PERIODIC, "training": {"max_tokens_per_micro_batch": "auto"}}


@dataclass(frozen=True)
class Trainer:
    process: subprocess.Popen[bytes]
    pool: str
    log: Path


def build_job(model: Path, pool: str, sections: dict) -> JobConfig:
    """Build a job, in float32 unless the sections have another dtype."""
    sections = sections | {"model": {"path": str(model), **sections.get("model", {})}}
    sections = sections | {"training": {"max_tokens_per_micro_batch": 40, **sections.get("training", {})}}
    base = {"rollout": {"num_prompts_per_iteration": NUM_GROUPS}, "checkpoint": {"every_iterations": 2}}
    config = job_config(**base, **sections)
    return config.model_copy(update={"pool": pool})


def group_of(task: PromptTask, config: JobConfig):
    """Unequal groups, the same in every run. `auto` chooses rows by the first iteration's prompts: the later ones are
    longer then, so that no two groups share a row."""
    rng = random.Random(task.group_id)
    lengths = [rng.randrange(1, 9) for _ in range(3)]
    is_long = config.training.max_tokens_per_micro_batch == "auto" and task.iteration > 0
    prompt_length = rng.randrange(52, 60) if is_long else rng.randrange(1, 12)
    group = make_group(task.group_id, prompt_length, lengths, version=task.policy_version)
    group.worker_id = "w"  # the worker that has claimed it
    return group


@contextmanager
def trainer(
    redis_url: str, folder: Path, num_ranks=1, parallelism="ddp", max_restarts=0, core=CORES[0]
) -> Iterator[Trainer]:
    """Run a trainer with its own pool; at last end it and its children."""
    folder.mkdir()
    pool, log_file = f"ranks-{uuid.uuid4().hex[:8]}", folder / "trainer.log"
    command = [sys.executable, "-m", "services.trainer"]
    if num_ranks > 1:
        options = ["--standalone", f"--nproc-per-node={num_ranks}", f"--max-restarts={max_restarts}"]
        command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "services.trainer"]
    settings = {
        "OMP_NUM_THREADS": "1",
        "ONBEAT_REDIS_URL": redis_url,
        "ONBEAT_POOL": pool,
        "ONBEAT_DATA_DIR": str(folder),
        "ONBEAT_DEVICE": "cpu",
        "ONBEAT_CPU_CORES": str(core),
        "ONBEAT_PARALLELISM": parallelism,
        "ONBEAT_LEASE_S": "3",
    }
    with log_file.open("w") as log:
        process = subprocess.Popen(command, env=os.environ | settings, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield Trainer(process, pool, log_file)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            raise


async def play_rollouts(ledger, job_id: str, config: JobConfig, after_group, on_version) -> None:
    """Open each iteration with version t - max_staleness exactly, and submit its groups; until the job is over.

    A trainer with all groups of an iteration goes on to the next version at once: they are held back until the
    iteration is open that needs the version before.
    """
    claimed = []  # claims of each iteration

    async def submit(iteration) -> None:
        for index, claim in enumerate(claimed[iteration]):
            await ledger.rollout.submit(job_id, claim.entry_id, group_of(claim.task, config))
            if after_group is not None:
                await after_group(iteration, index)

    for iteration in range(NUM_ITERATIONS):
        version = max(0, iteration - config.max_staleness)

        async def is_published(version=version) -> bool:
            fields = await ledger.jobs.fields(job_id)
            assert not JobState(fields["state"]).is_final, fields.get("error")
            return int(fields.get("policy_version", "-1")) == version

        await eventually(f"version {version} is published", is_published, timeout_s=90)
        if on_version is not None:
            await on_version(job_id, version)
        tasks = [PromptTask(group_id=f"{iteration}-{i}", iteration=iteration, text="x") for i in range(NUM_GROUPS)]
        assert await ledger.iterations.open(job_id, iteration, version, tasks) == ""
        claimed.append(await ledger.rollout.claim(job_id, "w", NUM_GROUPS, 60))
        if iteration >= config.max_staleness:
            await submit(iteration - config.max_staleness)
    for iteration in range(NUM_ITERATIONS - config.max_staleness, NUM_ITERATIONS):
        await submit(iteration)

    async def is_over() -> bool:
        return (await ledger.jobs.state(job_id)).is_final

    await eventually("the job is over", is_over, timeout_s=90)


async def train(ledger, model, trainer: Trainer, sections, after_group=None, on_version=None):
    """Train, and return the final weights and the micro-batches of each rank by iteration."""
    config = build_job(model, trainer.pool, sections)
    job_id = f"job-{uuid.uuid4().hex[:12]}"
    await ledger.jobs.create(job_id, config.model_dump(mode="json"), NUM_ITERATIONS, config.max_staleness)
    try:
        await play_rollouts(ledger, job_id, config, after_group, on_version)
        fields = await ledger.jobs.fields(job_id)
        assert fields["state"] == JobState.SUCCEEDED, fields.get("error")
    except AssertionError as error:
        error.add_note(f"the trainer's log ends with: {trainer.log.read_text()[-4000:]}")
        raise
    taken = [await ledger.iterations.micro_batches(job_id, iteration) for iteration in range(NUM_ITERATIONS)]
    return exported_weights(Path(fields["checkpoint"])), taken


async def assert_rows_are_of_one_choice(ledger, job_id: str) -> None:
    """Assert that a trainer chose once, for an update of the first iteration, and that later groups need a row each."""
    (event,) = [event for event in await ledger.event_log.read(job_id) if event.kind == "job.row_tokens"]
    assert "as many as an update has" in event.message
    fields = await ledger.jobs.fields(job_id)
    assert fields["max_tokens_per_micro_batch"] == event.data["max_tokens_per_micro_batch"]
    assert int(fields["max_tokens_per_micro_batch"]) < 2 * LEAST_OF_LONG_GROUP
    for iteration in range(1, NUM_ITERATIONS):
        metrics = json.loads((await ledger.iterations.fields(job_id, iteration))["metrics"])
        assert metrics["train/passes"] >= NUM_GROUPS


def exported_weights(checkpoint):
    """Return the exported weights: each rank of a sharded trainer has written a file."""
    files = sorted(checkpoint.glob("model*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_same_weights(weights, expected):
    """Assert equal weights up to the order of sums; AdamW's first steps amplify noise where gradients are near zero."""
    assert weights.keys() == expected.keys()
    is_precise = all(tensor.dtype == torch.float32 for tensor in expected.values())
    gap = torch.cat([(weights[name].float() - expected[name].float()).flatten() for name in expected]).abs()
    assert gap.mean() < (1e-5 if is_precise else 1e-3)
    assert gap.max() < (1e-2 if is_precise else 5e-2)


def assert_each_group_once(taken):
    for iteration, recorded in enumerate(taken):
        ids = sorted(group_id for _, batch in recorded for group_id in batch)
        assert ids == sorted(f"{iteration}-{i}" for i in range(NUM_GROUPS))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tied_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def trainers(redis_url, tmp_path_factory) -> Iterator[dict[str, Trainer]]:
    """Run one process, and two, with whole models or with shards."""
    folder, two = tmp_path_factory.mktemp("trainers"), {"num_ranks": 2}
    of_each = {"alone": {}, "ddp": two, "fsdp": two | {"parallelism": "fsdp", "core": CORES[-1]}}
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(trainer(redis_url, folder / name, **options)) for name, options in of_each.items()
        }


@pytest.fixture(scope="module")
def weights_of_one() -> dict[str, dict[str, torch.Tensor]]:
    """Return the final weights of one process, by the name of its job."""
    return {}


@pytest.mark.parametrize("name", JOBS)
async def test_two_processes_train_the_weights_of_one(name, ledger, model, trainers, weights_of_one):
    (alone, _), (replicated, shares), (sharded, dealt) = await asyncio.gather(
        *(train(ledger, model, trainers[kind], JOBS[name]) for kind in ("alone", "ddp", "fsdp"))
    )
    weights_of_one[name] = alone
    assert_each_group_once(shares)
    assert {rank for recorded in shares for rank, _ in recorded} == {0, 1}, "each took groups at its own pace"
    assert_same_weights(replicated, alone)
    assert_each_group_once(dealt)
    assert_same_weights(sharded, alone)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
async def test_ranks_train_rows_of_the_same_chosen_tokens(kind, ledger, model, trainers):
    jobs = []

    async def note(job_id, version) -> None:
        jobs.append(job_id)

    (weights, taken), (expected, _) = await asyncio.gather(
        train(ledger, model, trainers[kind], AUTO, on_version=note),
        train(ledger, model, trainers["alone"], AUTO),
    )
    assert_each_group_once(taken)
    assert_same_weights(weights, expected)
    await assert_rows_are_of_one_choice(ledger, jobs[0])


class Follower:
    """Pulls each version as it is published, like a rollout."""

    def __init__(self, ledger):
        self._ledger = ledger
        self.weights, self.sources, self.received = {}, [], []  # tensors, addresses and bytes by version
        self._puller = None

    async def __call__(self, job_id, version):
        async def find_trainer():
            return (await self._ledger.jobs.fields(job_id))["weights_address"]

        if self._puller is None:
            connect = functools.partial(WeightsClient, job_id=job_id)
            self._puller = WeightsPuller(connect, find_trainer, Peer(worker_id="follower"))
        pull = self._puller.start(version, 30)
        await pull.complete()
        self.weights[version] = load_file(self._puller.host.path)
        self.sources.append(set(pull.stats.sources))
        self.received.append(pull.stats.received_bytes)


async def test_sharded_version_is_pulled_from_all_ranks_none_holds_all(ledger, model, trainers):
    whole, sharded = Follower(ledger), Follower(ledger)
    sections = {"schedule": PERIODIC, "model": {"dtype": "bfloat16"}}
    await asyncio.gather(
        train(ledger, model, trainers["alone"], sections, on_version=whole),
        train(ledger, model, trainers["fsdp"], sections, on_version=sharded),
    )
    assert [len(sources) for sources in whole.sources] == [1] * NUM_ITERATIONS
    assert [len(sources) for sources in sharded.sources] == [2] * NUM_ITERATIONS
    full_bytes = sum(tensor.nbytes for tensor in whole.weights[0].values())
    assert sharded.received[0] == full_bytes, "each rank sends its own part, once"
    assert max(sharded.received[1:]) < full_bytes, "deltas of both shards"
    for version in range(NUM_ITERATIONS):
        assert_same_weights(sharded.weights[version], whole.weights[version])


async def test_fewer_replicas_repeat_the_lost_ones_in_recorded_order(ledger, lease_of):
    """Two replicas die; one goes on, dies, and goes on: both times the same micro-batches in the same order."""
    config = build_job(Path("tiny"), "nobody", {"schedule": PERIODIC})
    job_id = f"job-{uuid.uuid4().hex[:12]}"
    await ledger.jobs.create(job_id, config.model_dump(mode="json"), NUM_ITERATIONS, 0)
    epoch = await ledger.trainer.claim_job(job_id, "t", 60)
    assert epoch is not None
    for rank, index, group_id in [(1, 0, "0-2"), (0, 0, "0-0"), (1, 1, "0-4")]:
        await ledger.trainer.record_micro_batch(job_id, epoch, 0, rank, index, [group_id])

    def repeated(groups):
        return [group_ids[0] for group_ids in groups.recorded_micro_batches(0)]

    def as_the_only_replica():
        lease = lease_of(ClaimedJob(job_id, epoch, config, 60))
        groups = GroupSource(lease)
        before = repeated(groups)
        for group_id in ("0-1", "0-3"):
            groups.record_micro_batch(0, [group_id])
        return before, repeated(GroupSource(lease))

    before, after = await asyncio.to_thread(as_the_only_replica)
    assert before == ["0-2", "0-0", "0-4"]
    assert after == ["0-2", "0-0", "0-4", "0-1", "0-3"]


@pytest.fixture
def restarted_trainers(redis_url, tmp_path) -> Iterator[list[Trainer]]:
    """Two ranks each, which are started again, once, when one of them dies."""
    options = {"num_ranks": 2, "max_restarts": 1}
    with (
        trainer(redis_url, tmp_path / "ddp", **options) as ddp,
        trainer(redis_url, tmp_path / "fsdp", **options, parallelism="fsdp", core=CORES[-1]) as fsdp,
    ):
        yield [ddp, fsdp]


@pytest.mark.parametrize("name", ["two updates with kl", "rows of chosen tokens"])
async def test_a_killed_rank_loses_no_group_and_trains_none_twice(
    name, ledger, model, trainers, restarted_trainers, weights_of_one
):
    sections, job_ids = JOBS.get(name, AUTO), set()

    async def note(job_id, version) -> None:
        job_ids.add(job_id)

    def kill_rank_1(process):
        async def after_group(iteration, index):
            if (iteration, index) == (2, 2):
                ranks = psutil.Process(process.pid).children()
                (victim,) = [rank for rank in ranks if rank.environ().get("RANK") == "1"]
                victim.kill()

        return after_group

    if name not in weights_of_one:
        weights_of_one[name], _ = await train(ledger, model, trainers["alone"], sections)
    both = await asyncio.gather(
        *(
            train(ledger, model, restarted, sections, kill_rank_1(restarted.process), note)
            for restarted in restarted_trainers
        )
    )
    for weights, taken in both:
        assert_each_group_once(taken)
        assert_same_weights(weights, weights_of_one[name])
    if sections is AUTO:
        for job_id in job_ids:
            await assert_rows_are_of_one_choice(ledger, job_id)
