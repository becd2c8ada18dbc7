"""A model that cannot be packed is noticed by trying, and trained one by one with the right numbers."""

import pytest
import torch
from transformers import BloomConfig, Gemma2Config, LlamaConfig, MistralConfig

from services.trainer.attention.short import ShortPlan
from services.trainer.batch import MIN_PREFIX, pack
from services.trainer.model import response_logprobs, use_attention
from services.trainer.packing import choose_attention, try_kernel
from tests.unit.test_shared_prompt import behind, gradients, one_by_one_logprobs
from tests.unit.trainer_fixtures import VOCAB, make_group, tiny_config, tiny_model


def test_an_ordinary_model_stays_packed():
    model = tiny_model(tiny_config(LlamaConfig), torch.float32)
    assert choose_attention(model, 512) == ""
    assert model.is_packed


def test_a_soft_capped_attention_is_not_packed():
    config = tiny_config(Gemma2Config, head_dim=8, sliding_window=512, attn_logit_softcapping=1.0)
    model = tiny_model(config, torch.float32)
    assert "packed" in choose_attention(model, 64)
    assert (model.is_packed, model.config._attn_implementation) == (False, "eager")


def test_positions_inside_the_attention_are_not_packed():
    config = BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4)
    model = tiny_model(config, torch.float32, attention="eager")
    assert choose_attention(model, 64) != ""
    assert not model.is_packed


@pytest.mark.parametrize(("longest", "is_packed"), [(64, True), (65, False)])
def test_a_window_matters_only_to_longer_sequences(longest, is_packed):
    model = tiny_model(tiny_config(MistralConfig, sliding_window=64), torch.float32)
    reason = choose_attention(model, longest)
    assert (reason == "") == is_packed
    assert is_packed or "set model.max_context_tokens to 64" in reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_right_kernel_passes_its_trial(dtype):
    assert try_kernel(tiny_config(head_dim=16), torch.device("cpu"), dtype) == ""


@pytest.mark.parametrize(
    ("kernel", "complaint"),
    [
        (lambda plan, query, key, value, scale: query.transpose(1, 2) + 0 * (key + value).sum(), "is off by"),
        (lambda plan, query, key, value, scale: right_output_wrong_gradient(plan, query, key, value), "is off by"),
        (lambda plan, query, key, value, scale: key.nonsense, "fails: AttributeError"),
    ],
)
def test_a_wrong_kernel_is_noticed(monkeypatch, kernel, complaint):
    monkeypatch.setattr(ShortPlan, "attend", kernel)
    assert complaint in try_kernel(tiny_config(), torch.device("cpu"), torch.float32)


attend = ShortPlan.attend


def right_output_wrong_gradient(plan, query, key, value):
    return attend(plan, query, key, value.detach(), None) + 0 * value.sum()


@pytest.mark.parametrize("prefix_length", [0, MIN_PREFIX])
def test_one_by_one_gives_the_reference_numbers(prefix_length):
    groups = behind([3] * prefix_length, make_group("0-0", 5, (3, 1, 4)), make_group("0-1", 2, (1, 1)))
    model, reference = (tiny_model(tiny_config(), torch.float32) for _ in range(2))
    use_attention(model, "sdpa")
    found, _ = response_logprobs(model, pack(groups, torch.device("cpu")), 0.7)
    expected = one_by_one_logprobs(reference, groups, 0.7)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    wanted = gradients(reference, expected)
    for name, gradient in gradients(model, found).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-3, msg=name)
