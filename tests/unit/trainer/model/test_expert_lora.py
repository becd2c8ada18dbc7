"""Adapters on experts: every family of them, against PEFT where it can and an independent loop."""

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from onbeat.config import LoraConfig
from services.trainer.model.adapter_folder import load_adapter, write_adapter
from services.trainer.model.expert_lora import ExpertFactors, factors_in
from services.trainer.model.lora import add_adapters, bypassed_layers, published_tensors, reach, without_adapters
from services.trainer.model.model import Passes, frozen_base, load_frozen, set_up
from services.trainer.model.optimizer import MasterAdamW
from services.trainer.passes.shrink import random_model
from services.trainer.session import describe_reach
from tests.architectures import CPU, TYPES, Row
from tests.trainer_fixtures import job_config

TOKENS = torch.arange(1, 24)[None]
SIZES = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# Families that transformers builds with experts; `test_every_family_of_experts_is_listed` compares.
FAMILIES = """
afmoe aria_text axk1 axk2 cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 dots1 ernie4_5_moe exaone_moe
flex_olmo glm4_moe glm4_moe_lite glm_moe_dsa gpt_oss granitemoe granitemoe_swa granitemoehybrid granitemoeshared
hunyuan_v1_moe hy_v3 inkling_text jamba jetmoe kimi_linear laguna lfm2_moe llama4_text longcat_flash mellum
mimo_v2_flash minimax minimax_m2 mixtral nemotron_h olmoe phimoe qwen2_moe qwen3_moe qwen3_5_moe_text qwen3_next
solar_open zaya llama4
""".split()  # noqa: SIM905


def small_model(family, **options):
    return random_model(AutoConfig.for_model(family, **SIZES | EXPERTS | options), "eager")


