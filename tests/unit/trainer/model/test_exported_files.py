"""The files of a checkpoint are the source's own; transformers 5 reads the same model and tokenizer from them."""

import json

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, LlamaConfig

from services.prompts.tokenizer import load_tokenizer
from services.trainer.model.bundled import resolve_model
from services.trainer.model.exported_files import exported_config, exported_files
from services.trainer.settings import Settings
from tests.small_tokenizers import KINDS, TEXTS, byte_level, write
from tests.trainer_fixtures import tiny_config, tiny_model

# As people wrote them before transformers 5: no sorted keys, numbers in other spellings, a class that splits by itself.
OWN_CONFIG = """{"model_type": "llama", "rms_norm_eps": 1e-5,
  "torch_dtype": "float16", "rope_theta": 5e5, "architectures": ["LlamaForCausalLM"]}"""
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def exported_to(folder, source, **options):
    folder.mkdir()
    for name, content in exported_files(str(source), torch.bfloat16, **options).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_files_of_the_source_keep_their_bytes(tmp_path):
    source = write(tmp_path / "source", byte_level(), LlamaConfig, "PreTrainedTokenizerFast")
    (source / "config.json").write_text(OWN_CONFIG.replace("float16", "bfloat16"))
    (source / "additional_chat_templates").mkdir()
    texts = {
        "generation_config.json": "{ }",
        "special_tokens_map.json": '{"eos_token":"<|im_end|>"}',
        "vocab.txt": "a\n",
    }
    texts |= {"additional_chat_templates/tool_use.jinja": "tools", "preprocessor_config.json": "{}"}
    for name, text in texts.items():
        (source / name).write_text(text)
    for name in ("model.safetensors", "tokenizer.py", "README.md", "vocab.pkl"):
        (source / name).write_text("not copied")
    names = {*texts, "config.json", "tokenizer.json", "tokenizer_config.json"}
    assert exported_files(str(source), torch.bfloat16) == {name: (source / name).read_bytes() for name in names}


