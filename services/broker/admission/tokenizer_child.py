"""`python -m services.broker.admission.tokenizer_child CPU_S MEMORY_MB` checks the tokenizer of a model in a folder.

It takes one JSON request from standard input, and gives one JSON answer on standard output.

    -> {"model": "/models/mine", "section": "data", "as_chat": true, "has_environment": false,
        "has_system_prompt": true, "chat_template": null, "options": {"enable_thinking": false},
        "now": "2026-01-31T12:00:00Z"}
    <- {"problem": "..."}    a sentence with a remedy; '' if there is none

The files are the user's: a broken or huge one ends this process, by its limits, and not the broker.
"""

import json
import os
import resource
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer

from onbeat.config.templates import option_problem
from onbeat.contracts.chat_check import template_problem
from onbeat.contracts.model_config import text_config
from onbeat.process.confine import MEBIBYTE, die_with_parent, lower_limit, lower_limits
from services.broker.admission.chat_template import names_in, read_template, render_with
from services.broker.admission.model_files import read_json

VOCABULARY, SETTINGS = "tokenizer.json", "tokenizer_config.json"
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
OF_TEMPLATES = ("bos_token", "eos_token", "unk_token", "pad_token")  # a class of transformers may add these by itself
OF_PICTURES = ("image_token", "audio_token", "video_token")  # no text gives these, and some models have no row for them
GRACE_S = 5  # CPU time in which the first signal of the limit ends the process


class Wrong(Exception):
    """The tokenizer cannot be used. The message has a remedy."""


def main() -> None:
    cpu_s, memory_mb = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent()
    lower_limits({resource.RLIMIT_AS: memory_mb * MEBIBYTE, resource.RLIMIT_CORE: 0})
    lower_limit(resource.RLIMIT_CPU, cpu_s, cpu_s + GRACE_S)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    request = json.loads(sys.stdin.readline())
    print(json.dumps({"problem": find_problem(**request)}), flush=True)  # noqa: T201


def find_problem(
    model: str,
    *,
    as_chat: bool,
    section: str = "data",
    has_environment: bool = False,
    has_system_prompt: bool = False,
    chat_template: str | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
    now: str | None = None,
) -> str:
    """Return what is wrong with the tokenizer of a model in a folder and what to do, or ''."""
    folder = Path(model).expanduser()
    try:
        settings = read_object(folder / SETTINGS)
        if (folder / VOCABULARY).is_file():
            check_vocabulary(folder, settings)
        if not as_chat:
            return ""
        template = chat_template or read_template(folder, settings)
        if template is None:
            return ""  # `review_template` complains, unless it may be elsewhere
    except Wrong as error:
        return str(error)
    except TemplateError as error:
        return f"{folder} {error}; give one of them this name"
    except (LookupError, TypeError, ValueError, AttributeError) as error:  # a template that is no text, and the like
        return f"the chat template of {model} cannot be read ({error}); save the tokenizer again, with save_pretrained"
    special = dict.fromkeys(OF_TEMPLATES, "") | special_tokens(folder, settings)
    name = f"the chat template of {model}" if chat_template is None else "model.chat_template"
    return template_problem(
        render_with(template, special, options, now),
        name,
        section,
        has_environment=has_environment,
        has_system_prompt=has_system_prompt,
    ) or option_problem(dict(options), names_in(template), section)


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; an empty one without the file. Raises Wrong."""
    if not path.exists():
        return {}
    try:
        value = read_json(path)
    except (OSError, ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise Wrong(f"{path} is no JSON object of a sensible size; save the tokenizer again, or copy it again")
    return value


def check_vocabulary(folder: Path, settings: Mapping[str, Any]) -> None:
    """Check that each token has a row in the embedding, and each special token is in the vocabulary. Raises Wrong."""
    path = folder / VOCABULARY
    try:
        vocabulary = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as error:
        raise Wrong(f"{path} cannot be loaded ({error}); save the tokenizer again, or copy it again") from error
    vocabulary |= added_tokens(settings)
    special = special_tokens(folder, settings)
    for name, token in special.items():
        if token not in vocabulary:
            raise Wrong(
                f"{folder}/{SETTINGS} names {token!r} as {name}, which {VOCABULARY} does not have; add the token "
                "there, or correct the name"
            )
    num_rows = text_config(read_object(folder / "config.json")).get("vocab_size")
    if not isinstance(num_rows, int):
        return
    without_text = {special.get(name) for name in OF_PICTURES}
    last_id, token = max(((number, token) for token, number in vocabulary.items() if token not in without_text))
    if last_id >= num_rows:
        raise Wrong(
            f"{path} has token {token!r} with id {last_id}, and the embedding of the model has {num_rows} rows "
            "(vocab_size in config.json); add rows (model.resize_token_embeddings), or take the model's own tokenizer"
        )
    for name, token_id in end_tokens(folder):
        if not 0 <= token_id < num_rows:
            raise Wrong(
                f"{folder}/{name} has eos_token_id = {token_id}, and the model has tokens 0 to {num_rows - 1} only, so "
                "that no response would end by it; correct it"
            )


def added_tokens(settings: Mapping[str, Any]) -> dict[str, int]:
    """Return the tokens that the tokenizer's settings add, by their text."""
    added = settings.get("added_tokens_decoder")
    entries = added.items() if isinstance(added, dict) else ()
    return {entry["content"]: int(number) for number, entry in entries}


def special_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that the files name: the usual ones, and those of the model."""
    older = read_object(folder / "special_tokens_map.json")
    usual = {name: settings.get(name, older.get(name)) for name in (*NAMES, *OF_PICTURES)}
    more = [settings.get("extra_special_tokens"), settings.get("model_specific_special_tokens")]
    named = usual | {name: value for names in more if isinstance(names, dict) for name, value in names.items()}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def end_tokens(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield the ids that end a response, with the file that names each."""
    for name in ("config.json", "generation_config.json"):
        of_file = read_object(folder / name)
        stated = of_file.get("eos_token_id", text_config(of_file).get("eos_token_id"))
        for token_id in stated if isinstance(stated, list) else [stated]:
            if isinstance(token_id, int):
                yield name, token_id


if __name__ == "__main__":
    main()
