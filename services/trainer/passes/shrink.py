"""A small configuration of the same architecture that can be tried in a second: few layers, narrow, and with all that
acts on long sequences acting on short ones.

Field names are read for their meaning (heads, sizes of heads, widths, experts, lengths). A field whose name is not
understood keeps its value; a configuration that fails when narrowed is tried in its own width.
"""

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import torch

MAX_PARAMETERS = 500_000_000  # the largest model that is tried: 2 GB, several times
VOCAB_SIZE, NUM_LAYERS, NUM_EXPERTS, HEAD_SIZE, WIDTH = 256, 12, 8, 16, 32
REACHED, NOT_REACHED = 8, 128  # tokens: within every sequence of the trial, and beyond all of them
NUM_BLOCKS = 2  # blocks of REACHED tokens each: within every sequence of the trial, too
CAP = 2.0  # limit of logits: low enough to have an effect
DECAY = re.compile(r"A_log$")  # logarithm of the rate at which a recurrent state is forgotten
SLOWER = 6.0  # reduces that logarithm
GAIN = 2.0  # standard deviation of a product with a random weight: attention is far from uniform

LENGTH = re.compile(
    r"(window|chunk_?size|chunk_length|index_topk|block_size|floor_scale|local_attention)(?!.*(pattern|layers|blocks))"
)
BLOCKS = re.compile(r"topk_blocks$")  # blocks of the `block_size` beside it are a length together
CAPPED = re.compile(r"soft_?cap|logit_cap")
NUM_HEADS = re.compile(
    r"(^|_)n?_?(num_)?(q_|k_|v_|key_|value_|kv_|key_value_|attention_)*(?<!index_n_)heads?$|query_groups$"
)
SIZE_OF_HEAD = re.compile(r"head_?(dim|size)$|d_head$|kv_channels$|rotary_dim$")
WIDE = re.compile(
    r"(hidden|intermediate|inner|embedding|embd|model|ffn|ff|width|rank|proj|ssm)(_size|_dim)?(_mlp)?$|_size$"
)
NOT_WIDE = re.compile(r"vocab|kernel|state|window|chunk|block|patch|conv")
CHOSEN_EXPERTS = re.compile(r"experts?_per_tok|moe_(k|top_?k)$|top_k_experts")
EXPERTS = re.compile(r"experts?(_num)?$|experts_num|expert_num")
LAYERS = re.compile(r"layers$|layer_end_index$|first_k_dense")
PATTERN = re.compile(r"period|interval|every|idx|layer_ids|offset|pattern|freq|first_k|step$|layer_end|block_type")
MEDIA = "image|video|audio|vision|boi|eoi|boa|eoa"  # beginnings and ends included; no text has their tokens
MEDIA_TOKEN = re.compile(rf"({MEDIA}).*token_(id|index)$")
SPECIAL_TOKEN = re.compile(rf"^(?!.*({MEDIA})).*token_(id|index)$")
STATE = re.compile(r"state(_size)?$")


def shrunken(config: Any, longest_tokens: float, num_layers: int = NUM_LAYERS, is_narrow: bool = True) -> Any:
    """Return a small copy for `random_model`. The trial exceeds exactly those lengths that sequences of up to
    `longest_tokens` exceed. `is_narrow`: its widths are small; otherwise they are the configuration's own."""
    small = copy.deepcopy(config)
    for name in getattr(config, "sub_configs", {}):
        part = getattr(small, name, None)
        if part is not None and part is not small.get_text_config():
            shrink_depth(part, 1)
    text = small.get_text_config()
    for holder in {id(config_part): config_part for config_part in (small, text)}.values():
        replace_numbers(holder, SPECIAL_TOKEN, lambda value: value % VOCAB_SIZE)
        replace_numbers(holder, MEDIA_TOKEN, lambda value: value % VOCAB_SIZE + VOCAB_SIZE)
    shrink_depth(text, num_layers if has_pattern(text) else 2)
    replace_numbers(text, r"vocab_size", lambda value: VOCAB_SIZE)
    replace_numbers(text, EXPERTS, lambda value: min(value, NUM_EXPERTS))
    replace_numbers(text, CHOSEN_EXPERTS, lambda value: min(value, 2))
    replace_numbers(text, STATE, lambda value: min(value, HEAD_SIZE))
    replace_numbers(text, r"n_?groups$", lambda value: 1)  # groups of state-space heads
    replace_numbers(text, r"^n_group$", lambda value: min(value, 2))  # groups of experts
    replace_numbers(text, r"^topk_group$", lambda value: 1)
    shrink_blocks(text, longest_tokens)
    replace_numbers(text, LENGTH, lambda value: REACHED if value < longest_tokens else NOT_REACHED)
    replace_numbers(text, CAPPED, lambda value: CAP)
    if is_narrow:
        shrink_width(text)
    return small


def replace_numbers(config: Any, pattern: str | re.Pattern[str], replace: Callable[[Any], Any]) -> None:
    """Replace positive numbers in fields whose names match the pattern; switches, lists and unset fields stay."""
    for name, value in numbers(config).items():
        if re.search(pattern, name):
            setattr(config, name, replace(value))


def numbers(config: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 and not name.startswith("_")
    }


