"""Tokens that are sampled in vain are counted, for the rollout and for the job, and so are groups that come back."""

import asyncio

import pytest

from services.rollout import meters
from tests.integration.rollout.rollout_rig import G, Rig
from tests.rollout_fakes import TOKENS_PER_RESPONSE, FakeEngine

pytestmark = pytest.mark.slow


class CountingEngine(FakeEngine):
    """An engine that has sampled two tokens of each response when a call is cancelled."""

    num_cancelled_tokens = 0

    async def generate(self, prompt_token_ids, num_samples, sampling, expected_version):
        try:
            return await super().generate(prompt_token_ids, num_samples, sampling, expected_version)
        except asyncio.CancelledError:
            self.num_cancelled_tokens += 2 * num_samples
            raise


async def counts(rig: Rig) -> tuple[int, int]:
    """Return how often groups of the job were handed back, and its discarded tokens."""
    fields = await rig.ledger.jobs.fields(rig.job_id)
    return int(fields.get("num_handed_back", "0")), int(fields.get("num_discarded_tokens", "0"))


async def test_stopped_rollout_reports_tokens_of_unfinished_responses(rig: Rig) -> None:
    engine, before = CountingEngine(), meters.DISCARDED_TOKENS._value.get()
    engine.may_finish.clear()
    worker = rig.start_worker(engine, drain_s=0.0)
    await rig.open(0, rig.task(0, 0), rig.task(0, 1))
    await rig.until(lambda: engine.num_in_flight == 2 * G)
    worker.stop()
    await asyncio.wait_for(rig.running[0][1], timeout=30)
    assert await counts(rig) == (2, 2 * G * 2)
    assert meters.DISCARDED_TOKENS._value.get() - before == 2 * G * 2


async def test_accepted_groups_discard_nothing(rig: Rig) -> None:
    rig.start_worker(CountingEngine())
    await rig.open(0, rig.task(0, 0), rig.task(0, 1))
    await rig.drained(0)
    await rig.commit(0)
    await rig.open(1, rig.task(1, 0))
    await rig.drained(1)
    assert await counts(rig) == (0, 0)


async def test_group_of_another_version_discards_its_tokens(rig: Rig) -> None:
    engine = CountingEngine()
    engine.stamp = 7
    rig.start_worker(engine)
    await rig.open(0, rig.task(0, 0))
    await rig.until_told("group.stale")
    engine.stamp = None
    await rig.drained(0)
    assert await counts(rig) == (1, G * TOKENS_PER_RESPONSE)


async def test_group_after_an_engine_error_comes_back(rig: Rig) -> None:
    engine = CountingEngine()
    engine.generate_errors = [RuntimeError("out of luck")]
    rig.start_worker(engine)
    await rig.open(0, rig.task(0, 0))
    await rig.drained(0)
    assert await counts(rig) == (1, 0)
