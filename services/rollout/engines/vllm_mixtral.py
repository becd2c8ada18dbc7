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


class MixtralForCausalLM(mixtral.MixtralForCausalLM):  # type: ignore[misc]  # vLLM is imported without its types
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded: set[str] = super().load_weights((rename(name), tensor) for name, tensor in weights)
        return loaded


def rename(name: str) -> str:
    for published, known in KNOWN_NAMES.items():
        name = name.replace(published, known)
    return name