def adapted(model, seed=1, **lora):
    """Return the model as the trial prepares it, with adapters that have been moved away from zero."""
    set_up(model, Passes("eager", True, bypassed=bypassed_layers(model, TOKENS)), CPU)
    add_adapters(model, LoraConfig(**{"rank": 4, "alpha": 8.0} | lora), seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name or (".lora_" in name and name.endswith(".b")):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return model


@torch.no_grad()
def logits(model):
    return model(TOKENS, use_cache=False).logits


# ---- one family in each way of keeping experts -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])  # [E, out, in] and [E, in, out]
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_published_experts_equal_a_loop_in_float64(family, dtype):
    """Base + scale B A, one expert at a time, rounded once."""
    model = adapted(small_model(family).to(dtype))
    published, parameters = dict(published_tensors(model)), dict(model.named_parameters())
    assert len(factors_in(model)) == 2 * 2
    for name, factors in factors_in(model).items():
        for expert in range(4):
            update = 2.0 * factors.b[expert].double() @ factors.a[expert].double()
            update = update.T if family == "gpt_oss" else update
            exact = parameters[name][expert].double() + update
            terms = 2.0 * factors.b[expert].double().abs() @ factors.a[expert].double().abs()
            terms = parameters[name][expert].double().abs() + (terms.T if family == "gpt_oss" else terms)
            rounding = torch.finfo(dtype).eps / 2 * exact.abs() + 4 * torch.finfo(torch.float32).eps * terms
            assert ((published[name][expert].double() - exact).abs() <= rounding).all()
            assert (exact - parameters[name][expert].double()).abs().max() > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_gradients_equal_those_of_an_independent_loop(family):
    """The chain rule by hand: the gradient of W', as full training has it, times the other factor."""
    model = adapted(small_model(family))
    model(TOKENS, use_cache=False).logits.square().mean().backward()
    plain = frozen_base(model).requires_grad_(True)
    load_frozen(plain, published_tensors(model))
    plain(TOKENS, use_cache=False).logits.square().mean().backward()
    whole = dict(plain.named_parameters())
    for name, factors in factors_in(model).items():
        for expert in range(4):
            gradient = whole[name].grad[expert]
            gradient = gradient.T if family == "gpt_oss" else gradient
            a, b = factors.a[expert], factors.b[expert]
            torch.testing.assert_close(factors.a.grad[expert], 2.0 * b.T @ gradient, rtol=1e-4, atol=1e-8)
            torch.testing.assert_close(factors.b.grad[expert], 2.0 * gradient @ a.T, rtol=1e-4, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen3_moe", "olmoe"])
def test_peft_computes_the_same_with_the_exported_adapter(family, tmp_path):
    plain = small_model(family)
    plain.save_pretrained(tmp_path / "base")
    model = adapted(small_model(family))
    load_frozen_into(model, plain)
    factors = {name: p.detach() for name, p in model.named_parameters() if ".lora_" in name}
    (tmp_path / "adapter").mkdir()
    write_adapter(tmp_path / "adapter", factors, plain, LoraConfig(rank=4, alpha=8.0), "org/base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager").eval()
    start = logits(base)
    by_peft = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    torch.testing.assert_close(logits(by_peft), logits(model), rtol=0, atol=1e-4)
    assert (logits(model) - start).abs().max() > 1e-2
    config = job_config(model={"adapter": str(tmp_path / "adapter")}, lora={"rank": 4, "alpha": 8.0})
    again = adapted(small_model(family), seed=2)
    load_frozen_into(again, plain)
    load_adapter(again, config)
    assert torch.equal(logits(again), logits(model))
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(stored) == len(factors)


@torch.no_grad()
def load_frozen_into(model, plain):
    """Give a model with adapters the weights of a plain one."""
    weights = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            parameter.copy_(weights[name.replace(".base_layer.", ".")])


@pytest.mark.slow
def test_after_an_update_the_published_policy_is_the_trained_one():
    model = adapted(small_model("mixtral").to(torch.bfloat16))
    optimizer = MasterAdamW(model, job_config(optimizer={"learning_rate": 1e-2}).optimizer)
    before = logits(model)
    model(TOKENS, use_cache=False).logits.square().mean().backward()
    optimizer.rescale(1.0)
    optimizer.clip()
    optimizer.step()
    published = frozen_base(model)
    assert not factors_in(published)
    load_frozen(published, published_tensors(model))
    assert torch.equal(logits(published), logits(model))
    assert not torch.equal(logits(model), before)


@pytest.mark.slow
def test_new_adapters_change_nothing_and_the_base_stays():
    plain, model = small_model("mixtral"), small_model("mixtral")
    set_up(model, Passes("eager", True), CPU)
    add_adapters(model, LoraConfig(rank=4), seed=1)
    assert torch.equal(logits(model), logits(plain))
    trained = adapted(small_model("mixtral"))
    with without_adapters(trained):
        assert torch.equal(logits(trained), logits(plain))
    assert not torch.equal(logits(trained), logits(plain))


@pytest.mark.slow
def test_rslora_divides_by_the_root_of_the_rank():
    model = small_model("mixtral")
    config = LoraConfig(rank=16, alpha=8.0, use_rslora=True)
    add_adapters(model, config, seed=1)
    (first, *_) = factors_in(model).values()
    layer = model.get_submodule("model.layers.0.self_attn.q_proj")
    assert (config.scale, first.scale, layer.scaling["default"]) == (2.0, 2.0, 2.0)


@pytest.mark.slow
def test_experts_are_named_by_their_parameters():
    model = adapted(small_model("mixtral"), target_modules=["gate_up_proj"])
    assert {name.rpartition(".")[2] for name in factors_in(model)} == {"gate_up_proj"}
    with pytest.raises(ValueError, match="named up; use 'all-linear' or some of down_proj, gate_up_proj, k_proj"):
        add_adapters(small_model("mixtral"), LoraConfig(target_modules=["up"]), seed=1)


@pytest.mark.slow
def test_share_of_the_weights_that_adapters_reach():
    model = adapted(small_model("mixtral"), target_modules=["gate_up_proj", "down_proj"])
    share, left_out = reach(model)
    total = sum(p.numel() for p in small_model("mixtral").parameters())
    reached = sum(p.numel() for name, p in model.named_parameters() if name in factors_in(model))
    assert share == pytest.approx(reached / total)
    assert share + sum(left_out.values()) == pytest.approx(1.0)
    assert "model.layers.*.mlp.gate" in left_out
    sentence = describe_reach(0.5, {"model.embed_tokens": 0.3, "lm_head": 0.2})
    assert sentence == (
        "adapters reach 50.0% of the weights; the largest without one: model.embed_tokens (30.0%), lm_head (20.0%)"
    )


# ---- all families ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_of_every_family_are_trained_and_published(family):
    model = adapted(random_model(Row(family, family).config(), "eager"))
    factors = factors_in(model)
    assert factors
    published = frozen_base(model)
    load_frozen(published, published_tensors(model))
    assert torch.equal(logits(published), logits(model))
    model(TOKENS, use_cache=False).logits.square().mean().backward()
    for name, one in factors.items():
        assert isinstance(one, ExpertFactors)
        assert one.a.grad is not None, name
        assert one.b.grad.any(), name


@pytest.mark.rare
def test_every_family_of_experts_is_listed():
    listed = []
    for family in TYPES:
        try:
            model = random_model(Row(family, family).config(), "eager")
        except (ValueError, RuntimeError, AssertionError):  # not built by transformers
            continue
        if any(type(module).__name__.endswith("Experts") for module in model.modules()):
            listed.append(family)
    assert set(listed) == set(FAMILIES)
