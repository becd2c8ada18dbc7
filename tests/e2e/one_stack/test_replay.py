"""`onbeat replay`: the same bits from the same record, and a loud difference when the record was touched."""

import asyncio
import json

from onbeat.streams.codec import decode_group
from onbeat.streams.connection import connect
from onbeat.streams.keys import JobKeys
from tests.e2e.stack import RunningStack, replay, tiny_job


async def change_a_reward(stack: RunningStack, job_id: str, iteration: int) -> None:
    """Behind everybody's back: put a group with another reward where the ledger points to."""
    redis = connect(stack.redis_url)
    keys = JobKeys(job_id)
    group_id, state = next(iter((await redis.hgetall(keys.groups(iteration))).items()))
    entry = state.decode().removeprefix("accepted:")
    ((_, fields),) = await redis.xrange(keys.rollouts, entry, entry)
    group = decode_group(fields[b"group"])
    group.responses[0].reward += 1.0
    last, _ = (await redis.xrevrange(keys.rollouts, count=1))[0]
    forged = f"{int(last.split(b'-')[0]) + 1}-0"
    await redis.xadd(keys.rollouts, {**fields, b"group": group.SerializeToString()}, id=forged)
    await redis.hset(keys.groups(iteration), group_id, f"accepted:{forged}")
    await redis.aclose()


def test_replay_agrees_bit_for_bit_and_notices_a_forged_record(stack, folder):
    job = tiny_job(folder, schedule={"num_iterations": 3}, checkpoint={"every_iterations": 2})
    job_id = stack.client.jobs.create(job).id
    stack.wait(job_id)
    for iteration, start in ((2, 2), (1, 0)):
        code, output = replay(stack, job_id, iteration)
        assert code == 0, output
        assert json.loads(output)["bits_agree"]
        assert json.loads(output)["replayed_from"] == start
    code, output = replay(stack, job_id, 3)
    assert (code, "is not committed" in output) == (2, True)
    asyncio.run(change_a_reward(stack, job_id, 2))
    code, output = replay(stack, job_id, 2)
    assert (code, json.loads(output)["bits_agree"]) == (1, False)
