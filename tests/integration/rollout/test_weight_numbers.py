"""Reports of a rollout about each move to a policy version: to the ledger, and to Prometheus."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from prometheus_client import REGISTRY

from onbeat.contracts.records import WeightUpdate
from tests.integration.rollout.rollout_rig import Rig
from tests.rollout_fakes import FakeEngine, manifest_of


def sample(name: str) -> float:
    return REGISTRY.get_sample_value(f"onbeat_rollout_weight_{name}") or 0.0


async def update_to(rig: Rig, version: int) -> WeightUpdate:
    async def is_recorded() -> bool:
        record = await rig.ledger.versions.weights(rig.job_id, version)
        return record is not None

    await rig.until(is_recorded)
    record = await rig.ledger.versions.weights(rig.job_id, version)
    assert record is not None
    return record.rollouts["w0"]


async def test_first_version_is_loaded_to_join_and_next_opens_later(rig):
    load_s = 0.2

    class SlowLoader(FakeEngine):
        async def load(self, policy_version: int, weights_file: Path, arrivals: AsyncIterator[Sequence[str]]) -> None:
            await asyncio.sleep(load_s)
            await super().load(policy_version, weights_file, arrivals)

    size = manifest_of(0).size_bytes
    before = {name: sample(name) for name in ("received_bytes_total", "full_bytes_total", "open_seconds_count")}
    rig.start_worker(SlowLoader())
    await rig.open(0, rig.task(0, 0))
    await rig.drained(0)
    joined = await update_to(rig, 0)
    assert (joined.received_bytes, joined.sources, joined.num_faults) == (size, [rig.trainer.address], 0)
    assert joined.open_s is None
    await rig.commit(0)
    update = await update_to(rig, 1)
    assert update.load_s >= load_s
    assert update.open_s is not None
    assert update.open_s >= update.load_s
    assert update.received_bytes == manifest_of(1).size_bytes
    rise = {name: sample(name) - value for name, value in before.items()}
    assert rise == {"received_bytes_total": 2 * size, "full_bytes_total": 2 * size, "open_seconds_count": 1}


async def test_cured_fault_is_counted(rig, caplog):
    before = sample("faults_total")
    rig.start_worker()
    await rig.open(0, rig.task(0, 0))
    await rig.drained(0)
    rig.trainer.refused = {1}
    await rig.commit(0)
    await rig.open(1, rig.task(1, 0))
    await rig.until(lambda: "policy version 1 is tried again" in caplog.text)
    rig.trainer.refused = set()
    update = await update_to(rig, 1)
    await rig.drained(1)
    assert update.num_faults > 0
    assert sample("faults_total") - before == update.num_faults == len(await rig.event_messages("weights.fault"))
    assert update.received_bytes == manifest_of(1).size_bytes
