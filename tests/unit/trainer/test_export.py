"""An adapter that leaves the trainer: PEFT computes with it what was trained, and what it does not is measured."""

import json

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2Config

from services.trainer.export import export_adapter, load_plain, logprobs_of
from services.trainer.model.adapter_folder import targets_of
from services.trainer.model.lora import adapted_layers, adapter, published_tensors
from tests.trainer_fixtures import job_config, model_of, recorded_iterations, tiny_config, tiny_model, train

pytestmark = pytest.mark.slow

ROWS = [list(range(1, 40)), [5, 3, 8, 21, 2]]


def trained_checkpoint(tmp_path, dtype, **lora):
    """Train a job with adapters for three iterations; return it, its model, its base and its last checkpoint."""
    base = tmp_path / "base"
    tiny_model(tiny_config(), getattr(torch, dtype)).save_pretrained(base)
    lora = {"rank": 4, "alpha": 8.0} | lora
    config = job_config(model={"path": str(base), "dtype": dtype}, lora=lora, checkpoint={"every_iterations": 3})
    trained = train(config, recorded_iterations(), tmp_path)
    folder = tmp_path / "checkpoints" / "iteration-000003"
    (folder / "config.json").write_bytes((base / "config.json").read_bytes())
    return config, trained.model, base, folder


def exported(tmp_path, config, checkpoint):
    folder = tmp_path / "adapter"
    folder.mkdir()
    return folder, export_adapter(checkpoint, folder, config, "org/base", ROWS)


def test_peft_computes_the_trained_logits_in_float32(tmp_path):
    config, _, base, checkpoint = trained_checkpoint(tmp_path, "float32")
    folder, gap = exported(tmp_path, config, checkpoint)
    by_peft = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder).eval()
    tokens = torch.tensor(ROWS[:1])
    with torch.no_grad():
        computed, start = by_peft(tokens).logits, load_plain(str(base), torch.float32)(tokens).logits
        expected = load_plain(str(checkpoint), torch.float32)(tokens).logits
    assert (expected - start).abs().max() > 1e-2  # it was trained
    torch.testing.assert_close(computed, expected, rtol=0, atol=1e-5)
    assert gap["max"] < 1e-5
    assert gap["num_tokens"] == sum(len(row) - 1 for row in ROWS)
    written = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    assert (written["base_model_name_or_path"], written["r"], written["lora_alpha"]) == ("org/base", 4, 8)
    assert len(written["target_modules"]) == 7


def test_gap_to_peft_in_bfloat16_is_measured(tmp_path):
    config, model, base, checkpoint = trained_checkpoint(tmp_path, "bfloat16")
    folder, gap = exported(tmp_path, config, checkpoint)
    written = load_file(folder / "adapter_model.safetensors")
    for name, layer in adapted_layers(model).items():  # the factors that the policy computes with
        a, b, _ = adapter(layer)
        assert torch.equal(written[f"base_model.model.{name}.lora_A.weight"], a)
        assert torch.equal(written[f"base_model.model.{name}.lora_B.weight"], b)
    by_peft = peft.PeftModel.from_pretrained(load_plain(str(base), torch.bfloat16), folder).eval()
    gaps = (logprobs_of(by_peft, ROWS) - logprobs_of(load_plain(str(checkpoint), torch.bfloat16), ROWS)).abs()
    assert gap["mean"] == pytest.approx(gaps.mean().item(), abs=1e-7)
    assert gap["mean"] > 1e-4


def test_merged_checkpoint_has_the_trained_bits(tmp_path):
    _, model, _, checkpoint = trained_checkpoint(tmp_path, "bfloat16")
    merged = load_file(checkpoint / "model.safetensors")
    for name, layer in adapted_layers(model).items():
        a, b, scale = adapter(layer)
        weight = torch.addmm(layer.get_base_layer().weight, b, a, alpha=scale)
        assert torch.equal(merged[f"{name}.weight"], weight)
    assert all(torch.equal(merged[name], tensor) for name, tensor in published_tensors(model))


@pytest.mark.parametrize("targets", [["q_proj", "down_proj"], "all-linear"])
def test_targets_name_exactly_the_adapted_layers(targets):
    lora = {"rank": 4, "target_modules": targets}
    model = model_of(job_config(lora=lora))
    layers = set(adapted_layers(model))
    plain = tiny_model(dtype=torch.float32)
    named = targets_of(plain, layers)
    injected = peft.get_peft_model(plain, peft.LoraConfig(r=4, target_modules=named))
    assert {name.removeprefix("base_model.model.") for name in adapted_layers(injected)} == layers


def test_layers_of_an_ambiguous_name_have_whole_names():
    plain = tiny_model(tiny_config(Qwen2Config), torch.float32)
    some = {"model.layers.0.self_attn.q_proj"}
    assert targets_of(plain, some) == ["model.layers.0.self_attn.q_proj"]
