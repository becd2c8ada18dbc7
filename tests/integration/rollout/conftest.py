"""A job whose trainer is a fake, for rollouts in this process."""

from collections.abc import AsyncIterator

import pytest_asyncio

from onbeat.streams.ledger import Ledger
from tests.integration.rollout.rollout_rig import Rig


@pytest_asyncio.fixture
async def rig(ledger: Ledger) -> AsyncIterator[Rig]:
    rig = Rig(ledger)
    await rig.start_job()
    yield rig
    await rig.stop()
