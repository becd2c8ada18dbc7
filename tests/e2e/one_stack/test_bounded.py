"""`bounded` with evaluation on a real local stack: the bound, one version an iteration, held-out scores, replay."""

import pytest

from onbeat.contracts.states import EvaluationState, JobState
from onbeat.terminal.report import make_report
from tests.e2e.stack import replay, tiny_job

NUM_ITERATIONS, MAX_STALENESS = 6, 2


@pytest.fixture(scope="module")
def finished(stack, folder):
    held_out = folder / "data" / "held_out.jsonl"
    held_out.write_text("\n".join(f'{{"prompt": "tell {index}", "answer": "x"}}' for index in range(6)))
    job = tiny_job(
        folder,
        schedule={"mode": "bounded", "max_staleness": MAX_STALENESS, "num_iterations": NUM_ITERATIONS},
        checkpoint={"every_iterations": 2},
        training={"num_updates_per_iteration": 2},
    )
    data = {"type": "jsonl", "path": str(held_out)}
    job["evaluation"] = {"data": data, "every_iterations": 4, "num_prompts": 6, "num_samples_per_prompt": 2}
    job_id = stack.client.jobs.create(job).id
    return stack, job_id, stack.wait(job_id)


def test_every_iteration_has_one_version_within_the_bound(finished):
    stack, job_id, job = finished
    assert job.state is JobState.SUCCEEDED, job.error
    versions = [record.policy_version for record in stack.client.jobs.iterations(job_id)]
    assert len(versions) == NUM_ITERATIONS
    assert all(t - MAX_STALENESS <= version <= t for t, version in enumerate(versions))
    assert any(version < t for t, version in enumerate(versions)), "nothing was ever generated ahead"
    assert versions == sorted(versions)


def test_report_has_the_staleness_and_what_gac_did(finished):
    stack, job_id, job = finished
    jobs = stack.client.jobs
    report = make_report(job, jobs.iterations(job_id), jobs.evaluations(job_id))
    for record in report["iterations"]:
        assert record["staleness_max"] == record["iteration"] - record["policy_version"]
    last = report["iterations"][-1]["metrics"]
    assert {"train/divergence", "train/grad_cosine", "train/gac_project", "train/gac_skip"} <= last.keys()
    assert last["train/divergence"] > 0


def test_held_out_prompts_are_scored_and_never_trained(finished):
    stack, job_id, _ = finished
    records = stack.client.jobs.evaluations(job_id)
    assert [record.evaluation for record in records] == [0, 4, 6]
    assert all(record.state is EvaluationState.DONE and record.num_groups == 6 for record in records)
    trained = stack.client.jobs.iterations(job_id)
    assert all(record.num_groups == 8 for record in trained)


def test_a_stale_iteration_replays_bit_for_bit(finished):
    stack, job_id, _ = finished
    assert replay(stack, job_id, NUM_ITERATIONS - 1)["bits_agree"]


def test_game_of_several_turns_is_trained_within_the_bound(stack, folder):
    job = tiny_job(
        folder,
        environment={"name": "guess_number", "options": {"highest": 9, "max_guesses": 2}, "max_turns": 2},
        rollout={"num_prompts_per_iteration": 4},
        schedule={"mode": "bounded", "max_staleness": 1, "num_iterations": 4},
    )
    job_id = stack.client.jobs.create(job).id
    record = stack.wait(job_id)
    assert record.state is JobState.SUCCEEDED, record.error
    report = stack.client.jobs.audit(job_id)
    assert report.is_clean, report.violation
    iterations = stack.client.jobs.iterations(job_id)
    assert all(t - 1 <= iteration.policy_version <= t for t, iteration in enumerate(iterations))
    assert any(iteration.policy_version < t for t, iteration in enumerate(iterations))
    assert all(1 < iteration.metrics["episode/turns_mean"] <= 2 for iteration in iterations)
    assert any(iteration.metrics["train/grad_norm"] > 0 for iteration in iterations)
