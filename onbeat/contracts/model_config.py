"""The `config.json` of a model in Hugging Face layout, as far as broker and rollouts must agree on it."""

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


def text_config(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part that is about text: all of it, unless the text model is nested."""
    nested = model.get("text_config")
    return nested if isinstance(nested, Mapping) else model


def context_tokens(model: Mapping[str, Any]) -> int | None:
    """Return the longest context that the model or its text model was made for; None if it is not named."""
    lengths = [part.get(name) for part in (model, text_config(model)) for name in CONTEXT_NAMES]
    return min((value for value in lengths if isinstance(value, int) and value > 0), default=None)
