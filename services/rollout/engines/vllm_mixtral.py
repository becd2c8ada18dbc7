"""Mixtral in vLLM, under the names that a trainer publishes. Transformers 5 holds all experts of a layer in two tensors
and calls the layer `mlp`; vLLM knows only the older names of Mixtral, while it knows both of Qwen3-MoE.
"""

from collections.abc import Iterable

import torch
from vllm.model_executor.models import mixtral

KNOWN_NAMES = {
    ".mlp.gate.": ".block_sparse_moe.gate.",
    ".mlp.experts.gate_up_proj": ".block_sparse_moe.experts.w13",
    ".mlp.experts.down_proj": ".block_sparse_moe.experts.w2",
}


class MixtralForCausalLM(mixtral.MixtralForCausalLM):
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return super().load_weights((rename(name), tensor) for name, tensor in weights)


def rename(name: str) -> str:
    for published, known in KNOWN_NAMES.items():
        name = name.replace(published, known)
    return name
