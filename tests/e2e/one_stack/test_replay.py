"""`onbeat replay`: the same bits from the same record, and a loud difference when the record was touched."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from onbeat.contracts.errors import OnbeatError
from onbeat.contracts.states import JobState
from onbeat.machine.cores import available_cores
from onbeat.streams.codec import decode_group
from onbeat.streams.keys import JobKeys
from tests.conftest import free_port
from tests.e2e.stack import RunningStack, replay, tiny_job


@contextmanager
def changed_reward(stack: RunningStack, job_id: str, iteration: int) -> Iterator[None]:
    """Change a reward without a report: the ledger points to a group with another reward."""
    redis, keys = stack.redis, JobKeys(job_id)
    group_id, state = next(iter(redis.hgetall(keys.groups(iteration)).items()))
    entry = state.decode().removeprefix("accepted:")
    ((_, fields),) = redis.xrange(keys.rollouts, entry, entry)
    group = decode_group(fields[b"group"])
    group.responses[0].reward += 1.0
    last, _ = redis.xrevrange(keys.rollouts, count=1)[0]
    forged = f"{int(last.split(b'-')[0]) + 1}-0"
    redis.xadd(keys.rollouts, {**fields, b"group": group.SerializeToString()}, id=forged)
    redis.hset(keys.groups(iteration), group_id, f"accepted:{forged}")
    try:
        yield
    finally:
        redis.hset(keys.groups(iteration), group_id, state)
        redis.xdel(keys.rollouts, forged)


def test_replay_agrees_bit_for_bit(stack, finished):
    last = finished.num_iterations - 1  # two checkpoints are kept, those after the last two
    for iteration, start in ((last, last), (1, 0)):
        report = replay(stack, finished.id, iteration)
        assert (report["bits_agree"], report["replayed_from"]) == (True, start)
    with pytest.raises(OnbeatError, match="is not committed"):
        replay(stack, finished.id, finished.num_iterations)


def test_rows_as_long_as_memory_allows_replay_bit_for_bit(stack, folder):
    job = tiny_job(folder, training={"max_tokens_per_micro_batch": "auto"}, schedule={"num_iterations": 3})
    done = stack.wait(stack.client.jobs.create(job).id)
    assert done.state is JobState.SUCCEEDED, done.error
    (event,) = stack.events(done.id, "job.row_tokens")
    assert event.message.startswith(f"rows of up to {done.max_tokens_per_micro_batch} tokens")
    assert done.config["training"]["max_tokens_per_micro_batch"] == "auto"
    assert replay(stack, done.id, 2)["bits_agree"]


def test_replay_command_notices_a_forged_record(stack, finished):
    last = finished.num_iterations - 1
    options = ["--iteration", str(last), "--cores", str(available_cores()[-1]), "--data-dir", str(stack.data_dir)]
    command = [sys.executable, "-m", "onbeat.cli", "replay", finished.id, *options]
    run = partial(subprocess.run, command, capture_output=True, text=True, timeout=120)
    with changed_reward(stack, finished.id, last):
        forged = run()
    honest = run()
    assert (forged.returncode, honest.returncode) == (1, 0), forged.stderr + honest.stderr
    assert [json.loads(done.stdout)["bits_agree"] for done in (forged, honest)] == [False, True]


def test_replay_without_redis_ends_with_one_sentence():
    environment = os.environ | {"ONBEAT_REDIS_URL": f"redis://127.0.0.1:{free_port()}", "ONBEAT_REDIS_RETRY_S": "1"}
    command = [sys.executable, "-m", "services.trainer.replay", "job-1", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("Redis at 127.0.0.1:")
    assert "Traceback" not in done.stderr
