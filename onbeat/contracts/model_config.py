"""Facts of a model in Hugging Face layout on which broker, trainer and rollouts must agree."""

import re
from collections.abc import Mapping
from typing import Any

# Names of the longest context in the families of models; GPT-2's is `n_positions`. vLLM takes the smallest, too.
CONTEXT_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "seq_len",
)

# Kinds of rotary embeddings whose `factor` is in the named length already.
SCALED_ALREADY = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
# Numbers of 8 bits or less, as safetensors names them (F8_E4M3, U8, ...): only their scales say what they stand for.
PACKED_DTYPE = re.compile(r"([IU]8|F[468])(_|$)")


def text_config(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part that is about text: all of it, unless the text model is nested."""
    nested = model.get("text_config")
    return nested if isinstance(nested, Mapping) else model


def context_tokens(model: Mapping[str, Any]) -> int | None:
    """Return the longest context that the model or its text model was made for; None if it is not named.

    As in vLLM, linear and dynamic scaling of the rotary embeddings lengthen what is named; the limit of other kinds
    (yarn, llama3, longrope) is named scaled already, and so is Gemma 3's.
    """
    named = [part.get(name) for part in (model, text_config(model)) for name in CONTEXT_NAMES]
    limit = min((value for value in named if isinstance(value, int) and value > 0), default=None)
    if limit is None or "gemma3" in str(model.get("model_type")):
        return limit
    scale = 1.0
    for rope in rope_settings(model):
        factor = rope.get("factor")
        if rope_type(rope) not in SCALED_ALREADY and isinstance(factor, int | float) and factor > 0:
            scale = factor
    return int(limit * scale)


def rope_settings(model: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the settings of the rotary embeddings: one, one for each kind of layer, or none."""
    text = text_config(model)
    settings = text.get("rope_parameters") or text.get("rope_scaling")
    if not isinstance(settings, Mapping):
        return []
    by_layer = [value for value in settings.values() if isinstance(value, Mapping)]
    return by_layer or [settings]


def rope_type(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")
