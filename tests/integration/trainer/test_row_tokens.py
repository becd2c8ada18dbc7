"""The tokens of a packed row that a trainer has chosen hold for the job: for takeovers, resumes and replays."""

import asyncio
import json
import uuid

import pytest

from onbeat.config import JobConfig
from onbeat.contracts.errors import LeaseLost
from onbeat.contracts.records import HostMemory, WorkerRecord
from onbeat.contracts.states import JobState
from onbeat.machine.memory import read_memory
from onbeat.machine.processor import Hardware
from onbeat.streams.connection import connect
from onbeat.streams.ledger import Ledger
from onbeat.streams.starting import announce_start
from services.broker.views.records import job_record
from services.trainer.__main__ import claim_next
from services.trainer.job.lease import ClaimedJob
from services.trainer.job.session import JobSession
from services.trainer.settings import Settings
from tests.world import World

CPU = Hardware("Newer", "AVX-512 with bfloat16", "native")
AUTO = {"max_tokens_per_micro_batch": "auto"}
REASON = "rows of up to 640 tokens: 1.0 GB of memory are free"
WARM_START = {"num_rows_per_iteration": 2, "num_iterations": 1, "data": {"type": "jsonl", "path": "prompts.jsonl"}}


@pytest.fixture
def pool() -> str:
    return f"pool-{uuid.uuid4().hex[:8]}"


async def claimed_config(ledger: Ledger, pool: str, trainer: str) -> tuple[str, JobConfig]:
    """Be another trainer that claims the pool's job, and return the epoch and the job as it sees it."""
    claimed = await claim_next(Settings(pool=pool, trainer_id=trainer), ledger, CPU)
    assert claimed is not None
    return claimed[1], JobConfig.model_validate_json(claimed[2])


async def test_number_holds_for_trainers_that_take_over_or_resume(ledger: Ledger, world: World, pool: str) -> None:
    job_id = await world.create_job(pool=pool, training=AUTO)
    first, config = await claimed_config(ledger, pool, "trainer-a")
    assert config.training.max_tokens_per_micro_batch == "auto"
    assert job_record(await ledger.jobs.fields(job_id)).max_tokens_per_micro_batch is None
    await ledger.trainer.give_back(job_id, first)  # it dies before it has chosen
    second, config = await claimed_config(ledger, pool, "trainer-b")
    assert config.training.max_tokens_per_micro_batch == "auto"
    assert await ledger.trainer.record_row_tokens(job_id, second, 640, REASON) == 640
    assert await ledger.trainer.record_row_tokens(job_id, second, 4096, "other memory") == 640
    await ledger.trainer.give_back(job_id, second)
    third, config = await claimed_config(ledger, pool, "trainer-c")
    assert config.training.row_tokens == 640
    with pytest.raises(LeaseLost):
        await ledger.trainer.record_row_tokens(job_id, second, 128, "woke up late")
    await ledger.jobs.move(job_id, JobState.FAILED, "its disk is full", third)
    await ledger.jobs.resume(job_id, JobState.FAILED)
    _, config = await claimed_config(ledger, pool, "trainer-d")
    assert config.training.row_tokens == 640
    fields = await ledger.jobs.fields(job_id)
    assert JobConfig.of_job(fields).training.row_tokens == 640  # a replay reads it so
    record = job_record(fields)
    assert record.max_tokens_per_micro_batch == 640
    assert record.config["training"] == JobConfig.model_validate(record.config).training.model_dump(mode="json")
    assert record.config["training"]["max_tokens_per_micro_batch"] == "auto"  # a fork of it chooses anew
    events = [event for event in await ledger.event_log.read(job_id) if event.kind == "job.row_tokens"]
    assert [event.message for event in events] == [REASON]
    assert [event.data for event in events] == [{"max_tokens_per_micro_batch": "640"}]


async def test_jobs_with_a_number_are_recorded_and_shown_as_before(ledger: Ledger, world: World) -> None:
    job_id, _ = await world.started_job()
    fields = await ledger.jobs.fields(job_id)
    assert "max_tokens_per_micro_batch" not in fields
    assert "max_tokens_per_micro_batch" not in job_record(fields).model_dump()
    assert json.loads(fields["config"])["training"]["max_tokens_per_micro_batch"] == 4096


@pytest.mark.parametrize(
    ("sections", "num_engines"),
    [({}, 2), ({"objective": {"type": "sft"}, "warm_start": WARM_START}, 0)],
    ids=["with rollouts", "without"],
)
async def test_engines_to_come_are_those_of_this_machine(
    sections: dict, num_engines: int, ledger: Ledger, world: World, pool: str, lease_of
) -> None:
    if "warm_start" in sections:
        job_id = await create_sft(ledger, pool)
    else:
        job_id = await world.create_job(pool=pool, training=AUTO)
    epoch = await world.start_training(job_id)
    here = read_memory()
    elsewhere = HostMemory(name="another", available_bytes=1, total_bytes=2)
    for record, ago_s in [
        (WorkerRecord(id="starts", state="starting", host=here), 20.0),
        (WorkerRecord(id="loads", state="starting", job_id=job_id, host=here), 1.0),
        (WorkerRecord(id="serves", state="generating", job_id=job_id, policy_version=0, host=here), 0.0),
        (WorkerRecord(id="dead", state="idle", host=here), 900.0),
        (WorkerRecord(id="cannot", state="unsuited", host=here), 0.0),
        (WorkerRecord(id="far", state="idle", host=elsewhere), 0.0),
        (WorkerRecord(id="old", state="idle"), 0.0),
    ]:
        await world.beat(pool, record, ago_s)
    config = JobConfig.of_job(await ledger.jobs.fields(job_id))
    job = JobSession(lease_of(ClaimedJob(job_id, epoch, config, 30.0)))
    assert await asyncio.to_thread(job.num_engines_to_come) == num_engines


async def create_sft(ledger: Ledger, pool: str) -> str:
    job = {
        "name": "examples",
        "pool": pool,
        "model": {"path": "tiny"},
        "objective": {"type": "sft"},
        "warm_start": WARM_START | {"num_iterations": None, "learning_rate": 1e-3},
        "schedule": {"num_iterations": 2},
        "training": AUTO,
    }
    config, job_id = JobConfig.model_validate(job), f"job-{uuid.uuid4().hex[:12]}"
    await ledger.jobs.create(job_id, config.model_dump(mode="json"), 2, 0)
    return job_id


async def test_services_that_start_say_on_which_machine(ledger: Ledger, redis_url: str, pool: str) -> None:
    redis = connect(redis_url)
    await announce_start(redis, pool, rollouts=["rollout-0"])
    (record,) = await ledger.workers.records(pool)
    assert record.host is not None
    assert record.host.name == read_memory().name
    await redis.aclose()
