"""Policy, old and reference in one pass give what each gives alone."""

import functools

import pytest
import torch

from onbeat.config import LoraConfig
from services.trainer.model import model as model_module
from services.trainer.model.lora import adapted_layers, add_adapters
from services.trainer.model.model import frozen_base, response_logprobs, tri_model_logprobs, use_attention
from tests.trainer_fixtures import moved_model

moved = functools.partial(moved_model, dtype=torch.float32, by=0.02)


@pytest.mark.parametrize("attention", ["onbeat_shared_prompt", "sdpa"])
def test_one_pass_equals_three(attention, batch, calls_of):
    policy, old, reference = moved(0), frozen_base(moved(1)), frozen_base(moved(2))
    for model in (policy, old, reference):
        use_attention(model, attention)
    alone = [response_logprobs(model, batch, 0.7) for model in (policy, old, reference)]
    prepared = calls_of(model_module, "prepare_inputs")
    logprobs, entropy = tri_model_logprobs(policy, old, reference, batch, 0.7)
    assert len(prepared) == 1
    together = (logprobs.trainer, logprobs.old, logprobs.ref)
    for computed, expected in zip(together, alone, strict=True):
        assert torch.equal(computed, expected[0])
    assert torch.equal(entropy, alone[0][1])
    assert not torch.equal(logprobs.trainer, logprobs.old)
    assert [computed.requires_grad for computed in together] == [True, False, False]


def test_models_that_the_algebra_does_not_need_are_skipped(batch):
    policy = moved(0)
    logprobs, _ = tri_model_logprobs(policy, None, None, batch, 1.0)
    assert torch.equal(logprobs.trainer, response_logprobs(policy, batch, 1.0)[0])
    assert torch.equal(logprobs.old, logprobs.trainer)
    assert (logprobs.old.requires_grad, logprobs.ref) == (False, None)


def test_the_policy_without_adapters_is_its_own_reference(batch):
    policy, base = moved(0), frozen_base(moved(0))
    add_adapters(policy, LoraConfig(rank=4), seed=0)
    with torch.no_grad():
        for layer in adapted_layers(policy).values():
            layer.lora_B["default"].weight.fill_(0.05)
    logprobs, _ = tri_model_logprobs(policy, None, policy, batch, 1.0)
    assert torch.equal(logprobs.ref, response_logprobs(base, batch, 1.0)[0])
    assert not torch.equal(logprobs.ref, logprobs.trainer)
    assert torch.equal(logprobs.trainer, response_logprobs(policy, batch, 1.0)[0]), "its adapters are on again"
    logprobs.trainer.sum().backward()
    assert all(p.grad is not None for p in policy.parameters() if p.requires_grad)
