"""The folder of an adapter in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

here   model.layers.0.self_attn.q_proj.lora_A.default.weight
PEFT   base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from onbeat.config import JobConfig, LoraConfig
from onbeat.config.adapter import CONFIG_FILE, NOT_READ, PREFIX, WEIGHTS_FILE, layer_of, problems_of_config
from services.trainer.model.lora import ADAPTER, base_name


def write_adapter(folder: Path, factors: Mapping[str, torch.Tensor], model: Any, config: LoraConfig, base: str) -> None:
    """Write factors, by their names in the trainer, as an adapter of the `model`, whose name is `base`."""
    import peft

    alpha: Any = int(config.alpha) if config.alpha.is_integer() else config.alpha  # PEFT declares an int
    peft_names = names_in_peft(factors, [name for name, _ in model.named_parameters()])
    of_experts = {name.replace(".lora_", ".").rpartition(".")[0] for name in factors if is_of_experts(name)}
    written = peft.LoraConfig(
        r=config.rank,
        lora_alpha=alpha,
        use_rslora=config.use_rslora,
        target_modules=targets_of(model, {name.partition(".lora_")[0] for name in factors if not is_of_experts(name)}),
        target_parameters=sorted({".".join(name.split(".")[-2:]) for name in of_experts}) or None,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
    )
    written.save_pretrained(str(folder))
    named = {peft_names[name]: to_peft(name, factor).contiguous() for name, factor in factors.items()}
    save_file(named, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def targets_of(model: Any, layers: set[str]) -> list[str]:
    """Return names by which PEFT finds exactly these layers: their last parts, or the whole names where other modules
    have the same last part."""
    last_parts = {name.rpartition(".")[2] for name in layers}
    by_last_part = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in last_parts}
    return sorted(last_parts if by_last_part == layers else layers)


@torch.no_grad()
def load_adapter(model: Any, config: JobConfig) -> None:
    """Set the new adapters of a model to those of the job's folder, rounded to the dtype of the job.

    Raises ValueError, with the first thing that does not fit.
    """
    folder = Path(str(config.model.adapter)).expanduser()
    try:
        written = json.loads((folder / CONFIG_FILE).read_text("utf-8"))
        stored = load_file(folder / WEIGHTS_FILE)
    except (OSError, ValueError, SafetensorError) as error:
        raise refused(folder, f"cannot be read ({error}); {NOT_READ}") from error
    assert config.lora is not None, "a job with an adapter has [lora]"
    if problem := next(problems_of_config(written, config.model.path, config.lora), None):
        raise refused(folder, problem)
    factors = {name: p for name, p in model.named_parameters() if ".lora_" in name}
    peft_names = names_in_peft(factors, [base_name(name) for name, _ in model.named_parameters()])
    wanted = {peft_names[name]: to_peft(name, parameter).shape for name, parameter in factors.items()}
    if problem := next(problems_of_tensors(stored, wanted, model), None):
        raise refused(folder, problem)
    for name, parameter in factors.items():
        parameter.copy_(from_peft(name, stored[peft_names[name]], parameter.shape))


def refused(folder: Path, problem: str) -> ValueError:
    return ValueError(f"model.adapter: {folder} {problem}")


def problems_of_tensors(
    stored: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Size], model: Any
) -> Iterator[str]:
    """Yield what differs between the adapter's tensors and those that the job trains, by PEFT's names."""
    modules = {base_name(f"{name}.") for name, _ in model.named_modules()}
    for name in sorted(stored.keys() - wanted.keys()):
        layer = layer_of(name)
        if f"{layer}." in modules:
            yield f"adapts {layer}, which lora.target_modules leaves out; set lora.target_modules to the adapter's"
        else:
            yield f"is an adapter of another model: this one has no {layer}"
    for name in sorted(wanted.keys() - stored.keys()):
        layer = layer_of(name)
        yield f"has nothing for {layer}, which lora.target_modules adapts; set lora.target_modules to the adapter's"
    for name, shape in sorted(wanted.items()):
        if stored[name].shape != shape:
            shapes = f"{tuple(stored[name].shape)}, and this one needs {tuple(shape)}"
            yield f"is an adapter of another model: {name} has the shape {shapes}"


def names_in_peft(factors: Iterable[str], parameters: Sequence[str]) -> dict[str, str]:
    """Return the names that PEFT writes for factors of the trainer. `parameters`: names of the base, in its order.

    PEFT wraps experts once for each parameter: the wrapper of the last one is outermost, without `.base_layer`.
    """
    names, of_module = {}, defaultdict[str, list[str]](list)
    adapted = {name.replace(".lora_", ".").rpartition(".")[0] for name in factors if is_of_experts(name)}
    for name in (name for name in parameters if name in adapted):
        of_module[name.rpartition(".")[0]].append(name)
    for name in factors:
        if not is_of_experts(name):
            names[name] = PREFIX + name.replace(f".{ADAPTER}.", ".")
            continue
        parameter, _, factor = name.replace(".lora_", ".").rpartition(".")
        module = parameter.rpartition(".")[0]
        num_outside = len(of_module[module]) - 1 - of_module[module].index(parameter)
        names[name] = f"{PREFIX}{module}{'.base_layer' * num_outside}.lora_{factor.upper()}.weight"
    return names


def is_of_experts(name: str) -> bool:
    """Return whether a factor is one of expert_lora.py, such as `experts.lora_gate_up_proj.a`."""
    return name.endswith((".a", ".b"))


def to_peft(name: str, factor: torch.Tensor) -> torch.Tensor:
    """Return a factor in PEFT's shape: of experts A is [E * r, in] and B [out, r * E]."""
    if not is_of_experts(name):
        return factor
    return factor.flatten(0, 1) if name.endswith(".a") else factor.permute(1, 2, 0).flatten(1)


def from_peft(name: str, stored: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return a factor in the trainer's shape."""
    if not is_of_experts(name):
        return stored
    if name.endswith(".a"):
        return stored.view(shape)
    num_experts, size_out, rank = shape
    return stored.view(size_out, rank, num_experts).permute(2, 0, 1)