def test_config_changes_in_the_dtype_alone():
    assert exported_config(OWN_CONFIG, "bfloat16") == OWN_CONFIG.replace("float16", "bfloat16")
    without = OWN_CONFIG.replace('"torch_dtype": "float16", ', "")
    assert exported_config(without, "float32") == without.replace("{", '{\n  "torch_dtype": "float32",', 1)
    parts = '{"model_type": "gemma3", "dtype": null, "text_config": {"model_type": "gemma3_text", "dtype": "float32"}}'
    assert json.loads(exported_config(parts, "bfloat16"))["text_config"]["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("model_type", "rope", "old"),
    [
        ("llama", {"rope_theta": 5e5, "rope_type": "default"}, {"rope_theta": 5e5}),
        ("qwen2", {"rope_theta": 5e5} | YARN, {"rope_theta": 5e5, "rope_scaling": YARN}),
        (
            "phi3",
            {"rope_theta": 5e5, "rope_type": "default", "partial_rotary_factor": 0.75},
            {"rope_theta": 5e5, "partial_rotary_factor": 0.75},
        ),
        ("qwen3_moe", {"rope_theta": 5e5, "rope_type": "default"}, {"rope_theta": 5e5, "num_experts": 128}),
        (
            "gpt_neox",
            {"rope_theta": 5e5, "rope_type": "default", "partial_rotary_factor": 0.5},
            {"rotary_emb_base": 5e5, "rotary_pct": 0.5},
        ),
        (
            "gemma3_text",
            {
                "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
                "sliding_attention": {"rope_theta": 333.0, "rope_type": "default"},
            },
            {"rope_theta": 1e6, "rope_local_base_freq": 333.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        ),
    ],
)
def test_old_names_are_added_where_transformers_5_wrote_it(model_type, rope, old, tmp_path):
    CONFIG_MAPPING[model_type](rope_parameters=rope, dtype="float32").save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    exported = json.loads(exported_config(text, "float32"))
    assert {name: exported[name] for name in exported.keys() - json.loads(text)} == old | {"torch_dtype": "float32"}
    before = AutoConfig.from_pretrained(tmp_path).to_dict()
    (tmp_path / "config.json").write_text(exported_config(text, "float32"))
    after = AutoConfig.from_pretrained(tmp_path).to_dict()
    assert {name: after[name] for name in before} == before


def test_old_name_that_would_change_the_model_is_left_out():
    rope = {
        "full_attention": {"rope_theta": 5e5} | YARN,
        "sliding_attention": {"rope_theta": 333.0, "rope_type": "default"},
    }
    for model_type in ("mellum", "laguna", "olmo3"):
        config = CONFIG_MAPPING[model_type](rope_parameters=rope)
        text = config.to_json_string()
        exported = CONFIG_MAPPING[model_type].from_dict(json.loads(exported_config(text, "float32")))
        assert exported.rope_parameters == config.rope_parameters, model_type


@pytest.mark.parametrize("build", KINDS)
@pytest.mark.parametrize("tokenizer_class", ["LlamaTokenizerFast", "TokenizersBackend", None])
def test_tokenizer_is_read_by_its_file(build, tokenizer_class, tmp_path):
    """Transformers' own loading, without the correction that Onbeat makes."""
    from transformers import AutoTokenizer

    saved = build()
    source = write(tmp_path / "source", saved, LlamaConfig, tokenizer_class)
    folder = exported_to(tmp_path / "exported", source)
    tokenizer, of_source = AutoTokenizer.from_pretrained(folder), load_tokenizer(source)
    for text in TEXTS:
        assert tokenizer(text)["input_ids"] == of_source(text)["input_ids"] == saved.encode(text).ids
    assert tokenizer.special_tokens_map == of_source.special_tokens_map
    assert tokenizer.chat_template == of_source.chat_template
    assert json.loads((folder / "tokenizer_config.json").read_text()).get("tokenizer_class") != "TokenizersBackend"


def test_list_of_extra_tokens_has_its_old_name(tmp_path):
    source = write(tmp_path / "source", byte_level(), LlamaConfig, "TokenizersBackend")
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps(settings | {"extra_special_tokens": ["<|im_start|>"]}))
    folder = exported_to(tmp_path / "exported", source)
    exported = json.loads((folder / "tokenizer_config.json").read_text())
    assert (exported["additional_special_tokens"], exported["tokenizer_class"]) == (
        ["<|im_start|>"],
        "PreTrainedTokenizerFast",
    )
    assert "extra_special_tokens" not in exported
    assert load_tokenizer(folder).extra_special_tokens == load_tokenizer(source).extra_special_tokens


def test_template_of_the_job_is_the_only_one(tmp_path):
    source = write(tmp_path / "source", byte_level(), LlamaConfig, "PreTrainedTokenizerFast")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("theirs")
    folder = exported_to(tmp_path / "exported", source, chat_template="ours")
    assert load_tokenizer(folder).chat_template == "ours"
    assert "theirs" not in "".join(path.read_text() for path in folder.rglob("*.jinja"))
    assert "chat_template" not in json.loads((folder / "tokenizer_config.json").read_text())


def test_hub_model_has_the_files_of_its_snapshot(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    snapshot = write(
        tmp_path / "models--org--name" / "snapshots" / "abc", byte_level(), LlamaConfig, "PreTrainedTokenizerFast"
    )
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    assert exported_files("org/name", torch.bfloat16) == exported_files(str(snapshot), torch.bfloat16)


def test_bundled_model_has_the_names_of_both_versions():
    source = resolve_model("bundled:smollm2-135m-instruct", Settings().cache_dir)
    files = exported_files(source, torch.bfloat16)
    config, settings = (json.loads(files[name]) for name in ("config.json", "tokenizer_config.json"))
    assert config["rope_parameters"]["rope_theta"] == config["rope_theta"] == 100_000
    assert (config["dtype"], config["torch_dtype"]) == ("bfloat16", "bfloat16")
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "token_type_ids" not in settings["model_input_names"]


def test_export_of_an_export_changes_nothing(tmp_path):
    source = write(tmp_path / "source", byte_level(), LlamaConfig, "LlamaTokenizerFast")
    tiny_model(tiny_config(), torch.bfloat16).save_pretrained(source)
    folder = exported_to(tmp_path / "exported", source)
    assert exported_files(str(folder), torch.bfloat16) == {
        path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()
    }
