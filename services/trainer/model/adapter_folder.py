"""The folder of an adapter in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

here   model.layers.0.self_attn.q_proj.lora_A.default.weight
PEFT   base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from onbeat.config import LoraConfig
from services.trainer.model.lora import ADAPTER

WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."


def write_adapter(folder: Path, factors: Mapping[str, torch.Tensor], model: Any, config: LoraConfig, base: str) -> None:
    """Write factors, by their names in the trainer, as an adapter of the `model`, whose name is `base`."""
    import peft

    alpha: Any = int(config.alpha) if config.alpha.is_integer() else config.alpha  # PEFT declares an int
    written = peft.LoraConfig(
        r=config.rank,
        lora_alpha=alpha,
        target_modules=targets_of(model, {name.partition(".lora_")[0] for name in factors}),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
    )
    written.save_pretrained(str(folder))
    named = {PREFIX + name.replace(f".{ADAPTER}.", "."): factor.contiguous() for name, factor in factors.items()}
    save_file(named, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def targets_of(model: Any, layers: set[str]) -> list[str]:
    """Return names by which PEFT finds exactly these layers: their last parts, or the whole names where other modules
    have the same last part."""
    last_parts = {name.rpartition(".")[2] for name in layers}
    by_last_part = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in last_parts}
    return sorted(last_parts if by_last_part == layers else layers)
