"""Rewards that see the group and may have no opinion, and responses that were cut and masked, on a real stack."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from statistics import fmean, stdev

import pytest

from onbeat.contracts.records import Sample
from onbeat.contracts.states import JobState
from onbeat.objectives.grpo import EPS
from onbeat.streams.keys import JobKeys
from tests.e2e.stack import RunningStack, replay, tiny_job

SHAPE = {"num_prompts_per_iteration": 6, "num_samples_per_prompt": 4, "max_response_tokens": 8}
MASK = SHAPE | {"truncated": "mask", "stop": list("abcdefgh")}


def run(stack: RunningStack, folder, **sections) -> str:
    """Run a job of two iterations to its end, and check that its audit is clean."""
    job_id = stack.client.jobs.create(tiny_job(folder, schedule={"num_iterations": 2}, **sections)).id
    job = stack.wait(job_id)
    assert job.state is JobState.SUCCEEDED, job.error
    report = stack.client.jobs.audit(job_id)
    assert report.is_clean, report.violation
    return job_id


def groups_of(stack: RunningStack, job_id: str, iteration: int) -> list[list[Sample]]:
    samples = sorted(stack.client.jobs.samples(job_id, iteration, limit=99), key=lambda sample: sample.group_id)
    return [list(members) for _, members in groupby(samples, key=lambda sample: sample.group_id)]


def test_responses_without_an_opinion_are_not_trained(stack, folder):
    job_id = run(stack, folder, reward={"name": "opinions", "options": {}}, objective={"type": "grpo"}, rollout=SHAPE)
    num_without = 0
    for record in stack.client.jobs.iterations(job_id):
        groups = groups_of(stack, job_id, record.iteration)
        given = [[sample.reward for sample in group if sample.reward is not None] for group in groups]
        assert (len(groups), {len(group) for group in groups}) == (6, {4})
        without = sum(sample.reward is None for group in groups for sample in group)
        assert record.metrics.get("rollout/responses_without_reward", 0) == without
        assert record.reward_mean == pytest.approx(fmean(reward for rewards in given for reward in rewards))
        assert record.metrics["rollout/uniform_groups"] == sum(len(set(rewards)) < 2 for rewards in given)
        for group, rewards in zip(groups, given, strict=True):
            # Recorded are four digits.
            assert advantages_of(group) == pytest.approx(reference(group, rewards), rel=1e-3, nan_ok=True)
        num_without += without
    assert num_without > 0
    assert replay(stack, job_id, 1)["bits_agree"]


def advantages_of(group: list[Sample]) -> list[float]:
    return [math.nan if sample.advantage is None else sample.advantage for sample in group]


def reference(group: list[Sample], given: list[float]) -> list[float]:
    """Compute GRPO's advantages among the responses that have a reward; NaN for others."""
    if len(set(given)) < 2:
        return [math.nan if sample.reward is None else 0.0 for sample in group]
    mean, scale = fmean(given), stdev(given) + EPS
    return [math.nan if sample.reward is None else (sample.reward - mean) / scale for sample in group]


def test_masked_responses_replay_and_only_with_their_mask(stack, folder):
    job_id = run(stack, folder, rollout=MASK, reward={"options": {"pattern": "[a-z]"}})
    taught = [group for group in groups_of(stack, job_id, 1) if any(sample.advantage for sample in group)]
    cut = [sample for group in taught for sample in group if sample.finish_reason == "length"]
    assert cut
    assert not any(sample.advantage for sample in cut)
    assert replay(stack, job_id, 1)["bits_agree"]
    with changed_truncation(stack, job_id, "score"):
        assert not replay(stack, job_id, 0)["bits_agree"]


@contextmanager
def changed_truncation(stack: RunningStack, job_id: str, truncated: str) -> Iterator[None]:
    """Change `rollout.truncated` in the record of a job."""
    key = JobKeys(job_id).job
    recorded = stack.redis.hget(key, "config")
    config = json.loads(recorded)
    config["rollout"]["truncated"] = truncated
    stack.redis.hset(key, "config", json.dumps(config))
    try:
        yield
    finally:
        stack.redis.hset(key, "config", recorded)
