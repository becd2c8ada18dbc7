"""Samples of a real local stack: every token has its text, every response the advantage that it was trained with."""

from collections import defaultdict
from statistics import fmean, stdev

import pytest

from onbeat.types import JobState
from tests.e2e.stack import tiny_job
from tests.tiny_models import build_tokenizer

NUM_ITERATIONS, NUM_PROMPTS, G = 6, 8, 4  # 48 prompts of 20 rows


@pytest.fixture(scope="module")
def finished(stack, folder):
    job = tiny_job(folder, schedule={"num_iterations": NUM_ITERATIONS}, objective={"type": "grpo"})
    job_id = stack.client.jobs.create(job).id
    assert stack.wait(job_id).state is JobState.SUCCEEDED
    return stack, job_id


def groups_of(finished):
    stack, job_id = finished
    for iteration in range(NUM_ITERATIONS):
        for index in range(NUM_PROMPTS):
            yield stack.client.jobs.group(job_id, f"{iteration}-{index}")


def place(sample):
    return sample.group_id, sample.index


def test_advantages_are_those_of_grpo(finished):
    num_trained = 0
    for group in groups_of(finished):
        rewards = [sample.reward for sample in group.responses]
        centred = [reward - fmean(rewards) for reward in rewards]
        expected = [each / (stdev(rewards) + 1e-4) for each in centred]
        assert [sample.advantage for sample in group.responses] == pytest.approx(expected, abs=1e-4)
        num_trained += any(expected)
    assert num_trained > NUM_ITERATIONS  # else this shows little


def test_samples_are_the_responses_of_the_groups(finished):
    stack, job_id = finished
    for iteration in (0, NUM_ITERATIONS - 1):
        samples = stack.client.jobs.samples(job_id, iteration=iteration, limit=100)
        of_groups = [sample for group in groups_of(finished) for sample in group.responses]
        expected = [sample for sample in of_groups if sample.iteration == iteration]
        assert sorted(samples, key=place) == expected
        good = stack.client.jobs.samples(job_id, iteration=iteration, limit=100, min_reward=0.5)
        assert sorted(good, key=place) == [sample for sample in expected if sample.reward >= 0.5]


def test_every_token_has_its_part_of_the_text(finished):
    """A random model: most responses hold bytes that are no characters."""
    tokenizer = build_tokenizer()
    for group in groups_of(finished):
        for sample, tokens in zip(group.responses, group.tokens, strict=True):
            assert len(tokens) == sample.num_tokens
            assert "".join(token.text for token in tokens) == sample.response
            assert tokenizer.decode([token.id for token in tokens], skip_special_tokens=True) == sample.response
            assert all(token.logprob <= 0 for token in tokens)


def test_prompts_of_later_epochs_are_found_again(finished):
    stack, job_id = finished
    by_prompt = defaultdict(list)
    for group in groups_of(finished):
        by_prompt[group.prompt].append(group.group_id)
    assert max(map(len, by_prompt.values())) > 1
    for alike in by_prompt.values():
        for group_id in alike:
            assert [each.group_id for each in stack.client.jobs.alike(job_id, group_id)] == alike
