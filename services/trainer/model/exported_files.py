"""The files that a checkpoint has beside its weights: the source's own, so that every program reads the model from the
checkpoint as it would from the source.

They change only where they have to: the dtype is that of the weights, a template of the job replaces the source's, and
what only transformers 5 understands is also said as transformers 4 and engines on it read it. Rollouts get
`model.model_files` instead, which transformers 5 has read and written again.
"""

import json
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from services.prompts.tokenizer import TOKENIZER_FILE, load_tokenizer, reads_its_file

CONFIG, SETTINGS, TEMPLATE = "config.json", "tokenizer_config.json", "chat_template.jinja"
TEMPLATES = ("chat_template*", "additional_chat_templates/*", "chat_templates/*")
TOKENIZERS = ("tokenizer*", "vocab*", "merges*", "*.model", "*.tiktoken", "tekken*", "*_tokens*.json")
COPIED = (CONFIG, "generation_config.json", "*processor_config.json", *TOKENIZERS, *TEMPLATES)
SUFFIXES = {".json", ".txt", ".model", ".jinja", ".tiktoken"}  # data, never code
DTYPE = re.compile(r'("(?:torch_)?dtype"\s*:\s*)(?:"[^"]*"|null)')
NEW_CLASS, OLD_CLASS = "TokenizersBackend", "PreTrainedTokenizerFast"  # one class; transformers 5 reads both names
# Old names of rotary parameters in families that do not call them rope_theta and partial_rotary_factor.
BASE = {"gpt_neox": "rotary_emb_base", "gpt_neox_japanese": "rotary_emb_base"}
FRACTION = {"gpt_neox": "rotary_pct", "gpt_neox_japanese": "rotary_pct"}


def exported_files(source: str, dtype: torch.dtype, chat_template: str | None = None) -> dict[str, bytes]:
    """Return config, tokenizer, templates and generation settings by name; a name may have a folder.

    dtype: of the weights. chat_template: that of the job, in place of the model's own.
    """
    folder = folder_of(source)
    paths = {path for pattern in COPIED for path in folder.glob(pattern) if path.is_file()}
    files = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(paths) if path.suffix in SUFFIXES}
    files[CONFIG] = exported_config(files[CONFIG].decode(), str(dtype).removeprefix("torch.")).encode()
    settings = json.loads(files.get(SETTINGS, b"{}"))
    changed = readable_settings(source, settings) if TOKENIZER_FILE in files else dict(settings)
    if chat_template is not None:
        files = {name: content for name, content in files.items() if not is_template(name)}
        files[TEMPLATE] = chat_template.encode()
        changed.pop("chat_template", None)
    if changed != settings:
        files[SETTINGS] = (json.dumps(changed, indent=2, ensure_ascii=False) + "\n").encode()
    return files


def folder_of(source: str) -> Path:
    """Return the folder of a model; of one from a hub the folder in the cache, with all files that are copied."""
    from huggingface_hub import snapshot_download

    return Path(source) if Path(source).is_dir() else Path(snapshot_download(source, allow_patterns=list(COPIED)))


def is_template(name: str) -> bool:
    return any(Path(name).match(pattern) for pattern in TEMPLATES)


# ---- the tokenizer ---------------------------------------------------------------------------------------------------


def readable_settings(source: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tokenizer's settings such that every version of transformers reads `tokenizer.json` as it is."""
    changed = dict(settings)
    if isinstance(changed.get("extra_special_tokens"), list):  # transformers 4 expects names for them, and fails
        changed["additional_special_tokens"] = changed.pop("extra_special_tokens")
    if changed.get("tokenizer_class") == NEW_CLASS or not reads_its_file(source):
        tokenizer = load_tokenizer(source)
        changed.setdefault("model_input_names", tokenizer.model_input_names)
        for name, token in tokenizer.special_tokens_map.items():  # a class may have some that the settings do not name
            if isinstance(token, str):
                changed.setdefault(name, token)
        changed["tokenizer_class"] = OLD_CLASS
    return changed


# ---- config.json -----------------------------------------------------------------------------------------------------


def exported_config(text: str, dtype: str) -> str:
    """Return the text of a config.json with this dtype and, where transformers 5 wrote it, with the old names, too."""
    config = json.loads(text)
    readable = with_old_names(config)
    if readable != config:
        text = json.dumps(readable, indent=2) + "\n"  # as transformers writes it
    if not readable.keys() & {"dtype", "torch_dtype"}:
        text = text.replace("{", f'{{\n  "torch_dtype": "{dtype}",', 1)
    return DTYPE.sub(rf'\g<1>"{dtype}"', text)


def with_old_names(config: dict[str, Any]) -> dict[str, Any]:
    """Add what transformers 4 calls otherwise, each value only if transformers 5 reads the same model as before."""
    from transformers import CONFIG_MAPPING

    def read(changed: dict[str, Any]) -> dict[str, Any]:
        read_config: dict[str, Any] = CONFIG_MAPPING[config["model_type"]].from_dict(deepcopy(changed)).to_dict()
        return read_config

    before, readable = read(config), config
    for part in ([], ["text_config"]):
        for name, value in old_names(at(config, part)):
            changed = deepcopy(readable)
            at(changed, part)[name] = value
            if includes(read(changed), before):
                readable = changed
    return readable


def at(config: dict[str, Any], part: list[str]) -> dict[str, Any]:
    for name in part:
        config = config.get(name) or {}
    return config


def old_names(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield values of transformers 5 by their names in transformers 4, such as rotary parameters, which 5 has in one
    dictionary, or in one for each type of layers. A base comes before the scaling: read alone, that would reset it."""
    model_type, rope = config.get("model_type", ""), config.get("rope_parameters") or {}
    is_nested = any(isinstance(value, dict) for value in rope.values())
    everywhere = (rope.get("full_attention") or {}) if is_nested else rope
    local = (rope.get("sliding_attention") or {}) if is_nested else {}
    scaling = {name: value for name, value in everywhere.items() if name not in ("rope_theta", "partial_rotary_factor")}
    values = {
        BASE.get(model_type, "rope_theta"): everywhere.get("rope_theta"),
        "rope_local_base_freq": local.get("rope_theta"),
        FRACTION.get(model_type, "partial_rotary_factor"): everywhere.get("partial_rotary_factor"),
        "rope_scaling": scaling if scaling.get("rope_type", "default") != "default" else None,
        "num_experts": config.get("num_local_experts"),
    }
    if str(config.get("transformers_version", "")).split(".")[0] >= "5":
        values["torch_dtype"] = config.get("dtype")
    yield from ((name, value) for name, value in values.items() if value is not None and config.get(name) is None)


def includes(config: Any, part: Any) -> bool:
    """Return whether a configuration has all of the other's values."""
    if isinstance(config, dict) and isinstance(part, dict):
        return all(name in config and includes(config[name], value) for name, value in part.items())
    return bool(config == part)
