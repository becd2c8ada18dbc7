"""Supervised iterations on a real stack: a job of these alone, and a warm start before RL."""

import json
import time

from onbeat.contracts.states import JobState
from tests.e2e.stack import replay, tiny_job

ROWS = [{"prompt": f"say {index}", "response": f"{index} and {index}"} for index in range(10)]
TURNS = [{"role": role, "content": "a b"} for role in ("user", "assistant", "user", "assistant")]
CONVERSATIONS = [{"turns": TURNS}, {"turns": TURNS[:2]}]


def examples(folder, name="examples.jsonl", rows=ROWS):
    path = folder / "data" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return {"type": "jsonl", "path": str(path)}


def sft_job(folder, num_iterations=4, **warm_start):
    job = tiny_job(folder, schedule={"num_iterations": num_iterations}, checkpoint={"every_iterations": 2})
    for section in ("data", "reward", "rollout", "optimizer"):
        del job[section]
    start = {"data": examples(folder), "num_rows_per_iteration": 4, "learning_rate": 1e-2} | warm_start
    return job | {"objective": {"type": "sft"}, "warm_start": start}


def test_sft_alone_learns_and_replays(stack, folder):
    """A trainer is killed on the way."""
    job_id = stack.client.jobs.create(sft_job(folder, num_iterations=8)).id
    while stack.job(job_id).next_iteration < 3:
        time.sleep(0.02)
    assert stack.signal("trainer")
    job = stack.wait(job_id)
    assert job.state is JobState.SUCCEEDED, job.error
    records = stack.client.jobs.iterations(job_id)
    losses = [record.metrics["sft/loss"] for record in records]
    assert losses[-1] < losses[0] - 1, losses
    assert all(record.reward_mean is None and record.overlap_frac is None for record in records)
    (sample, *_) = stack.client.jobs.samples(job_id, iteration=0)
    assert (sample.prompt, sample.response) in [(row["prompt"], row["response"]) for row in ROWS]
    assert stack.client.jobs.group(job_id, sample.group_id).tokens == [[]]
    audit = stack.client.jobs.audit(job_id)
    assert (audit.is_clean, audit.num_trained_groups, audit.num_loads) == (True, 32, 0), audit.violation
    assert replay(stack, job_id, 5)["bits_agree"]


def test_a_warm_start_goes_on_into_rl(stack, folder):
    """Engines load the first version, that of the end of the warm start, and those after it."""
    start = {"data": examples(folder), "num_rows_per_iteration": 4, "epochs": 1, "learning_rate": 1e-3}
    start["held_out"] = {"data": examples(folder, "held_out.jsonl", CONVERSATIONS), "num_rows": 2}
    start["held_out"]["data"]["messages_field"] = "turns"
    schedule = {"num_iterations": 6}
    job = tiny_job(folder, warm_start=start, schedule=schedule, checkpoint={"every_iterations": 2})
    job_id = stack.client.jobs.create(job).id
    while stack.job(job_id).next_iteration < 2:
        time.sleep(0.02)
    assert stack.signal("trainer")
    job = stack.wait(job_id)
    assert job.state is JobState.SUCCEEDED, job.error
    assert job.config["warm_start"]["num_iterations"] == 3
    records = stack.client.jobs.iterations(job_id)
    assert ["sft/loss" in record.metrics for record in records] == [True] * 3 + [False] * 3
    assert [record.policy_version for record in records] == list(range(6))
    assert ["sft/held_out_loss" in record.metrics for record in records] == [False] * 2 + [True] + [False] * 3
    assert all(record.generate_s is None and record.rollout_idle_frac is None for record in records[:3])
    assert all(record.reward_mean is not None and record.mismatch_mean < 1e-3 for record in records[3:])
    loaded = [weights.policy_version for weights in stack.client.jobs.weights(job_id) if weights.rollouts]
    assert {4, 5} <= set(loaded) <= {0, 3, 4, 5, 6}
    audit = stack.client.jobs.audit(job_id)
    assert (audit.is_clean, audit.num_commits) == (True, 6), audit.violation
    assert all(replay(stack, job_id, iteration)["bits_agree"] for iteration in (2, 4))


def test_too_little_after_the_warm_start_ends_the_job(stack, folder):
    """Both ends of the warm start are evaluated, and the last checkpoint is that of its end."""
    start = {"data": examples(folder), "num_rows_per_iteration": 4, "num_iterations": 1, "min_pass_at_k": 1.0}
    job = tiny_job(folder, warm_start=start, checkpoint={"every_iterations": 5})
    job["evaluation"] = {"data": job["data"], "num_prompts": 4, "num_samples_per_prompt": 2, "every_iterations": 9}
    job["reward"] = {"name": "exact"}
    job_id = stack.client.jobs.create(job).id
    job = stack.wait(job_id)
    assert job.state is JobState.FAILED
    assert job.error.startswith(
        "stopped before RL: the model after the warm start solves 0.000 of the held-out prompts"
    )
    assert job.checkpoint.endswith("iteration-000001")
    assert [record.policy_version for record in stack.client.jobs.evaluations(job_id)] == [0, 1]


def test_a_row_longer_than_the_context_is_named(stack, folder):
    rows = [*ROWS[:3], {"prompt": "long", "response": "x" * 600}]
    for on_too_long in ("refuse", "drop"):
        start = {"data": examples(folder, f"{on_too_long}.jsonl", rows), "on_too_long": on_too_long}
        job = stack.wait(stack.client.jobs.create(sft_job(folder, num_iterations=1, **start)).id)
        if on_too_long == "refuse":
            assert job.state is JobState.FAILED
            assert job.error.startswith("warm_start.data: row 3 has 6"), job.error
        else:
            assert job.state is JobState.SUCCEEDED, job.error
            (record,) = stack.client.jobs.iterations(job.id)
            assert (record.metrics["sft/rows"], record.metrics["sft/dropped_rows"]) == (3, 1)
            assert stack.client.jobs.audit(job.id).is_clean
