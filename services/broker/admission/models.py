"""The checks of a model that the broker can make without loading it: complete files, and the length of its context;
for a hub's model, whether it is in this machine's cache or on the hub."""

import json
import os
from pathlib import Path
from typing import Any

import httpx

from onbeat.config import JobConfig
from onbeat.contracts.model_config import context_tokens, text_config
from services.broker.datasets.hub import HUB_ID

BUNDLED_CONTEXT_TOKENS = {"smollm2-135m-instruct": 8192}
PICKLED = ("*.bin", "*.pt", "*.pth")
TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "tekken*")
MAX_HEADER_BYTES = 32 << 20  # header of a model's file; longer ones are left to the trainer
MAX_JSON_BYTES = 16 << 20  # size of a configuration
HUB, HUB_S = "https://huggingface.co", 5.0
OTHER_HEADS = ("ForMaskedLM", "Classification", "QuestionAnswering", "MultipleChoice")  # ends of architectures' names
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")

Complaint = tuple[str, str]  # field, message with a remedy


def wrong_model(message: str) -> list[Complaint]:
    return [("model.path", message)]


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
    home = Path(os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    if any(cache.glob(f"models--{path.replace('/', '--')}/snapshots/*/config.json")):
        return []
    remedy = "download it where there is a hub and give its folder, or take bundled:smollm2-135m-instruct"
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        return wrong_model(f"{path} is not in this machine's cache, and HF_HUB_OFFLINE is set; {remedy}")
    hub, token = os.environ.get("HF_ENDPOINT", HUB).rstrip("/"), own_token(home)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = httpx.get(f"{hub}/api/models/{path}", headers=headers, timeout=HUB_S, follow_redirects=True)
    except httpx.HTTPError as error:
        reason = f"the hub {hub} does not answer ({str(error) or type(error).__name__})"
        return wrong_model(f"{path} is not in this machine's cache, and {reason}; {remedy}")
    if answer.status_code in (401, 403, 404):
        return wrong_model(f"{hub} has no model {path}, or not for this HF_TOKEN; correct the id, or give a folder")
    return []  # a hub that is busy answers the trainer later


def own_token(home: Path) -> str:
    """Return the token that is set, or that `hf auth login` has written; '' without one."""
    if token := os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN"):
        return token
    try:
        return Path(os.environ.get("HF_TOKEN_PATH") or home / "token").read_text().strip()
    except OSError:
        return ""


# ---- a model in a folder -----------------------------------------------------------------------------------------


def review_folder(config: JobConfig, folder: Path) -> list[Complaint]:
    try:
        model = read_json(folder / "config.json")
    except OSError:
        problem = "has no readable config.json" if os.path.isdir(folder) else "is no folder"
        return wrong_model(f"{folder} {problem}; give a model in Hugging Face layout, or `bundled:NAME`")
    except (ValueError, RecursionError):
        return wrong_model(f"{folder}/config.json is not valid JSON; save the model in Hugging Face layout")
    if not isinstance(model, dict) or not isinstance(model.get("model_type"), str):
        return wrong_model(f"{folder}/config.json names no model_type; save the model in Hugging Face layout")
    return (
        review_head(folder, model)
        or review_files(folder, model)
        or review_template(config, folder)
        or review_context(config, context_tokens(model))
        or review_rotary(config, model)
    )


def read_json(path: Path) -> Any:
    """Read JSON. Raises OSError for what is no ordinary file of a sensible size, ValueError, RecursionError."""
    if not path.is_file() or path.stat().st_size > MAX_JSON_BYTES:
        raise OSError("no file of a sensible size")
    return json.loads(path.read_text())


def review_head(folder: Path, model: dict[str, Any]) -> list[Complaint]:
    """Complain about an encoder or a classifier, as far as its configuration names it so."""
    named = model.get("architectures")
    if not isinstance(named, list) or not named or not all(str(name).endswith(OTHER_HEADS) for name in named):
        return []
    return wrong_model(f"{folder} is a {named[0]}, which generates no text; give a causal language model")


def review_files(folder: Path, model: dict[str, Any]) -> list[Complaint]:
    """Check weights and tokenizer by their names, headers and sizes."""
    weights = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    if not weights:
        pickled = next((path.name for pattern in PICKLED for path in folder.glob(pattern)), None)
        reason = f"has pickled weights ({pickled}), which may run code" if pickled else "has no weights"
        return wrong_model(f"{folder} {reason}; save the model as safetensors")
    embedded: set[int] = set()  # numbers of tokens in embeddings
    for path in weights:
        try:
            problem, token_counts = read_header(path)
        except OSError as error:
            return wrong_model(
                f"{path} cannot be read: {error.strerror or error}; copy it again, or correct its rights"
            )
        if problem:
            return wrong_model(f"{path} is not whole: {problem}; copy or download it again")
        embedded |= token_counts
    if not any(path.is_file() for pattern in TOKENIZERS for path in folder.glob(pattern)):
        return wrong_model(f"{folder} has no tokenizer; save it into the same folder (tokenizer.save_pretrained)")
    stated = text_config(model).get("vocab_size")
    if not embedded or not isinstance(stated, int) or stated in embedded:
        return []
    found_tokens = " or ".join(map(str, sorted(embedded)))
    message = f"has vocab_size = {stated}, but the embedding of the weights has {found_tokens} tokens"
    return wrong_model(f"{folder}/config.json {message}; correct one of them")


def review_template(config: JobConfig, folder: Path) -> list[Complaint]:
    """Complain about a model without a chat template in a job of episodes. The trainer tries those that are there."""
    if config.environment is None or not getattr(config.data, "as_chat", True):
        return []
    if any(folder.glob("*chat_template*")):
        return []
    try:
        tokenizer = read_json(folder / "tokenizer_config.json")
    except (OSError, ValueError, RecursionError):
        return []  # the template may be elsewhere
    if not isinstance(tokenizer, dict) or tokenizer.get("chat_template"):
        return []
    message = f"{folder} has no chat template, which episodes need; put chat_template.jinja into it, or set "
    return wrong_model(f"{message}data.as_chat = false for an environment that sends token ids only")


def read_header(path: Path) -> tuple[str, set[int]]:
    """Return what is missing from a safetensors file ('' if nothing), and the numbers of tokens in its embeddings.

    The file has 8 bytes of length, a JSON header, and the tensors that it names.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if 8 + header_bytes > size:
            return f"it ends after {size} bytes, within its header", set()
        if header_bytes > MAX_HEADER_BYTES:
            return "", set()
        header = file.read(header_bytes)
    try:
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        ends = [entry["data_offsets"][1] for entry in tensors.values()]
        missing = 8 + header_bytes + max(ends, default=0) - size
        embedded = {int(entry["shape"][0]) for name, entry in tensors.items() if name.endswith(EMBEDDINGS)}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError):
        return "its header is no header of safetensors", set()
    return (f"{missing} bytes are missing at its end" if missing > 0 else ""), embedded


def review_rotary(config: JobConfig, model: dict[str, Any]) -> list[Complaint]:
    """Complain if a `longrope` model may get long passes: other rotary embeddings would make results depend on what
    shares a pass."""
    text = text_config(model)
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    if not isinstance(rope, dict) or (rope.get("rope_type") or rope.get("type")) not in ("longrope", "su"):
        return []
    limit = text.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    longest = config.model.max_context_tokens or context_tokens(model)
    if not isinstance(limit, int) or (longest is not None and longest <= limit):
        return []
    message = f"the model has other rotary embeddings (longrope) beyond {limit} tokens; set it to {limit} or less"
    return [("model.max_context_tokens", message)]


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
