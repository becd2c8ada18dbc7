"""`python -m services.trainer.export` writes a checkpoint's adapter as a PEFT folder, and measures what PEFT computes.

PEFT adds the adapter's output to that of the unchanged layer; the trainer rounds the merged weight, and computes with
that (lora.py). So in bfloat16 the two are not the same policy.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from onbeat.config import JobConfig
from onbeat.config.adapter import WEIGHTS_FILE
from onbeat.contracts.section import IS_ACCEPTED
from services.prompts.tokenizer import load_tokenizer
from services.trainer.model.adapter_folder import write_adapter
from services.trainer.model.bundled import resolve_model
from services.trainer.model.model import DTYPES, loading
from services.trainer.model.tensor_files import read_tensors
from services.trainer.settings import Settings

NOT_IN_PEFT = "PEFT cannot load an adapter of these layers of this model; export it with --merged"
MASTER = "master."  # prefix of the trained tensors in a checkpoint


def export_adapter(
    checkpoint: Path, folder: Path, config: JobConfig, base: str, rows: Sequence[Sequence[int]]
) -> dict[str, float | int]:
    """Write the adapter of a checkpoint into the folder, and return the gap to PEFT on these rows of tokens.

    The factors are those that the policy computes with: the masters in the compute dtype. Raises ValueError.
    """
    import peft

    assert config.lora is not None, "a job without adapters has none to export"
    dtype, source = DTYPES[config.model.dtype], resolve_model(config.model.path, Settings().cache_dir)
    tensors = read_tensors(checkpoint / "optimizer", {})
    masters = {name.removeprefix(MASTER): tensor for name, tensor in tensors.items() if name.startswith(MASTER)}
    model = load_plain(source, dtype)
    write_adapter(folder, {name: master.to(dtype) for name, master in masters.items()}, model, config.lora, base)
    try:
        loaded = peft.PeftModel.from_pretrained(model, str(folder)).eval()
    except (KeyError, RuntimeError, ValueError) as error:
        raise ValueError(f"{NOT_IN_PEFT} ({error})") from error
    written = load_file(folder / WEIGHTS_FILE)
    if {name.replace(".default.", "."): p.numel() for name, p in loaded.named_parameters() if ".lora_" in name} != {
        name: tensor.numel() for name, tensor in written.items()
    }:
        raise ValueError(f"{NOT_IN_PEFT} (it adapts other layers)")
    if not rows:
        return {}
    by_peft = logprobs_of(loaded, rows)
    del model, loaded  # two models at a time may be too much for this machine
    gaps = (by_peft - logprobs_of(load_plain(str(checkpoint), dtype), rows)).abs()
    return {"mean": gaps.mean().item(), "max": gaps.max().item(), "num_tokens": len(gaps)}


def load_plain(source: str, dtype: torch.dtype) -> Any:
    """Load a model as its users do. Raises ValueError naming it."""
    from transformers import AutoModelForCausalLM

    with loading(source):
        return AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval()


@torch.no_grad()
def logprobs_of(model: Any, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the log-probability of each token of the rows but the first ones, [N] float32."""
    logprobs = []
    for row in rows:
        token_ids = torch.tensor([row])
        log_probabilities = model(input_ids=token_ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        logprobs.append(log_probabilities.gather(-1, token_ids[0, 1:, None])[:, 0])
    return torch.cat(logprobs)


def main() -> None:
    """Read JSON from the standard input: checkpoint, folder, base, texts. Print the gap as JSON."""
    request = json.load(sys.stdin)
    checkpoint = Path(request["checkpoint"])
    try:
        config = JobConfig.model_validate(request["job"], context=IS_ACCEPTED)
        tokenizer = load_tokenizer(checkpoint)
        rows = [row for text in request["texts"] if len(row := tokenizer(text)["input_ids"]) > 1]
        gap = export_adapter(checkpoint, Path(request["folder"]), config, request["base"], rows)
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    sys.stdout.write(json.dumps(gap) + "\n")


if __name__ == "__main__":
    main()
