"""Samples of a real local stack: every token has its text, every response the advantage that it was trained with."""

from collections import defaultdict
from statistics import fmean, stdev

import pytest

from tests.tiny_models import build_tokenizer


@pytest.fixture(scope="module")
def groups(stack, finished):
    """All of the job, in the order of their iterations."""
    ids = [(iteration, index) for iteration in range(finished.num_iterations) for index in range(finished.num_prompts)]
    return [stack.client.jobs.group(finished.id, f"{iteration}-{index}") for iteration, index in ids]


def test_advantages_are_those_of_grpo(groups):
    num_trained = 0
    for group in groups:
        rewards = [sample.reward for sample in group.responses]
        centred = [reward - fmean(rewards) for reward in rewards]
        expected = [each / (stdev(rewards) + 1e-4) for each in centred]
        assert [sample.advantage for sample in group.responses] == pytest.approx(expected, abs=1e-4)
        num_trained += any(expected)
    assert num_trained > len(groups) / 8  # else this shows little


def test_every_token_has_its_part_of_the_text(groups):
    """A random model: most responses hold bytes that are no characters."""
    tokenizer = build_tokenizer()
    for group in groups:
        for sample, tokens in zip(group.responses, group.tokens, strict=True):
            assert len(tokens) == sample.num_tokens
            assert "".join(token.text for token in tokens) == sample.response
            assert tokenizer.decode([token.id for token in tokens], skip_special_tokens=True) == sample.response
            assert all(token.logprob <= 0 for token in tokens)


def test_prompts_of_later_epochs_are_found_again(stack, finished, groups):
    by_prompt = defaultdict(list)
    for group in groups:
        by_prompt[group.prompt].append(group.group_id)
    assert max(map(len, by_prompt.values())) > 1
    for alike in by_prompt.values():
        for group_id in alike:
            assert [each.group_id for each in stack.client.jobs.alike(finished.id, group_id)] == alike
