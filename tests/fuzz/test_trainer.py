"""Groups that no engine of the job can have made: the trainer names group and worker, and its weights stay."""

from math import inf, nan
from operator import delitem, setitem

import pytest
import torch

from onbeat.contracts.errors import JobFailed
from onbeat.streams.codec import RolloutGroup
from tests.trainer_fixtures import VOCAB, job_config, recorded_iterations, tiny_model, train


def set_observed_token(group: RolloutGroup) -> None:
    response = group.responses[1]
    response.turns.add(
        num_shared=len(group.prompt_token_ids), num_sampled=len(response.token_ids), observed_token_ids=[1, 2**32 - 1]
    )


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda group: delitem(group.responses, slice(1, None)), "1 responses, not "),
        (lambda group: setitem(group.prompt_token_ids, 0, VOCAB), f"token id {VOCAB}, the model has {VOCAB} tokens"),
        (lambda group: setitem(group.responses[1].token_ids, -1, 2**32 - 1), "token id 4294967295"),
        (set_observed_token, "token id 4294967295"),
        (lambda group: setitem(group.responses[1].rollout_logprobs, -1, nan), "response 1: a logprob is not finite"),
        (lambda group: setitem(group.responses[1].rollout_logprobs, 0, -inf), "response 1: a logprob is not finite"),
    ],
)
def test_an_impossible_group_fails_the_job_by_name(spoil, problem, tmp_path):
    groups = recorded_iterations(1)
    groups[2].worker_id = "w7"
    spoil(groups[2])
    model = tiny_model(dtype=torch.float32)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(JobFailed, match=rf"0-2.*{problem}.*w7"):
        train(job_config(schedule={"num_iterations": 1}), groups, tmp_path, model)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
