"""What the broker can know of a job's model without loading it: that it exists, and how long its context is."""

import json
import re
from pathlib import Path

from onbeat.config import JobConfig

BUNDLED_CONTEXT_TOKENS = {"smollm2-135m-instruct": 8192}
HUB_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
HUB_ID = re.compile(rf"{HUB_NAME}(/{HUB_NAME})?")

Complaint = tuple[str, str]  # field, message with a remedy


def review_model(config: JobConfig, has_model_folders: bool) -> list[Complaint]:
    """`has_model_folders`: the trainers' folders can be seen from here."""
    path = config.model.path
    if path.startswith("bundled:"):
        return review_bundled(config, path.removeprefix("bundled:"))
    if is_folder_path(path):
        return review_folder(config, Path(path).expanduser()) if has_model_folders else review_context(config, None)
    if not HUB_ID.fullmatch(path) or ".." in path:
        return [
            (
                "model.path",
                f"{path!r} is no hub id (`org/name`), no folder (start it with / or ./) and not `bundled:NAME`",
            )
        ]
    return review_context(config, None)


def is_folder_path(path: str) -> bool:
    return path.startswith(("/", "./", "../", "~/")) or path in (".", "..") or path.count("/") > 1


def review_bundled(config: JobConfig, name: str) -> list[Complaint]:
    if name not in BUNDLED_CONTEXT_TOKENS:
        known = ", ".join(f"bundled:{known}" for known in BUNDLED_CONTEXT_TOKENS)
        return [("model.path", f"no model {name!r} is bundled; there is: {known}")]
    return review_context(config, BUNDLED_CONTEXT_TOKENS[name])


def review_folder(config: JobConfig, folder: Path) -> list[Complaint]:
    try:
        text = (folder / "config.json").read_text()
    except (OSError, ValueError) as error:
        if isinstance(error, UnicodeDecodeError):
            return [("model.path", f"{folder}/config.json is not text; save the model in Hugging Face layout")]
        what = "has no readable config.json" if is_folder(folder) else "is no folder"
        return [("model.path", f"{folder} {what}; give a model in Hugging Face layout, or `bundled:NAME`")]
    try:
        model = json.loads(text)
    except (ValueError, RecursionError):
        return [("model.path", f"{folder}/config.json is not valid JSON; save the model in Hugging Face layout")]
    return review_context(config, context_tokens(model))


def is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def context_tokens(model: object) -> int | None:
    """`max_position_embeddings` of a Hugging Face config, also where the text model is nested."""
    if not isinstance(model, dict):
        return None
    nested = model.get("text_config")
    value = model.get(
        "max_position_embeddings", nested.get("max_position_embeddings") if isinstance(nested, dict) else None
    )
    return value if isinstance(value, int) and value > 0 else None


def review_context(config: JobConfig, supported: int | None) -> list[Complaint]:
    """A response must leave room for at least one prompt token."""
    wanted, response = config.model.max_context_tokens, config.rollout.max_response_tokens
    if supported is not None and wanted is not None and wanted > supported:
        return [
            ("model.max_context_tokens", f"the model supports {supported} tokens, got {wanted}; lower or leave it out")
        ]
    limits = [limit for limit in (supported, wanted) if limit is not None]
    if limits and response >= min(limits):
        message = f"{response} leaves no room for the prompt in a context of {min(limits)} tokens; lower it"
        return [("rollout.max_response_tokens", message)]
    return []
