"""On a CUDA device: shared-prompt rows by FlexAttention against varlen one-by-one, and against a dense mask.

Forward and backward of one group on a model with random weights, gradient checkpointing on both sides, bfloat16. Varlen
one-by-one is every prompt + response as a sequence of one row without padding, through torch's FlashAttention for
unequal lengths. MFU counts the operations of `shared_prompt.py` (recomputation not) over the device's dense peak.

`--tiny --device cpu` tries the parts that run without a GPU, forward only, and writes no result.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial

import torch
from harness import save
from shared_prompt import counted_operations, make_group
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, Qwen2Config

from services.trainer.attention import build_layout, dense_mask
from services.trainer.attention.flex import plan_flex
from services.trainer.batch import MicroBatch, Part, pack
from services.trainer.logprobs import TargetLogprobs
from services.trainer.model import PACKED_ATTENTION, enable_gradient_checkpointing, register_attention, use_attention

SIZES = {  # of Qwen2.5: hidden, intermediate, layers, query heads, key/value heads, vocabulary, tied embeddings
    "1.5B": (1536, 8960, 28, 12, 2, 151_936, True),
    "7B": (3584, 18_944, 28, 28, 4, 152_064, False),
    "tiny": (64, 96, 2, 4, 2, 50_000, True),
}
SHAPES = [(512, 64, 8), (1024, 100, 8), (4096, 512, 8), (256, 1024, 8)]  # Lp, Lr, G
TINY_SHAPES = [(100, 30, 3)]
PEAKS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}  # bfloat16, dense, operations a second
REPETITIONS = 5


@dataclass(frozen=True)
class VarlenPlan:
    """Each sequence of the row by itself, causally, by FlashAttention."""

    ends: torch.Tensor  # [S + 1] int32, cumulative
    longest: int

    def attend(self, query, key, value, scale):
        rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
        bounds = (self.ends, self.ends, self.longest, self.longest)
        return varlen_attn(*rows, *bounds, scale=scale, window_size=(-1, 0), enable_gqa=True)[None]


def random_model(size: str, device: torch.device):
    hidden, intermediate, layers, heads, kv_heads, vocabulary, is_tied = SIZES[size]
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32_768,
        tie_word_embeddings=is_tied,
    )
    register_attention()
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    use_attention(model, PACKED_ATTENTION)
    enable_gradient_checkpointing(model)
    return model


def packed_batch(group, device: torch.device) -> tuple[MicroBatch, object]:
    batch = pack([group], device)
    return batch, plan_flex(batch.layout)


def one_by_one_batch(group, device: torch.device) -> tuple[MicroBatch, object]:
    """Each response with its own copy of the prompt; without CUDA the sequences are attended by FlexAttention too."""
    parts = [Part(group, (member,)) for member in range(len(group.responses))]
    batch = pack(parts, device, is_prefix_shared=False)
    if device.type != "cuda":
        return batch, plan_flex(batch.layout)
    ends = torch.tensor([0, *(span.end for span in batch.layout.groups)], dtype=torch.int32, device=device)
    return batch, VarlenPlan(ends, int(ends.diff().max()))


def pass_through(model, prepare_batch, group, device: torch.device, is_training: bool) -> torch.Tensor:
    """Log-probabilities of the group's response tokens; with the backward pass if training."""
    batch, plan = prepare_batch(group, device)
    with torch.set_grad_enabled(is_training):
        row = {"input_ids": batch.token_ids[None], "position_ids": batch.layout.position_ids[None]}
        hidden = model.get_decoder()(**row, layout_plan=plan, use_cache=False).last_hidden_state[0]
        hidden = hidden.index_select(0, batch.layout.logit_index)
        logprobs, _ = TargetLogprobs.apply(hidden, model.get_output_embeddings().weight, batch.target_ids, 1.0)
        if is_training:
            logprobs.sum().backward()
            model.zero_grad(set_to_none=True)
    return logprobs.detach()


