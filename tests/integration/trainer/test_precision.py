"""The dtype of a job is resolved once, by what trainer and rollouts can multiply, and holds for all of them."""

import uuid

import pytest

from onbeat.config import JobConfig
from onbeat.contracts.errors import LeaseLost
from onbeat.contracts.records import WorkerRecord
from onbeat.contracts.states import JobState
from onbeat.machine.processor import Hardware
from services.trainer.__main__ import claim_next
from services.trainer.job.precision import resolve_dtype
from services.trainer.settings import Settings
from tests.world import World

NEW = Hardware("Newer", "AVX-512 with bfloat16", "native")
OLD = Hardware("Older", "AVX2, no bfloat16", "emulated")
OLD_GPU = Hardware("T4", "compute capability 7.5", "missing")


class Pool:
    """A job in a pool of its own, with the rollouts that are put there."""

    @classmethod
    async def create(cls, ledger, dtype, is_claimed=True):
        pool = cls()
        pool.ledger, pool.name = ledger, f"pool-{uuid.uuid4().hex[:8]}"
        pool.job_id = await World(ledger).create_job(pool=pool.name, model={"path": "tiny", "dtype": dtype})
        if is_claimed:
            pool.epoch = await ledger.trainer.claim_job(pool.job_id, "trainer-0", lease_s=30.0)
        return pool

    async def add_rollout(self, worker_id, hardware, age_s=0.0):
        record = WorkerRecord(
            id=worker_id,
            state="idle",
            hardware=str(hardware),
            bfloat16=hardware.bfloat16,
        )
        await World(self.ledger).beat(self.name, record, age_s)

    async def resolve(self, trainer=NEW):
        fields = await self.ledger.jobs.fields(self.job_id)
        settings = Settings(pool=self.name)
        return await resolve_dtype(self.ledger, self.job_id, self.epoch, fields, trainer, settings)

    async def messages(self, kind):
        return [event.message for event in await self.ledger.event_log.read(self.job_id) if event.kind == kind]


@pytest.mark.parametrize(
    ("trainer", "rollouts", "dtype"),
    [
        (NEW, [], "bfloat16"),
        (OLD, [], "float32"),
        (NEW, [NEW, NEW], "bfloat16"),
        (NEW, [NEW, OLD], "float32"),
        (NEW, [OLD_GPU], "float32"),
    ],
)
async def test_auto_takes_what_all_devices_multiply(ledger, trainer, rollouts, dtype):
    pool = await Pool.create(ledger, "auto")
    for index, hardware in enumerate(rollouts):
        await pool.add_rollout(f"rollout-{index}", hardware)
    assert (await pool.resolve(trainer)).model.dtype == dtype
    assert (await ledger.jobs.fields(pool.job_id))["dtype"] == dtype
    (message,) = await pool.messages("job.dtype")
    assert message.startswith(f"precision: {dtype} (")
    slow = [
        f"rollout-{index}'s {processor}" for index, processor in enumerate(rollouts) if processor.bfloat16 != "native"
    ]
    assert all(who in message for who in slow)
    assert await pool.messages("job.warning") == []


async def test_rollouts_that_are_gone_do_not_count(ledger):
    pool = await Pool.create(ledger, "auto")
    await pool.add_rollout("rollout-dead", OLD, age_s=60.0)
    assert (await pool.resolve()).model.dtype == "bfloat16"


async def test_the_first_resolution_holds_for_later_trainers(ledger):
    pool = await Pool.create(ledger, "auto")
    assert (await pool.resolve(NEW)).model.dtype == "bfloat16"
    await pool.add_rollout("rollout-late", OLD)
    assert (await pool.resolve(OLD)).model.dtype == "bfloat16"
    assert len(await pool.messages("job.dtype")) == 1


async def test_bfloat16_is_obeyed_with_one_warning(ledger):
    pool = await Pool.create(ledger, "bfloat16")
    assert (await pool.resolve(OLD)).model.dtype == "bfloat16"
    await pool.resolve(OLD)
    (warning,) = await pool.messages("job.warning")
    assert "trainer's Older (AVX2, no bfloat16)" in warning
    assert "6 to 25 times as long" in warning


async def test_job_fails_with_a_reason_on_a_trainer_too_small_for_it(ledger):
    pool = await Pool.create(ledger, "bfloat16", is_claimed=False)
    assert await claim_next(Settings(pool=pool.name), ledger, OLD_GPU) is None
    fields = await ledger.jobs.fields(pool.job_id)
    assert fields["state"] == "FAILED"
    reason = "the trainer's T4 (compute capability 7.5) cannot compute in bfloat16; submit the job with auto or float32"
    assert reason in fields["error"]
    assert "dtype" not in fields


async def test_begun_job_says_that_another_trainer_chose_the_dtype(ledger):
    pool = await Pool.create(ledger, "auto")
    await ledger.trainer.record_dtype(pool.job_id, pool.epoch, "bfloat16", "precision: bfloat16")
    await ledger.jobs.move(pool.job_id, JobState.FAILED, "its GPU is broken")
    await ledger.jobs.resume(pool.job_id, JobState.FAILED)
    assert await claim_next(Settings(pool=pool.name), ledger, OLD_GPU) is None
    error = (await ledger.jobs.fields(pool.job_id))["error"]
    assert "in which another trainer began this job; take this trainer out of the pool and resume the job" in error


async def test_a_trainer_claims_a_job_with_its_dtype_resolved(ledger):
    pool = await Pool.create(ledger, "auto", is_claimed=False)
    claimed = await claim_next(Settings(pool=pool.name), ledger, OLD)
    assert claimed is not None
    config = JobConfig.of_job(await ledger.jobs.fields(pool.job_id))
    assert JobConfig.model_validate_json(claimed[2]) == config
    assert config.model.dtype == "float32"


async def test_a_trainer_without_the_lease_records_no_dtype(ledger):
    pool = await Pool.create(ledger, "auto")
    with pytest.raises(LeaseLost):
        await ledger.trainer.record_dtype(pool.job_id, "0", "float32", "")
    assert "dtype" not in await ledger.jobs.fields(pool.job_id)
