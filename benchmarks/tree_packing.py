"""Tree packing: forward and backward of a group of conversations, packed as a tree against one path at a time.

A conversation has 3 to 8 turns, each of which observes and samples some tokens. Without forks it is one path. With
forks, a template leaves out the first part of what a turn sampled (as for reasoning) once the next turn begins: the
history forks there, and the turn's own path remains. One path at a time is what a trainer does that has no trees: each
path is a sequence, through transformers' SDPA attention. The head is computed on sampled positions only, each once, by
the same code on both sides.

The counted ratio is that of operations: linear layers per place, attention per visible pair, the head per sampled
token; that of tokens is shown beside it. Figures are medians over rounds (`groups.alternate`). Seconds are those of the
processor, as one thread computes and other programs may run.
"""

import os
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from gpu_check.groups import alternate, counted_operations, packed, separate_paths
from harness import command_line, save, start
from transformers import AutoModelForCausalLM, LlamaConfig

from onbeat.streams.codec import Response, RolloutGroup, Turn
from services.trainer.batch import num_places
from services.trainer.model.logprobs import TargetLogprobs
from services.trainer.model.model import PACKED_ATTENTION, Passes, register_attention, set_up

GOAL = 0.9  # share of the counted ratio
GROUP, PROMPT = 8, 96  # episodes, tokens
NUM_LAYERS = 4  # layers, of the 30 of SmolLM2-135M, whose widths the model has
OBSERVED, SAMPLED, LEFT_OUT = (16, 64), (16, 48), 0.6  # tokens of a turn, from and to; share of sampled ones
TURNS = ((3, 5), (6, 8))  # tokens of the first and second part of a turn
REPETITIONS, VOCABULARY = 3, 49152
NOTE = "seconds of the processor, medians; other programs used the machine at the same time"


def make_conversations(num_turns: tuple[int, int], has_forks: bool) -> RolloutGroup:
    rng = random.Random(f"{num_turns}")

    def tokens(count: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(count)]

    responses = []
    for _ in range(GROUP):
        turns: list[Turn] = []
        length = PROMPT  # tokens of the history, with all that the engine was sent
        for index in range(rng.randint(*num_turns)):
            observed, sampled = rng.randint(*OBSERVED) * (index > 0), rng.randint(*SAMPLED)
            kept = []
            if index and has_forks:  # the answer comes again without its first part
                last = turns[-1]
                kept = tokens(int(last.num_sampled * (1 - LEFT_OUT)))
                length -= last.num_sampled
            turns.append(
                Turn(
                    parent=index - 1 if index else None,
                    num_shared=length,
                    observed_token_ids=kept + tokens(observed),
                    num_sampled=sampled,
                )
            )
            length += len(kept) + observed + sampled
        count = sum(turn.num_sampled for turn in turns)
        responses.append(Response(token_ids=tokens(count), rollout_logprobs=[0.0] * count, turns=turns))
    return RolloutGroup(group_id="0-0", prompt_token_ids=tokens(PROMPT), responses=responses)


def by_paths(model: Any, group: RolloutGroup) -> None:
    weight = model.get_output_embeddings().weight
    for path, spans in separate_paths(group):
        tokens = torch.tensor(path)
        hidden = model.get_decoder()(input_ids=tokens[None, :-1], use_cache=False).last_hidden_state[0]
        places = torch.cat([hidden[start - 1 : end - 1] for start, end in spans])
        targets = torch.cat([tokens[start:end] for start, end in spans])
        TargetLogprobs.apply(places, weight, targets, 1.0)[0].sum().backward()


def seconds(run: Callable[[Any, RolloutGroup], None], model: Any, group: RolloutGroup) -> float:
    started = time.process_time()
    run(model, group)
    elapsed_s = time.process_time() - started
    model.zero_grad(set_to_none=True)
    return elapsed_s


def measure(models: dict[str, Any], num_turns: tuple[int, int], has_forks: bool) -> dict[str, Any]:
    group = make_conversations(num_turns, has_forks)
    paths = separate_paths(group)
    assert sum(end - start for _, span_list in paths for start, end in span_list) == sum(
        len(r.token_ids) for r in group.responses
    )
    places, separate = num_places(group), sum(len(path) - 1 for path, _ in paths)
    rounds = alternate(
        lambda: seconds(packed, models["packed"], group), lambda: seconds(by_paths, models["plain"], group), REPETITIONS
    )
    ratio = statistics.median(paths_s / packed_s for paths_s, packed_s in rounds)
    operations_by_paths, operations = counted_operations(models["packed"], group)
    share = ratio * operations / operations_by_paths
    return {
        "turns": num_turns,
        "has_forks": has_forks,
        "num_paths": len(paths),
        "longest_path": max(len(path) for path, _ in paths),
        "packed_tokens": places,
        "tokens_by_paths": separate,
        "tokens_ratio": separate / places,
        "counted_ratio": operations_by_paths / operations,
        "ratio": ratio,
        "share_of_counted": share,
        "goal": f"share of counted >= {GOAL}",
        "is_met": share >= GOAL,
        "by_paths_s": statistics.median(paths_s for paths_s, _ in rounds),
        "packed_s": statistics.median(packed_s for _, packed_s in rounds),
        "ratios": [paths_s / packed_s for paths_s, packed_s in rounds],
    }


def build_models(dtype: torch.dtype) -> dict[str, Any]:
    """Build the same random model twice, for packed rows and for plain ones."""
    register_attention()
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": NUM_LAYERS}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    models = {}
    for name, passes in (("packed", Passes(PACKED_ATTENTION)), ("plain", Passes("sdpa"))):
        config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=4096, **sizes, **heads)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=passes.attention)
        models[name] = set_up(model, passes, torch.device("cpu"))
    models["plain"].load_state_dict(models["packed"].state_dict())
    return models


def main() -> None:
    torch.set_num_threads(1)
    models = build_models(torch.float32)
    measured = []
    for turns in TURNS:
        for has_forks in (False, True):
            measured.append(measure(models, turns, has_forks))
            print(measured[-1], flush=True)
    how = {"group": GROUP, "prompt": PROMPT, "repetitions": REPETITIONS, "num_threads": 1, "precision": "float32"}
    save("tree_packing", {**how, "load_average": os.getloadavg(), "note": NOTE, "conversations": measured})


if __name__ == "__main__":
    start(command_line(__doc__))
    main()