def timed(run, device: torch.device) -> tuple[float, float]:
    """Median seconds after two warm-ups, and peak memory in GiB (0 without CUDA)."""
    is_cuda = device.type == "cuda"
    times_s = []
    for repetition in range(REPETITIONS + 2):
        if repetition == 2 and is_cuda:
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        run()
        if is_cuda:
            torch.cuda.synchronize()
        times_s.append(time.perf_counter() - started)
    return statistics.median(times_s[2:]), torch.cuda.max_memory_allocated() / 2**30 if is_cuda else 0.0


def compare_passes(size: str, shapes: list[tuple[int, int, int]], device: torch.device) -> list[dict]:
    model, is_training = random_model(size, device), device.type == "cuda"
    name = torch.cuda.get_device_name() if is_training else ""
    peak = next((operations for part, operations in PEAKS.items() if part in name), None)
    rows = []
    for shape in shapes:
        group = make_group(*shape)
        row = {"model": size, "prompt_response_group": shape}
        logprobs = {}
        sides = {"one_by_one": one_by_one_batch, "packed": packed_batch}
        for (side, prepare), operations in zip(sides.items(), counted_operations(model, *shape), strict=True):
            logprobs[side] = pass_through(model, prepare, group, device, is_training=False)
            run = partial(pass_through, model, prepare, group, device, is_training)
            row[f"{side}_s"], row[f"{side}_peak_gib"] = timed(run, device)
            if peak and is_training:
                row[f"{side}_mfu"] = 3 * operations / row[f"{side}_s"] / peak
            row[f"{side}_operations"] = operations
        row["ratio"] = row["one_by_one_s"] / row["packed_s"]
        row["counted_ratio"] = row.pop("one_by_one_operations") / row.pop("packed_operations")
        row["mean_logprob_gap"] = (logprobs["packed"] - logprobs["one_by_one"]).abs().mean().item()
        rows.append(row)
    return rows


def compare_with_dense_mask(shape: tuple[int, int, int], heads: tuple[int, int], device: torch.device) -> dict:
    """One attention layer; forward and backward on CUDA."""
    prompt, response, size = shape
    layout = build_layout([(prompt, [response] * size)], device)
    flex, mask = plan_flex(layout), dense_mask(layout).to(device)
    is_training = device.type == "cuda"
    inputs = [
        torch.randn(1, n, layout.num_places, 128, dtype=torch.bfloat16, device=device, requires_grad=is_training)
        for n in (heads[0], heads[1], heads[1])
    ]
    query, key, value = inputs
    kernels = {
        "flex": lambda: flex.attend(query, key, value, None),
        "dense": lambda: scaled_dot_product_attention(query, key, value, mask, enable_gqa=True).transpose(1, 2),
    }
    row, found = {"prompt_response_group": shape, "heads": heads}, {}

    def run(attend):
        output = attend()
        return [output, *(torch.autograd.grad(output.float().square().sum(), inputs) if is_training else ())]

    for name, attend in kernels.items():
        found[name] = [tensor.detach().float() for tensor in run(attend)]
        row[f"{name}_s"], row[f"{name}_peak_gib"] = timed(partial(run, attend), device)
    gaps = [(left - right).abs().mean() / right.abs().mean() for left, right in zip(*found.values(), strict=True)]
    return row | {"largest_relative_gap": max(gap.item() for gap in gaps)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and shape, to try the script")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device and finds none; --tiny --device cpu tries its parts without one")
    if options.device == "cpu" and not options.tiny:
        sys.exit("on the CPU only --tiny: FlexAttention has no backward pass there")
    device = torch.device(options.device)
    sizes, shapes = (["tiny"], TINY_SHAPES) if options.tiny else (["1.5B", "7B"], SHAPES)
    result = {"passes": [row for size in sizes for row in compare_passes(size, shapes, device)]}
    result["layers"] = [compare_with_dense_mask(shape, SIZES[size][3:5], device) for size in sizes for shape in shapes]
    if options.tiny:
        print(json.dumps(result, indent=2))
    else:
        save("flex_attention", {"device": torch.cuda.get_device_name(), "precision": "bfloat16"} | result)


if __name__ == "__main__":
    main()
