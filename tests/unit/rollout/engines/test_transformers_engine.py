"""The reference engine beside the other work of its process."""

import asyncio

from onbeat.engines import Sampling
from services.rollout.engines.transformers_engine import TransformersEngine

MORE_THAN_THREADS = 40  # asyncio's own pool has at most 32


async def test_groups_that_wait_leave_threads_to_others() -> None:
    engine = TransformersEngine()
    engine._model, engine._version = object(), 0
    sampling = Sampling(max_response_tokens=1, temperature=1.0, seed=0)
    with engine._lock:  # as a long group does
        groups = [asyncio.create_task(engine.generate([1], 1, sampling, 0)) for _ in range(MORE_THAN_THREADS)]
        await asyncio.sleep(0)
        pulling = asyncio.create_task(asyncio.to_thread(int))
        done, _ = await asyncio.wait({pulling}, timeout=2.0)
        for group in groups:
            group.cancel()
        await asyncio.wait(groups)
    await pulling
    assert done
    assert engine.num_in_flight == 0
