"""The rules between a job and the LoRA adapter that it starts from, by the adapter's own configuration."""

from collections.abc import Iterator
from typing import Any

from onbeat.config.model import LoraConfig

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
NOT_READ = "give a folder that `save_pretrained` of PEFT wrote"  # the remedy where one of them cannot be read
# Options of PEFT that make other policies than A and B on a weight, or that change them by layer.
OTHER_POLICIES = """use_dora lora_bias modules_to_save trainable_token_indices rank_pattern alpha_pattern
fan_in_fan_out layer_replication alora_invocation_tokens""".split()  # noqa: SIM905
PREFIX = "base_model.model."


def problems_of_config(written: Any, model_path: str, lora: LoraConfig) -> Iterator[str]:
    """Yield what the adapter's own configuration has that the job's `[lora]` does not train on the model."""
    if not isinstance(written, dict) or written.get("peft_type") != "LORA":
        kind = written.get("peft_type") if isinstance(written, dict) else None
        yield f"is an adapter of the type {kind}, and only LORA is trained"
        return
    if others := [name for name in OTHER_POLICIES if written.get(name)]:
        yield f"sets {others[0]}, which is not trained here; give an adapter without it, or merge it into the model"
    if written.get("bias", "none") != "none":
        yield f"trains biases (bias = {written['bias']}), which [lora] does not; merge it into the model"
    if bool(written.get("use_rslora")) != lora.use_rslora:
        yield f"has use_rslora = {bool(written.get('use_rslora'))}; set lora.use_rslora to that"
    base = written.get("base_model_name_or_path")
    if isinstance(base, str) and base != model_path and is_on_hub(base) and is_on_hub(model_path):
        yield f"is an adapter of {base}, and model.path is {model_path}; give one of that model"
    for field, given in (("r", lora.rank), ("lora_alpha", lora.alpha)):
        if written.get(field) != given:
            name = {"r": "rank", "lora_alpha": "alpha"}[field]
            yield f"has {field} = {written.get(field)}, and lora.{name} is {given:g}; set lora.{name} to that"


def layer_of(name: str) -> str:
    """Return the layer of a tensor of PEFT."""
    return name.removeprefix(PREFIX).partition(".lora_")[0].replace(".base_layer", "")


def is_on_hub(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith(("/", "~", "."))
