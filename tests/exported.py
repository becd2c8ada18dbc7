"""Tiny models as people bring them, in the layout of the hub, and the checkpoints that the trainer makes of them.

Each family stands for one way in which a checkpoint may differ from what was trained.
"""

from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from onbeat.config import LoraConfig
from onbeat.streams.codec import Response, RolloutGroup
from services.trainer.batch import pack
from services.trainer.checkpoints.store import CheckpointStore, TrainState
from services.trainer.model.exported_files import exported_files
from services.trainer.model.exported_weights import conversion
from services.trainer.model.lora import add_adapters, published_tensors
from services.trainer.model.model import Passes, load_model, response_logprobs
from services.trainer.passes.shrink import VOCAB_SIZE, random_model
from tests.architectures import CPU, Row
from tests.tiny_models import build_tokenizer

FAMILIES = {
    "llama": "an embedding and a separate head, rotary scaling",
    "qwen3": "norms of queries and keys",
    "gemma2": "one tensor for embedding and head, caps",
    "gemma3_text": "one rotary base for each type of layers",
    "gpt_neox": "other names of the rotary base",
    "phi3": "fused projections",
    "qwen3_moe": "experts, which the hub keeps one by one",
    "mixtral": "experts with other names",
    "gemma3": "a model with pictures, whose files have other names",
}
BASE, LOCAL_BASE = 77_777.0, 333.0  # no family's own ones
OPTIONS = {"llama": {"rope_parameters": {"rope_type": "linear", "factor": 4.0}, "tie_word_embeddings": False}}
PROMPT = torch.randint(1, VOCAB_SIZE, (1, 40), generator=torch.Generator().manual_seed(1))


def write_source(folder: Path, family: str) -> Path:
    """Write a random model of the family, as transformers 5 saves it, with a tokenizer."""
    row = Row(family, family, options=OPTIONS.get(family, {}))
    config = row.config()
    rope = config.get_text_config().rope_parameters
    for name, layers in rope.items() if "full_attention" in rope else [("", rope)]:
        layers["rope_theta"] = LOCAL_BASE if name == "sliding_attention" else BASE
    random_model(config, "eager", seed=1).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    name_as_on_the_hub(folder / "model.safetensors")
    return folder


def name_as_on_the_hub(weights: Path) -> None:
    """Give the tensors of a tower for pictures the prefix that transformers 5 leaves out of a model that it made."""
    tensors = load_file(weights)
    named = {name.replace("vision_tower.", "vision_tower.vision_model."): tensor for name, tensor in tensors.items()}
    if named.keys() != tensors.keys():
        save_file(named, weights, metadata={"format": "pt"})


def train_and_export(
    source: Path, folder: Path, lora: LoraConfig | None = None
) -> tuple[list[Path], list[torch.Tensor]]:
    """Return the checkpoints at version 0 and after an update, as `CheckpointStore` writes them, and the logits of the
    model in training at both. `lora`: of the adapters that are trained."""
    model, logits = load_model(str(source), torch.float32, CPU, Passes("eager")), []
    if lora is not None:
        add_adapters(model, lora, seed=0)
    files = exported_files(str(source), torch.float32)
    store = CheckpointStore(folder, keep=2)
    for version in (0, 1):
        if version:
            update(model)
        state = TrainState("job", str(source), next_iteration=version, policy_version=version)
        store.save(state, published_tensors(model), {}, files, convert=conversion(model))
        store.wait()
        with torch.no_grad():
            logits.append(model(input_ids=PROMPT).logits)
    return store.complete(), logits


@torch.no_grad()
def logits_of(folder: Path) -> torch.Tensor:
    """Load a folder with transformers, which must find each tensor, and return the logits of the prompt."""
    options = {"attn_implementation": "eager", "output_loading_info": True}
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model.eval()(input_ids=PROMPT).logits


def update(model) -> None:
    """Step against the gradient of a response, as an optimizer does."""
    tokens = PROMPT[0].tolist()
    response = Response(token_ids=tokens[20:], rollout_logprobs=[0.0] * 20)
    group = RolloutGroup(group_id="0", prompt_token_ids=tokens[:20], responses=[response])
    response_logprobs(model, pack([group], CPU), 1.0)[0].sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter += 0.01 * parameter.grad.sign()
                parameter.grad = None
