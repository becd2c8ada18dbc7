"""The check of a model's files without loading it: headers and sizes of weights, their index, a tokenizer."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onbeat.contracts.model_config import PACKED_DTYPE, text_config

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"  # transformers looks for them in this order
PICKLED = ("*.bin", "*.pt", "*.pth")
TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "tekken*")
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
MAX_HEADER_BYTES = 32 << 20  # header of a model's file; longer ones are left to the trainer
MAX_JSON_BYTES = 16 << 20  # size of a configuration or an index

Complaint = tuple[str, str]  # field, message with a remedy
Shape = tuple[int, ...]


class WrongFiles(Exception):
    """The files are not a model's. The message has a remedy."""


def wrong_model(message: str) -> list[Complaint]:
    return [("model.path", message)]


def read_json(path: Path) -> Any:
    """Read JSON. Raises OSError for what is no ordinary file of a sensible size, ValueError, RecursionError."""
    if not path.is_file() or path.stat().st_size > MAX_JSON_BYTES:
        raise OSError("no file of a sensible size")
    return json.loads(path.read_text(encoding="utf-8"))


@dataclass
class Header:
    """The tensors that a safetensors file names. `is_read`: false of a header that is too long to be read here."""

    problem: str = ""  # bytes that the file lacks, in words
    shapes: dict[str, Shape] = field(default_factory=dict)
    packed: list[str] = field(default_factory=list)  # names of tensors with numbers of 8 bits or less
    embedded: set[int] = field(default_factory=set)  # numbers of tokens in embeddings
    is_read: bool = True


def review_files(folder: Path, model: dict[str, Any]) -> list[Complaint]:
    """Check weights and tokenizer by their names, headers and sizes."""
    try:
        embedded = check_weights(folder)
    except WrongFiles as error:
        return wrong_model(str(error))
    if not any(path.is_file() for pattern in TOKENIZERS for path in folder.glob(pattern)):
        return wrong_model(f"{folder} has no tokenizer; save it into the same folder (tokenizer.save_pretrained)")
    stated = text_config(model).get("vocab_size")
    if not embedded or not isinstance(stated, int) or stated in embedded:
        return []
    in_weights = " or ".join(map(str, sorted(embedded)))
    message = f"has vocab_size = {stated}, but the embedding of the weights has {in_weights} tokens"
    return wrong_model(f"{folder}/config.json {message}; correct one of them")


def check_weights(folder: Path) -> set[int]:
    """Return the numbers of tokens in the embeddings of a whole model. Raises WrongFiles."""
    index, files = read_index(folder), sorted(path.name for path in folder.glob("*.safetensors") if path.is_file())
    if not files:
        pickled = next((path.name for pattern in PICKLED for path in folder.glob(pattern)), None)
        problem = f"has pickled weights ({pickled}), which may run code" if pickled else "has no weights"
        raise WrongFiles(f"{folder} {problem}; save the model as safetensors")
    if index is None:
        if WEIGHTS not in files:
            raise WrongFiles(
                f"{folder} has no {WEIGHTS}, and no {INDEX} that says what is in {files[0]}"
                f"{' and others' if len(files) > 1 else ''}; copy the index, too, or save the model again"
            )
        index = {WEIGHTS: set()}
    elif WEIGHTS in files and WEIGHTS not in index:
        raise WrongFiles(
            f"{folder} has both {WEIGHTS} and an index of other files ({INDEX}), so one is left from another model; "
            "take the wrong one away"
        )
    embedded: set[int] = set()
    for name, tensors in index.items():
        header = checked_header(folder / name)
        if header.is_read and (absent := sorted(tensors - header.shapes.keys())):
            raise WrongFiles(
                f"{folder}/{INDEX} says that {name} holds {absent[0]}, and it does not; copy or download both again"
            )
        embedded |= header.embedded
    return embedded


def read_index(folder: Path) -> dict[str, set[str]] | None:
    """Return the names of the tensors by file; None without an index. Raises WrongFiles."""
    path = folder / INDEX
    if not path.exists():
        return None
    try:
        by_tensor = read_json(path)["weight_map"]
        files: dict[str, set[str]] = {}
        for tensor, file in by_tensor.items():
            if "/" in file:
                raise ValueError(file)
            files.setdefault(file, set()).add(tensor)
        if not files:
            raise ValueError("no file")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise WrongFiles(f"{path} is no index of safetensors files; copy or download it again") from None
    return files


def checked_header(path: Path) -> Header:
    """Read the header of a whole file of plain weights. Raises WrongFiles."""
    again = "copy or download it again"
    if not path.exists():
        raise WrongFiles(f"{path.parent}/{INDEX} names {path.name}, which is not there; {again}")
    try:
        header = read_header(path)
    except OSError as error:
        raise WrongFiles(
            f"{path} cannot be read: {error.strerror or error}; copy it again, or correct its rights"
        ) from None
    if header.problem:
        raise WrongFiles(f"{path} is not whole: {header.problem}; {again}")
    if header.packed:
        raise WrongFiles(
            f"{path} has weights of 8 bits or less ({header.packed[0]}), which need their scales; take the model that "
            "it was made from, or convert it to bfloat16"
        )
    return header


def read_header(path: Path) -> Header:
    """Read the names and shapes in a safetensors file, and what is missing from it.

    The file has 8 bytes of length, a JSON header, and the tensors that it names.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if 8 + header_bytes > size:
            return Header(f"it ends after {size} bytes, within its header")
        if header_bytes > MAX_HEADER_BYTES:
            return Header(is_read=False)
        text = file.read(header_bytes)
    try:
        tensors = json.loads(text)
        tensors.pop("__metadata__", None)
        ends = [entry["data_offsets"][1] for entry in tensors.values()]
        missing = 8 + header_bytes + max(ends, default=0) - size
        shapes = {name: tuple(map(int, entry["shape"])) for name, entry in tensors.items()}
        embedded = {shape[0] for name, shape in shapes.items() if name.endswith(EMBEDDINGS)}
        packed = sorted(name for name, entry in tensors.items() if PACKED_DTYPE.match(entry.get("dtype", "")))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError):
        return Header("its header is no header of safetensors")
    problem = f"{missing} bytes are missing at its end" if missing > 0 else ""
    return Header(problem, shapes, packed, embedded)
