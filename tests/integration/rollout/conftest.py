"""A job whose trainer is a fake, for rollouts in this process."""

import os
from collections.abc import AsyncIterator, Iterator
from unittest.mock import patch

import pytest
import pytest_asyncio

from onbeat.streams.ledger import Ledger
from tests.integration.rollout.rollout_rig import Rig


@pytest.fixture(autouse=True, scope="module")
def environment_of_vllm() -> Iterator[None]:
    """Keep variables that an engine sets for vLLM, such as OMP_PROC_BIND, from processes of later tests."""
    with patch.dict(os.environ):
        yield


@pytest_asyncio.fixture
async def rig(ledger: Ledger) -> AsyncIterator[Rig]:
    rig = Rig(ledger)
    await rig.start_job()
    yield rig
    await rig.stop()
