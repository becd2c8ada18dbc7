"""The weights of a checkpoint, by the names and in the shapes of the source's files.

transformers 5 keeps the experts of a layer in one tensor, and calls the parts of models with pictures otherwise than
their files do. Published versions are as the model has them; other programs read the files as they were.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from services.trainer.model.tensor_files import Tensors

Convert = Callable[[str, torch.Tensor], Tensors]
PART_BYTES = 4 << 30  # converted tensors are copies, so that larger models are written in several files


def conversion(model: Any) -> Convert | None:
    """Return what turns a tensor of the model into those of the source's files; None where it is the same one.

    A model whose parameters are made from parts of a tensor keeps its own names: no parameter alone has the whole.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion

    conversions = getattr(model, "_weight_conversions", None)  # conversions that loading the source needed
    if conversions is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    if not conversions or any(len(entry.target_patterns) > 1 for entry in conversions):
        return None
    return lambda name, tensor: revert_weight_conversion(model, {name: tensor})


def in_parts(weights: Mapping[str, torch.Tensor], convert: Convert | None, name: str) -> Iterator[tuple[str, Tensors]]:
    """Yield the files of a rank's weights by name, one after the other: one file called `name` where they fit."""
    if convert is None:
        yield name, dict(weights)
        return
    is_split = sum(tensor.nbytes for tensor in weights.values()) > PART_BYTES
    part: Tensors = {}
    num_parts = part_bytes = 0
    for tensor_name in list(weights):
        part |= convert(tensor_name, weights[tensor_name])
        part_bytes += weights[tensor_name].nbytes
        if is_split and part_bytes >= PART_BYTES:
            num_parts += 1
            yield part_name(name, num_parts), part
            part, part_bytes = {}, 0
    if part:
        yield part_name(name, num_parts + 1) if is_split else name, part


def part_name(name: str, number: int) -> str:
    return name.replace(".safetensors", f"-part-{number:05d}.safetensors")
