"""Tiny models of many architectures in folders, and whether the trainer's numbers for them are right.

`benchmarks/architectures.py` measures all rows, for docs/reference/models.md; `unit/test_architectures.py` a few.
"""

import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from onbeat.streams.codec import Response, RolloutGroup
from services.trainer.batch import pack
from services.trainer.model.lora import published_tensors
from services.trainer.model.model import Passes, load_config, load_model, response_logprobs
from services.trainer.passes.choice import choose_passes
from services.trainer.passes.shrink import VOCAB_SIZE, random_model, shrunken
from services.trainer.passes.trial import TOLERANCE, describe, forward, gap_of_gradients, gradients_of, plain_logprobs

CPU = torch.device("cpu")
CONTEXT_TOKENS = 128  # tokens of the job's context
WINDOW = 24
# Types that are decoders of text, with their default configurations.
TYPES = """
afmoe apertus arcee aria_text axk1 axk2 bamba bart biogpt bitnet blenderbot-small bloom codegen cohere cohere2
cohere2_moe ctrl cwm deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 diffllama doge dots1
ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon falcon_h1 falcon_mamba flex_olmo gemma gemma2 gemma3_text gemma3n_text
gemma4_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox
gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium
hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax inkling_text jais2 jamba jetmoe kimi_linear laguna lfm2 lfm2_moe llama
llama4_text longcat_flash mamba mamba2 mellum mimo_v2_flash minicpm3 minimax minimax_m2 ministral ministral3 mistral
mixtral modernbert-decoder mpt nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt opt persimmon
phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_text qwen3_5_moe_text qwen3_moe qwen3_next recurrent_gemma rwkv seed_oss
smollm3 solar_open stablelm starcoder2 vaultgemma xglm xlstm youtu zamba zamba2 zaya
bert electra roberta xlnet reformer gemma3 gemma4 qwen3_5 llama4 mistral3 fuyu
""".split()  # noqa: SIM905
LONGROPE = {
    "rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "rope_theta": 1e4}
}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}
# Types that need values besides their defaults, which transformers itself cannot build.
NEEDED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"] * 4},
}
# Variants of one type. Their names end with the options that are set.
VARIANTS: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "tied, biases", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("llama", "linear rotary scaling", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    ("llama", "yarn", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}),
    ("llama", "dynamic rotary scaling, inside", DYNAMIC | {"max_position_embeddings": 2 * CONTEXT_TOKENS}),
    ("llama", "dynamic rotary scaling, beyond", DYNAMIC | {"max_position_embeddings": CONTEXT_TOKENS // 2}),
    ("phi3", "longrope, inside", LONGROPE | {"original_max_position_embeddings": CONTEXT_TOKENS}),
    ("phi3", "longrope, beyond", LONGROPE | {"original_max_position_embeddings": 64}),
    ("falcon", "ALiBi", {"alibi": True, "new_decoder_architecture": False}),
    ("falcon", "new decoder", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("falcon", "ALiBi, new decoder", {"alibi": True, "new_decoder_architecture": True, "num_kv_heads": 2}),
    ("falcon_h1", "head with a multiplier", {"lm_head_multiplier": 0.5}),
    ("gemma2", "no cap in the attention", {"attn_logit_softcapping": None}),
    (
        "qwen2",
        "window",
        {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": ["sliding_attention"] * 12},
    ),
    ("opt", "post-norm, projected embeddings", {"do_layer_norm_before": False, "word_embed_proj_dim": 16}),
    ("gpt_neox", "sequential, all rotary", {"use_parallel_residual": False, "rotary_pct": 1.0}),
    ("gpt_bigcode", "several key heads", {"multi_query": False}),
    ("gpt2", "scaled by layer", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}),
    ("mixtral", "router logits", {"output_router_logits": True}),
    ("phi", "norms of queries and keys", {"qk_layernorm": True}),
    (
        "stablelm",
        "parallel, norms, biases",
        {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True},
    ),
    ("granite", "multipliers", {"logits_scaling": 8.0, "residual_multiplier": 0.2, "attention_multiplier": 0.1}),
    ("cohere", "norms of queries and keys", {"use_qk_norm": True}),
    ("olmo", "clipped", {"clip_qkv": 1.0}),
    ("mpt", "without ALiBi", {}),
    ("bloom", "residual after the norm", {"apply_residual_connection_post_layernorm": True}),
    ("starcoder2", "window", {"sliding_window": WINDOW}),
    ("deepseek_v3", "no query rank", {"q_lora_rank": None}),
]


@dataclass(frozen=True)
class Row:
    name: str
    model_type: str
    is_beyond: bool = False  # sequences are longer than windows and the like
    options: dict[str, Any] = field(default_factory=dict)

    def config(self) -> Any:
        config = transformers.AutoConfig.for_model(self.model_type)
        tiny = shrunken(config, math.inf if self.is_beyond else 0)
        for name, value in (NEEDED.get(self.model_type, {}) | self.options).items():
            setattr(tiny.get_text_config(), name, value)
        return tiny


def all_rows() -> Iterator[Row]:
    """Types with something that acts on long sequences come twice."""
    for name in TYPES:
        yield Row(name, name)
        if Row(name, name, is_beyond=True).config().to_dict() != Row(name, name).config().to_dict():
            yield Row(f"{name}, long sequences", name, is_beyond=True)
    for name, variant, options in VARIANTS:
        yield Row(f"{name}, {variant}", name, options=options)


def measure(row: Row) -> dict[str, Any]:
    """Outcome (`packed`, `not packed`, `refused`; `not built` by transformers; `WRONG`, `CRASH`) and what was found."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            random_model(row.config(), "eager", seed=1).save_pretrained(folder)
        except Exception as error:
            return {"outcome": "not built", "reason": describe(error)}
        try:
            passes, reason = choose_passes(load_config(folder), CONTEXT_TOKENS, CPU, torch.float32)
        except ValueError as error:
            return {"outcome": "refused", "reason": str(error).replace(folder, "FOLDER")}
        except Exception as error:
            return {"outcome": "CRASH", "reason": describe(error)}
        rows = "one row" if passes.is_packed else "padded" if passes.is_padded else "each length by itself"
        way = {"attention": "packed" if passes.is_packed else passes.attention, "rows": rows, "reason": reason}
        try:
            gaps = measure_gaps(Path(folder), passes)
            if gaps["gradient"] > TOLERANCE:
                gaps["rounding"] = measure_rounding(Path(folder))
        except Exception as error:
            return {"outcome": "CRASH", **way, "reason": describe(error)}
    # NaN is not right. A gradient may differ from transformers' by less than transformers' own does from the true one.
    is_right = gaps["gradient"] <= max(TOLERANCE, gaps.get("rounding", 0.0))
    is_right &= all(gaps[kind] <= TOLERANCE for kind in ("logprobs", "export"))
    outcome = ("packed" if passes.is_packed else "not packed") if is_right else "WRONG"
    return {"outcome": outcome, **way, "gaps": gaps}


def measure_gaps(folder: Path, passes: Passes) -> dict[str, float]:
    """Return the gap between the trainer's model and transformers' own, both loaded from the folder."""
    trained = load_model(str(folder), torch.float32, CPU, passes)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    groups = random_groups()
    expected = plain_logprobs(plain, groups)
    logprobs = response_logprobs(trained, pack(groups, CPU), 1.0)[0]
    return {
        "logprobs": (logprobs - expected).detach().abs().max().item(),
        "gradient": gap_of_gradients(gradients_of(trained, logprobs), gradients_of(plain, expected)),
        "export": export_gap(trained, plain, folder),
    }


def measure_rounding(folder: Path) -> float:
    """Return the gap between the gradients of transformers' own model in float32 and in float64."""
    gradients = []
    for dtype in (torch.float32, torch.float64):
        plain = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager"
        ).eval()
        plain.set_experts_implementation("eager")  # the others know no float64
        computed = gradients_of(plain, plain_logprobs(plain, random_groups()))
        gradients.append({name: gradient.double() for name, gradient in computed.items()})
    return gap_of_gradients(*gradients)


@torch.no_grad()
def export_gap(trained: Any, plain: Any, folder: Path) -> float:
    """Return the largest gap between the logits of a model and of one that is loaded from its published tensors."""
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in published_tensors(trained)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    tokens = list(random_groups()[0].prompt_token_ids)
    return (forward(loaded, tokens) - forward(plain, tokens)).abs().max().item()


def random_groups() -> list[RolloutGroup]:
    """Other lengths than those of the trial."""
    generator = torch.Generator().manual_seed(1)

    def tokens(count: int) -> list[int]:
        return torch.randint(1, VOCAB_SIZE, (count,), generator=generator).tolist()

    prefix = tokens(18)
    shapes = ((3, (37, 5, 1)), (51, (7, 7)))
    return [
        RolloutGroup(
            group_id=str(index),
            prompt_token_ids=prefix + tokens(length),
            responses=[Response(token_ids=tokens(n), rollout_logprobs=[0.0] * n) for n in lengths],
        )
        for index, (length, lengths) in enumerate(shapes)
    ]
