"""A model folder that is opened, but not read: each tensor is read from its safetensors file when its layer is sharded.

So no rank ever holds the whole model, on its device or on the host. This works for files that hold exactly the model's
own tensors. Only transformers can read everything else (converted, quantized or renamed weights, other formats);
`load_model` then reads the whole model on each rank.
"""

import logging
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from services.trainer.model.lora import persistent_buffers
from services.trainer.model.model import Passes, register_attention, set_up
from services.trainer.model.tensor_files import StoredWeights

logger = logging.getLogger(__name__)


def open_model(
    source: str, dtype: torch.dtype, device: torch.device, passes: Passes
) -> tuple[Any, StoredWeights] | None:
    """Return the model as `load_model` does, but with empty parameters, and the files with their values.

    `sharding.shard` fills them, layer by layer. Returns None when `load_model` has to read or refuse the model.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    register_attention()
    try:
        config = AutoConfig.from_pretrained(source)
        stored = StoredWeights.find(source)
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=passes.attention)
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error)
    else:
        model.tie_weights()
        reason = why_not_plain(model, stored)
    if reason:
        logger.info("model %s is read whole by each rank: %s", source, reason)
        return None
    for name, buffer in persistent_buffers(model):
        buffer.copy_(stored.read(name))
    for parameter in model.parameters():  # swapped in place: tied ones stay tied
        empty: Any = nn.Parameter(torch.empty(0, dtype=dtype))
        empty.whole_shape = parameter.shape  # adapters on experts need it
        torch.utils.swap_tensors(parameter, empty)
    return set_up(model, passes, device), stored


def why_not_plain(model: Any, stored: StoredWeights) -> str:
    """Return why the files are not exactly the model's tensors in its own layout; '' if they are."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    if getattr(model.config, "quantization_config", None) is not None:
        return "its weights are quantized"
    if get_model_conversion_mapping(model, add_legacy=False):
        return "transformers converts its weights"
    if model._keep_in_fp32_modules_strict or getattr(model.config, "transformers_weights", None):
        return "transformers has rules of its own for it"
    tensors = dict(model.named_parameters()) | dict(persistent_buffers(model))
    wanted = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if different := sorted(name for name, _ in wanted.items() ^ stored.shapes.items()):
        return f"{different[0]} is not the same tensor in its files and in transformers' model"
    return ""
