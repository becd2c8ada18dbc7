"""Shared-prompt packing: forward and backward of one group against one-by-one batching, on the same single core.

One-by-one is the usual padded batch [G, Lp + Lr] through transformers' SDPA attention, the head on response positions
only. The bound is the ratio of counted operations: linear layers per place, attention per visible pair, the head per
response token. Ratios from alternating repetitions; medians.
"""

import os
import statistics
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from harness import save

from onbeat.streams.codec import Response, RolloutGroup
from services.trainer.batch import pack
from services.trainer.bundled import prepare
from services.trainer.logprobs import TargetLogprobs
from services.trainer.model import load_model, response_logprobs, use_attention

SHAPES = [(512, 64, 8), (1024, 100, 8), (45, 22, 8), (32, 256, 8)]  # Lp, Lr, G
REPETITIONS, CORE = 7, 1


def make_group(prompt_length: int, response_length: int, group_size: int) -> RolloutGroup:
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(1000, 40_000, (count,), generator=generator).tolist()

    responses = [
        Response(token_ids=tokens(response_length), rollout_logprobs=[0.0] * response_length) for _ in range(group_size)
    ]
    return RolloutGroup(group_id="0-0", prompt_token_ids=tokens(prompt_length), responses=responses)


def packed(model, group: RolloutGroup) -> None:
    logprobs, _ = response_logprobs(model, pack([group], torch.device("cpu")), 1.0)
    logprobs.sum().backward()


def one_by_one(model, group: RolloutGroup) -> None:
    prompt = list(group.prompt_token_ids)
    rows = torch.tensor([prompt + list(response.token_ids) for response in group.responses])
    hidden = model.get_decoder()(input_ids=rows[:, :-1], use_cache=False).last_hidden_state[:, len(prompt) - 1 :]
    weight, targets = model.get_output_embeddings().weight, rows[:, len(prompt) :].flatten()
    TargetLogprobs.apply(hidden.flatten(0, 1), weight, targets, 1.0)[0].sum().backward()


def counted_ratio(model, prompt_length: int, response_length: int, group_size: int) -> float:
    """Operations of one-by-one over those of packed."""
    config = model.config
    head = config.vocab_size * config.hidden_size
    linear = sum(p.numel() for name, p in model.named_parameters() if "layers" in name and p.dim() == 2)
    width = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    response_places = response_length - 1
    row = prompt_length + response_places
    packed_places = prompt_length + group_size * response_places
    own_pairs = group_size * response_places * (2 * prompt_length + response_places)
    logits = 2 * head * group_size * response_length
    separate = 2 * linear * group_size * row + 2 * width * group_size * row * row + logits
    together = 2 * linear * packed_places + 2 * width * (prompt_length**2 + own_pairs) + logits
    return separate / together


def seconds(run, model, group: RolloutGroup) -> float:
    started = time.perf_counter()
    run(model, group)
    elapsed_s = time.perf_counter() - started
    model.zero_grad(set_to_none=True)
    return elapsed_s


def main() -> None:
    os.sched_setaffinity(0, {CORE})
    torch.set_num_threads(1)
    source = str(prepare("smollm2-135m-instruct", Path.home() / ".cache" / "onbeat"))
    packing = load_model(source, torch.bfloat16, torch.device("cpu"))
    plain = load_model(source, torch.bfloat16, torch.device("cpu"))
    use_attention(plain, "sdpa")
    rows = []
    for shape in SHAPES:
        group = make_group(*shape)
        seconds(packed, packing, group), seconds(one_by_one, plain, group)
        pairs = [(seconds(one_by_one, plain, group), seconds(packed, packing, group)) for _ in range(REPETITIONS)]
        ratio = statistics.median(separate / together for separate, together in pairs)
        counted = counted_ratio(packing, *shape)
        rows.append(
            {
                "prompt_response_group": shape,
                "ratio": ratio,
                "counted_ratio": counted,
                "share_of_counted": ratio / counted,
                "one_by_one_s": statistics.median(separate for separate, _ in pairs),
                "packed_s": statistics.median(together for _, together in pairs),
            }
        )
    save("shared_prompt", {"shapes": rows, "repetitions": REPETITIONS, "core": CORE, "precision": "bfloat16"})


if __name__ == "__main__":
    main()
