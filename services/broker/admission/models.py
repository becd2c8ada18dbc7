"""The checks of a model that the broker can make without loading it: complete files, and the length of its context;
for a hub's model, whether it is in this machine's cache or on the hub."""

import os
from pathlib import Path
from typing import Any

import httpx

from onbeat.config import JobConfig
from onbeat.contracts.model_config import context_tokens, rope_settings, rope_type, text_config
from services.broker.admission.model_files import Complaint, read_json, review_files, wrong_model
from services.broker.datasets.hub import HUB_ID

BUNDLED_CONTEXT_TOKENS = {"smollm2-135m-instruct": 8192}
HUB, HUB_S = "https://huggingface.co", 5.0
OTHER_HEADS = ("ForMaskedLM", "Classification", "QuestionAnswering", "MultipleChoice")  # ends of architectures' names


def review_model(config: JobConfig, has_model_folders: bool) -> list[Complaint]:
    """Return complaints about the job's model. `has_model_folders`: the trainers' folders can be seen from here."""
    path = config.model.path
    if path.startswith("bundled:"):
        name = path.removeprefix("bundled:")
        if name in BUNDLED_CONTEXT_TOKENS:
            return review_context(config, BUNDLED_CONTEXT_TOKENS[name])
        known = ", ".join(f"bundled:{known}" for known in BUNDLED_CONTEXT_TOKENS)
        return wrong_model(f"no model {name!r} is bundled; there is: {known}")
    if is_folder_path(path):
        return review_folder(config, Path(path).expanduser()) if has_model_folders else review_context(config, None)
    if not HUB_ID.fullmatch(path) or ".." in path:
        forms = "no hub id (`org/name`), no folder (start it with / or ./) and not `bundled:NAME`"
        return wrong_model(f"{path!r} is {forms}")
    return review_context(config, None) + (review_hub_model(path) if has_model_folders else [])


def is_folder_path(path: str) -> bool:
    return path.startswith(("/", "./", "../", "~/")) or path in (".", "..") or path.count("/") > 1


# ---- a model of a hub --------------------------------------------------------------------------------------------


def review_hub_model(path: str) -> list[Complaint]:
    """Complain about a model that is neither in the cache nor on a hub that answers."""
    if cached_folder(path) is not None:
        return []
    remedy = "download it where there is a hub and give its folder, or take bundled:smollm2-135m-instruct"
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        return wrong_model(f"{path} is not in this machine's cache, and HF_HUB_OFFLINE is set; {remedy}")
    hub, token = os.environ.get("HF_ENDPOINT", HUB).rstrip("/"), own_token(hub_home())
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = httpx.get(f"{hub}/api/models/{path}", headers=headers, timeout=HUB_S, follow_redirects=True)
    except httpx.HTTPError as error:
        reason = f"the hub {hub} does not answer ({str(error) or type(error).__name__})"
        return wrong_model(f"{path} is not in this machine's cache, and {reason}; {remedy}")
    if answer.status_code in (401, 403, 404):
        return wrong_model(f"{hub} has no model {path}, or not for this HF_TOKEN; correct the id, or give a folder")
    return []  # a hub that is busy answers the trainer later


def folder_of(path: str) -> Path | None:
    """Return the folder of a model that can be seen from here, if there is one: its own, or that of a hub's cache."""
    return Path(path).expanduser() if is_folder_path(path) else cached_folder(path)


def cached_folder(path: str) -> Path | None:
    """Return the newest folder of a hub's model in this machine's cache."""
    cache = Path(os.environ.get("HF_HUB_CACHE") or hub_home() / "hub")
    configs = cache.glob(f"models--{path.replace('/', '--')}/snapshots/*/config.json")
    newest = max(configs, key=lambda config: config.parent.stat().st_mtime, default=None)
    return None if newest is None else newest.parent


