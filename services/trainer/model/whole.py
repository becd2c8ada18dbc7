"""The check that a checkpoint is what it says: each of the model's tensors comes from its files, and all are used.

transformers draws missing tensors at random, ignores those that it has no place for, and puts an adapter that lies
beside the weights on top of them. A policy that was loaded so is not the one that the user meant.
"""

import re
from collections.abc import Collection
from typing import Any

from safetensors import SafetensorError

from onbeat.contracts.model_config import PACKED_DTYPE
from services.prompts.tokenizer import file_of_model
from services.trainer.model.tensor_files import StoredWeights

NUM_NAMED = 5  # names of tensors in a message


def check_source(source: str, config: Any) -> None:
    """Raise ValueError for files whose weights are no plain numbers of this model: quantised ones, or an adapter's."""
    from transformers.utils import ADAPTER_CONFIG_NAME

    if file_of_model(source, ADAPTER_CONFIG_NAME) is not None:
        raise ValueError(
            f"model {source!r} has an adapter ({ADAPTER_CONFIG_NAME}) beside its weights; merge it into them "
            "(PeftModel.merge_and_unload, save_pretrained), or take it away"
        )
    if quantization := getattr(config, "quantization_config", None) or stored_quantization(config):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
        raise ValueError(
            f"model {source!r} is quantised ({method or 'quantization_config'}), and such weights cannot be trained; "
            "take the model that it was made from, or convert it to bfloat16"
        )
    if packed := packed_tensors(source):
        raise ValueError(
            f"model {source!r} has weights of 8 bits or less, which need their scales: {named(packed)}; take the model "
            "that it was made from, or convert it to bfloat16"
        )


def stored_quantization(config: Any) -> Any:
    return getattr(config.get_text_config(), "quantization_config", None)


def packed_tensors(source: str) -> list[str]:
    """Return the names of tensors with numbers of 8 bits or less; none if the files are not safetensors."""
    try:
        stored = StoredWeights.find(source)
    except (OSError, SafetensorError):
        return []  # the load says what is wrong
    return sorted(name for name, dtype in stored.dtypes.items() if PACKED_DTYPE.match(dtype))


def check_loaded(source: str, model: Any, report: dict[str, Any]) -> None:
    """Raise ValueError unless the files held all of the model's tensors and no others.

    report: what transformers says of the load. It leaves out tied heads that are not in the files, and tensors that
    its class for the model expects not to need (`left_out`).
    """
    missing, unused = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
    problems = [f"lacks {named(missing)}"] if missing else []
    problems += [f"has {named(unused)}, which {type(model).__name__} does not use"] if unused else []
    for name, stored, wanted in sorted(report["mismatched_keys"]):
        problems.append(f"has {name} of shape {tuple(stored)} where config.json means {tuple(wanted)}")
    if problems:
        raise ValueError(
            f"model {source!r} {' and '.join(problems[:NUM_NAMED])}; copy or download "
            "the files again, or correct config.json or the names of the tensors"
        )
    head = model.get_output_embeddings()
    is_said_tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)  # some families lack it
    if is_said_tied and head is not None and head.weight is not model.get_input_embeddings().weight:
        raise ValueError(
            f"model {source!r} says tie_word_embeddings = true, but its files have an output head that differs from "
            "the embedding; write false into config.json, or take the head out of the files"
        )


def left_out(source: str, model: Any) -> list[str]:
    """Return the names of tensors in the files that the model's class expects and does not need: heads that predict
    several tokens, or the vision tower beside a model of text."""
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    try:
        names = StoredWeights.find(source).dtypes.keys() - dict(model.named_parameters()).keys()
    except (OSError, SafetensorError):
        return []
    return sorted(name for name in names if any(re.search(pattern, name) for pattern in patterns))


def named(tensors: Collection[str]) -> str:
    """Return the number and the first names of tensors."""
    first = ", ".join(list(tensors)[:NUM_NAMED])
    rest = ", ..." if len(tensors) > NUM_NAMED else ""
    return f"{len(tensors)} tensor{'s' if len(tensors) != 1 else ''} ({first}{rest})"
