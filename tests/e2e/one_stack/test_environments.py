"""A job of three sources on a real stack: one has rewards, the others have an environment each."""

import re
from collections import Counter

import pytest

from onbeat.contracts.records import Sample
from onbeat.contracts.states import EvaluationState, JobState
from tests.e2e.stack import replay, tiny_job

NUM_ITERATIONS = 2
GUESS = {"name": "guess_number", "options": {"highest": 9, "max_guesses": 2}, "max_turns": 2}
LETTERS = {"name": "letters", "options": {"worth": 0.5}, "memory_limit_mb": 1024}


@pytest.fixture(scope="module")
def mixed(stack, folder):
    job = tiny_job(
        folder,
        rollout={"num_prompts_per_iteration": 6, "max_response_tokens": 12},
        training={"max_tokens_per_micro_batch": 512},  # episodes and responses of one turn share a row
        schedule={"num_iterations": NUM_ITERATIONS},
    )
    rows, evaluation = job["data"], {"num_prompts": 2, "num_samples_per_prompt": 2, "every_iterations": NUM_ITERATIONS}
    job["data"] = [
        rows | {"name": "say"},
        rows | {"name": "guess", "environment": GUESS},
        rows | {"name": "letters", "environment": LETTERS},
    ]
    sets = [{"name": "say", "data": rows}, {"name": "letters", "data": rows, "environment": LETTERS}]
    job_id = stack.client.jobs.create(job | {"evaluation": evaluation | {"sets": sets}}).id
    record = stack.wait(job_id)
    assert record.state is JobState.SUCCEEDED, record.error
    return job_id


def test_each_source_is_played_or_answered_as_it_says(stack, mixed):
    for iteration in range(NUM_ITERATIONS):
        samples = stack.client.jobs.samples(mixed, iteration, limit=99)
        assert Counter(sample.source for sample in samples) == {"say": 8, "guess": 8, "letters": 8}
        turns = {source: {len(s.turns) for s in samples if s.source == source} for source in ("say", "letters")}
        assert turns == {"say": {0}, "letters": {1}}
        assert {len(sample.turns) for sample in samples if sample.source == "guess"} <= {1, 2}
        assert any(len(sample.turns) == 2 for sample in samples if sample.source == "guess")
        record = stack.client.jobs.iterations(mixed)[iteration]
        assert record.metrics["episode/turns_mean"] == pytest.approx(
            sum(len(sample.turns) for sample in samples) / 16  # 16 episodes
        )
        assert {f"source/{name}/reward_mean" for name in ("say", "guess", "letters")} <= record.metrics.keys()
        assert "episode/failed" not in record.metrics


def test_each_source_has_the_rewards_that_it_says(stack, mixed):
    of_letters = set()
    for iteration in range(NUM_ITERATIONS):
        for sample in stack.client.jobs.samples(mixed, iteration, limit=99):
            assert sample.reward == pytest.approx(expected_reward(sample))
            of_letters |= {sample.reward} if sample.source == "letters" else set()
    assert len(of_letters) > 2


def expected_reward(sample: Sample) -> float:
    parts = sample.reward_parts
    if sample.source == "say":
        return float(re.search("[0-4]", sample.response) is not None)
    if sample.source == "guess":
        return parts["found"] + 0.1 * parts["sensible"]
    return 0.5 * len(re.findall("[a-z]", sample.response))


def test_held_out_sets_are_played_or_answered_as_they_say(stack, mixed):
    for record in stack.client.jobs.evaluations(mixed):
        assert (record.state, record.num_groups) == (EvaluationState.DONE, 4)
        assert {"say/reward_mean", "letters/reward_mean"} <= record.metrics.keys()
        assert "letters/reward/letters_mean" in record.metrics
        assert "say/reward/letters_mean" not in record.metrics


def test_mixed_job_is_on_policy_and_replays_bit_for_bit(stack, mixed):
    report = stack.client.jobs.audit(mixed)
    assert report.is_clean, report.violation
    assert replay(stack, mixed, NUM_ITERATIONS - 1)["bits_agree"]