def shrink_blocks(config: Any, longest_tokens: float) -> None:
    """Shrink the number of blocks that a token attends to: their tokens together are reached if they were before."""
    for name, count in numbers(config).items():
        if BLOCKS.search(name):
            size_name = BLOCKS.sub("block_size", name)
            tokens = count * getattr(config, size_name, 1)
            setattr(config, name, min(count, NUM_BLOCKS) if tokens < longest_tokens else NOT_REACHED)


def has_pattern(config: Any) -> bool:
    """Return whether layers may differ. If not, two are enough, and a deep random model may forget its prompt."""
    depth = getattr(config, "num_hidden_layers", 0)
    return any(
        (isinstance(value, list | tuple) and len(value) == depth) or (value and PATTERN.search(name))
        for name, value in vars(config).items()
    )


def shrink_depth(config: Any, num_layers: int) -> None:
    """Keep the first `num_layers` layers; lists and tables with an entry for each layer are cut."""
    depth = getattr(config, "num_hidden_layers", None)
    if not isinstance(depth, int) or depth <= num_layers:
        return
    for name, value in vars(config).items():
        if isinstance(value, list | tuple) and len(value) == depth:
            setattr(config, name, value[:num_layers])
        elif isinstance(value, dict) and value and all(str(key).isdigit() for key in value):
            setattr(config, name, {key: item for key, item in value.items() if int(key) < num_layers})
    replace_numbers(config, LAYERS, lambda value: max(1, value * num_layers // depth))
    overrides = getattr(config, "_heterogeneity_spec", None)  # Gemma 4's, by layer
    config.num_hidden_layers = num_layers
    if overrides is not None:
        kept = {layer: values for layer, values in overrides.per_layer_overrides.items() if layer < num_layers}
        config.per_layer_config = kept or None


def shrink_width(config: Any) -> None:
    """Divide the numbers of heads by one number, their sizes by another, and widths by the product of both."""
    fields = {name: value for name, value in numbers(config).items() if isinstance(value, int)}
    sizes = [value for name, value in fields.items() if SIZE_OF_HEAD.search(name)]
    heads = [value for name, value in fields.items() if NUM_HEADS.search(name) and not SIZE_OF_HEAD.search(name)]
    width = config.hidden_size
    main_heads = getattr(config, "num_attention_heads", None) or fields.get("num_heads")
    if main_heads and width % main_heads == 0:
        sizes.append(width // main_heads)
    common = math.gcd(*heads)
    fewer = max(1, common // math.gcd(common, 4 if len(set(heads)) == 1 else 2))
    smaller = math.gcd(*sizes, max(1, max(sizes, default=0) // HEAD_SIZE))
    factor = fewer * smaller if heads else max(1, width // WIDTH)
    if "head_dim" in fields:  # heads are not parts of the width
        factor = max(factor, width // (4 * WIDTH))

    def narrowed(name: str, value: int) -> int:
        if SIZE_OF_HEAD.search(name):
            return value // smaller
        if NUM_HEADS.search(name):
            return value // fewer
        if not WIDE.search(name) or NOT_WIDE.search(name):
            return value
        return 8 * math.ceil(value / factor / 8)  # matrix products require a multiple of 8

    for name, value in vars(config).items():
        if name in fields:
            setattr(config, name, narrowed(name, value))
        elif isinstance(value, list) and value and all(type(item) is int for item in value):
            setattr(config, name, [narrowed(name.removesuffix("_per_layer"), item) for item in value])
    for rope in rope_tables(config):
        for name in ("short_factor", "long_factor"):
            if name in rope:
                rope[name] = rope[name][: len(rope[name]) // smaller]
        if "mrope_section" in rope:
            rope["mrope_section"] = [value // smaller for value in rope["mrope_section"]]


def rope_tables(config: Any) -> list[dict[str, Any]]:
    """Return the rotary settings of the configuration: one, one for each kind of layer, or none."""
    parameters = getattr(config, "rope_parameters", None) or {}
    tables = [parameters, *parameters.values()]
    return [table for table in tables if isinstance(table, dict) and "rope_type" in table]


def num_parameters(config: Any) -> int:
    """Count the parameters of a model of this configuration, on the meta device."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def random_model(config: Any, attention: str, seed: int = 0) -> Any:
    """Return a float32 model on the CPU in which all parameters and buffers matter: none is 0, attention is sharp.

    Recurrent states remember tens of tokens, so that one that leaks into the next sequence is noticed. Freshly
    initialised ones remember a single token: what they return is often almost 0, and the norm behind them then
    multiplies rounding errors until gradients differ by more than wrong passes would make them.
    """
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        options = {"dtype": torch.float32, "attn_implementation": attention}
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), **options)
        for name, tensor in model.state_dict(keep_vars=True).items():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape)
                if tensor.dim() > 1 and isinstance(tensor, torch.nn.Parameter):
                    tensor.copy_(noise * GAIN / math.sqrt(tensor.shape[-1]))
                elif tensor.dim() > 1:  # a buffer whose zeros may hide later tokens
                    tensor.mul_(1.0 + 0.1 * noise)
                else:
                    tensor.add_(noise, alpha=0.1)
                if DECAY.search(name):
                    tensor.sub_(SLOWER)
    return model.eval()
