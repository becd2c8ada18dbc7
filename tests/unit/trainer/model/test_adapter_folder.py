"""A job that starts from an adapter in PEFT's format, and the adapters that are refused."""

import json

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from onbeat.config import JobConfig
from services.trainer.model.adapter_folder import load_adapter
from services.trainer.model.lora import published_tensors
from services.trainer.model.model import response_logprobs
from tests.trainer_fixtures import job_config, make_batch, model_of, tiny_config, tiny_model

pytestmark = pytest.mark.slow

LORA = {"rank": 4, "alpha": 8.0}
LAYER = "model.layers.0.self_attn.q_proj"


def write_peft_adapter(folder, base=None, **options):
    """Write an adapter by PEFT itself, moved away from zero; return PEFT's model."""
    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "base_model_name_or_path": "org/base"} | options
    model = peft.get_peft_model(base or tiny_model(dtype=torch.float32), peft.LoraConfig(**options))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    model.save_pretrained(str(folder))
    written = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    written["base_model_name_or_path"] = options["base_model_name_or_path"]
    (folder / "adapter_config.json").write_text(json.dumps(written), encoding="utf-8")
    return model


def started(folder, dtype="float32", path="org/base", **lora):
    config = job_config(model={"path": path, "dtype": dtype, "adapter": str(folder)}, lora=LORA | lora)
    model = model_of(config)
    load_adapter(model, config)
    return model


def test_start_is_what_peft_computes(tmp_path):
    by_peft, batch = write_peft_adapter(tmp_path), make_batch()
    computed = response_logprobs(started(tmp_path), batch, 1.0)[0]
    expected = response_logprobs(by_peft.merge_and_unload(), batch, 1.0)[0]
    before = response_logprobs(model_of(job_config(lora=LORA)), batch, 1.0)[0]
    torch.testing.assert_close(computed, expected, rtol=0, atol=1e-5)
    assert (computed - before).abs().max() > 0.01


def test_start_in_bfloat16_has_the_rounded_factors(tmp_path):
    write_peft_adapter(tmp_path)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    parameters = dict(started(tmp_path, "bfloat16").named_parameters())
    b = parameters[f"{LAYER}.lora_B.default.weight"]
    assert torch.equal(b, stored[f"base_model.model.{LAYER}.lora_B.weight"].bfloat16())


@pytest.mark.parametrize(
    ("options", "lora", "sentence"),
    [
        ({"r": 8}, {}, "has r = 8, and lora.rank is 4; set lora.rank to that"),
        ({"lora_alpha": 4}, {}, "has lora_alpha = 4, and lora.alpha is 8; set lora.alpha to that"),
        ({"use_dora": True}, {}, "sets use_dora, which is not trained here"),
        ({"bias": "all"}, {}, r"trains biases \(bias = all\)"),
        ({"rank_pattern": {"q_proj": 8}}, {}, "sets rank_pattern"),
        ({"base_model_name_or_path": "org/other"}, {}, "is an adapter of org/other, and model.path is org/base"),
        ({"target_modules": ["q_proj"]}, {}, "has nothing for model.layers.0.mlp.down_proj, which lora.target_modules"),
        ({}, {"target_modules": ["q_proj"]}, "adapts model.layers.0.mlp.down_proj, which lora.target_modules leaves"),
    ],
)
def test_adapter_that_does_not_fit_is_refused_by_name(tmp_path, options, lora, sentence):
    write_peft_adapter(tmp_path, **options)
    with pytest.raises(ValueError, match=rf"^model.adapter: {tmp_path} {sentence}"):
        started(tmp_path, **lora)


def test_adapter_of_another_model_is_refused(tmp_path):
    for name, options, sentence in (
        (
            "deep",
            {"num_hidden_layers": 3},
            "is an adapter of another model: this one has no model.layers.2.mlp.down_proj",
        ),
        (
            "wide",
            {"intermediate_size": 40},
            "is an adapter of another model: base_model.model.model.layers.0.mlp.down_proj",
        ),
    ):
        folder = tmp_path / name
        write_peft_adapter(
            folder, tiny_model(tiny_config(**options), torch.float32), base_model_name_or_path="/models/x"
        )
        with pytest.raises(ValueError, match=sentence):
            started(folder)


def test_folder_that_is_no_adapter_is_refused(tmp_path):
    for damage in ("nothing", "other type", "torn"):
        folder = tmp_path / damage
        folder.mkdir()
        if damage != "nothing":
            save_file({}, folder / "adapter_model.safetensors")
            text = '{"peft_type": "IA3"}' if damage == "other type" else '{"peft_type'
            (folder / "adapter_config.json").write_text(text, encoding="utf-8")
        sentence = "is an adapter of the type IA3, and only LORA" if damage == "other type" else "cannot be read"
        with pytest.raises(ValueError, match=sentence):
            started(folder)


def test_adapter_needs_the_section(tmp_path):
    with pytest.raises(ValueError, match=r"model.adapter: adapters are trained with \[lora\]; add that section"):
        job_config(model={"adapter": str(tmp_path)})


def test_relative_path_is_beside_the_job_file(tmp_path):
    body = job_config(model={"adapter": "first"}, lora=LORA).model_dump(mode="json")
    (tmp_path / "job.json").write_text(json.dumps(body), encoding="utf-8")
    assert JobConfig.from_file(tmp_path / "job.json").model.adapter == str(tmp_path / "first")


def test_first_version_is_the_merged_start(tmp_path):
    by_peft = write_peft_adapter(tmp_path)
    published = dict(published_tensors(started(tmp_path)))
    for name, parameter in by_peft.merge_and_unload().named_parameters():
        torch.testing.assert_close(published[name], parameter, rtol=0, atol=1e-6)