def hub_home() -> Path:
    return Path(os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface"))


def own_token(home: Path) -> str:
    """Return the token that is set, or that `hf auth login` has written; '' without one."""
    if token := os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN"):
        return token
    try:
        return Path(os.environ.get("HF_TOKEN_PATH") or home / "token").read_text("utf-8").strip()
    except OSError:
        return ""


# ---- a model in a folder -----------------------------------------------------------------------------------------


def review_folder(config: JobConfig, folder: Path) -> list[Complaint]:
    try:
        model = read_json(folder / "config.json")
    except OSError:
        if complaints := review_adapter(folder):
            return complaints
        problem = "has no readable config.json" if os.path.isdir(folder) else "is no folder"
        return wrong_model(f"{folder} {problem}; give a model in Hugging Face layout, or `bundled:NAME`")
    except (ValueError, RecursionError):
        return wrong_model(f"{folder}/config.json is not valid JSON; save the model in Hugging Face layout")
    if not isinstance(model, dict) or not isinstance(model.get("model_type"), str):
        return wrong_model(f"{folder}/config.json names no model_type; save the model in Hugging Face layout")
    return (
        review_head(folder, model)
        or review_adapter(folder)
        or review_quantization(folder, model)
        or review_files(folder, model)
        or review_template(config, folder)
        or review_context(config, context_tokens(model))
        or review_rotary(config, model)
    )


def review_head(folder: Path, model: dict[str, Any]) -> list[Complaint]:
    """Complain about an encoder or a classifier, as far as its configuration names it so."""
    named = model.get("architectures")
    if not isinstance(named, list) or not named or not all(str(name).endswith(OTHER_HEADS) for name in named):
        return []
    return wrong_model(f"{folder} is a {named[0]}, which generates no text; give a causal language model")


def review_adapter(folder: Path) -> list[Complaint]:
    """Complain about an adapter, alone or beside the weights, where transformers would put it on top of them."""
    try:
        adapter = read_json(folder / "adapter_config.json")
    except OSError:
        return []
    except (ValueError, RecursionError):
        adapter = None
    base = adapter.get("base_model_name_or_path") if isinstance(adapter, dict) else None
    merge = "merge it (PeftModel.merge_and_unload, then save_pretrained)"
    if (folder / "config.json").exists():
        message = f"{folder} has an adapter (adapter_config.json) beside the weights; {merge}, or take it away"
    else:
        message = f"{folder} is an adapter for {base or 'a model that it does not name'}, and no model; {merge} and "
        message += "give the folder of the result, or give that model"
    return wrong_model(message)


def review_quantization(folder: Path, model: dict[str, Any]) -> list[Complaint]:
    """Complain about weights that are no plain numbers."""
    quantization = model.get("quantization_config") or text_config(model).get("quantization_config")
    if not quantization:
        return []
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    return wrong_model(
        f"{folder} is quantised ({method or 'quantization_config'}), and such weights cannot be trained; take the "
        "model that it was made from, or convert it to bfloat16"
    )


def review_template(config: JobConfig, folder: Path) -> list[Complaint]:
    """Complain about a model without a chat template where one is needed. `tokenizer` tries those that are there."""
    if not getattr(config.rendering, "as_chat", True) or config.model.chat_template is not None:
        return []
    if any(folder.glob("*chat_template*")):
        return []
    try:
        tokenizer = read_json(folder / "tokenizer_config.json")
    except (OSError, ValueError, RecursionError):
        return []  # the template may be elsewhere
    if not isinstance(tokenizer, dict) or tokenizer.get("chat_template"):
        return []
    user, plain = "episodes need", "an environment that sends token ids only"
    if not config.environments:
        user, plain = f"{config.rendering_field}.as_chat = true needs", "a model that continues plain text"
    message = f"{folder} has no chat template, which {user}; put chat_template.jinja into it, or set "
    return wrong_model(f"{message}{config.rendering_field}.as_chat = false for {plain}")


def review_rotary(config: JobConfig, model: dict[str, Any]) -> list[Complaint]:
    """Complain if a model of longrope or dynamic scaling may get long passes: other rotary embeddings would make
    results depend on what shares a pass."""
    text, longest = text_config(model), config.model.max_context_tokens or context_tokens(model)
    for rope in rope_settings(model):
        kind = rope_type(rope)
        if kind in ("longrope", "su"):
            limit = text.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
        elif kind == "dynamic":
            limit = text.get("max_position_embeddings")
        else:
            continue
        if isinstance(limit, int) and (longest is None or longest > limit):
            message = f"the model has other rotary embeddings ({kind}) beyond {limit} tokens; set it to {limit} or less"
            return [("model.max_context_tokens", message)]
    return []


def review_context(config: JobConfig, supported: int | None) -> list[Complaint]:
    """Check the context length: a response must leave room for at least one prompt token."""
    wanted, response = config.model.max_context_tokens, config.rollout.max_response_tokens
    if supported is not None and wanted is not None and wanted > supported:
        message = f"the model supports {supported} tokens, got {wanted}; lower or leave it out"
        return [("model.max_context_tokens", message)]
    limits = [limit for limit in (supported, wanted) if limit is not None]
    if limits and response >= min(limits):
        message = f"{response} leaves no room for the prompt in a context of {min(limits)} tokens; lower it"
        return [("rollout.max_response_tokens", message)]
    return []
