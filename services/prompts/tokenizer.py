"""The tokenizer of a model, as its `tokenizer.json` says, for trainer and rollouts alike.

transformers 5 builds a tokenizer by the class or the model type that the configuration names, and takes only
vocabulary and merges from the file. Where these bring a splitting of their own, digits, spaces and accents get other
ids than the model was trained with, without a word.
"""

import logging
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"
PARTS = ("normalizer", "pre_tokenizer", "decoder")
SAMPLE = "x 123,456.7  two\tspaces\n\n déjà naïve ﬁ İ 日本語 한국 🙂👍🏽 "
SAMPLE += "def f(a=1): return {'b': a*2}\n It's <b>ok</b>, Año 2026"


def load_tokenizer(source: str | Path, chat_template: str | None = None, **options: Any) -> Any:
    """Load a tokenizer that gives the ids of the model's `tokenizer.json`; without such a file, transformers' own.

    chat_template: in place of the model's own. options: of `from_pretrained`. Raises OSError or ValueError where
    transformers cannot load it.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    file = file_of_model(source, TOKENIZER_FILE)
    if file is None or equals_file(tokenizer, file):
        return tokenizer
    logger.info("%s would split text otherwise than %s, which is used as it is", type(tokenizer).__name__, file)
    special = {name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    by_file = PreTrainedTokenizerFast.from_pretrained(source, **special, **options)
    by_file.chat_template = tokenizer.chat_template
    if not equals_file(by_file, file):
        raise ValueError(
            f"transformers builds another tokenizer from {file} than the library tokenizers does; save it again with "
            "the versions that are installed here (PreTrainedTokenizerFast.from_pretrained, save_pretrained)"
        )
    return by_file


def reads_its_file(source: str | Path) -> bool:
    """Return whether transformers itself builds the tokenizer that the model's `tokenizer.json` is, if it has one."""
    from transformers import AutoTokenizer

    file = file_of_model(source, TOKENIZER_FILE)
    return file is None or equals_file(AutoTokenizer.from_pretrained(source), file)


def file_of_model(source: str | Path, name: str) -> Path | None:
    """Return the path of a file in the model's folder or in the cache of the hub; None if the model has no such one."""
    from transformers.utils import cached_file

    missing_is_fine = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    path = cached_file(str(source), name, **missing_is_fine)
    return None if path is None else Path(path)


def equals_file(tokenizer: Any, file: Path) -> bool:
    """Return whether a tokenizer of transformers splits, joins and numbers text as its file says."""
    from tokenizers import Tokenizer

    if not hasattr(tokenizer, "backend_tokenizer"):
        return True  # not built from this file, but from one of SentencePiece or tiktoken
    saved, built = Tokenizer.from_file(str(file)), tokenizer.backend_tokenizer
    if any(state(getattr(saved, part)) != state(getattr(built, part)) for part in PARTS):
        return False
    token_ids = saved.encode(SAMPLE, add_special_tokens=False).ids
    return bool(token_ids == tokenizer(SAMPLE, add_special_tokens=False)["input_ids"])


def state(part: Any) -> bytes:
    return b"" if part is None else part.__getstate__()
