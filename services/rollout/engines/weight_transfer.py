"""A vLLM plug-in that loads tensors of a policy's safetensors file into the model inside a vLLM worker process.

It is reached only through the `vllm.general_plugins` entry point, because workers are separate processes. The file has
been checked before (arrivals); this module loads it, and repairs what vLLM packs on a CPU: tied output heads and
experts. It also ends vLLM's processes when ours is killed.
"""

import logging
import multiprocessing
from dataclasses import dataclass
from typing import Any

from safetensors import safe_open
from vllm import ModelRegistry
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from onbeat.machine.malloc import give_back_if_scarce
from services.rollout.engines import vllm_kernels
from services.rollout.engines.failure import keep_causes
from services.rollout.engines.vllm_core import end_with_parent
from services.rollout.engines.vllm_linears import PlainLinears

BACKEND = "onbeat_safetensors"


@dataclass
class FileInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is imported without its types
    """An empty message: a file has no peer to agree with."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # vLLM is imported without its types
    weights_file: str  # absolute path of a safetensors file that the worker can read, HF names
    names: list[str]  # the tensors to load


class FileWeightTransferEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):  # type: ignore[misc]  # as above
    """An update is start -> receive (whole modules over all calls) -> finish. Tensors never named keep their values.

    After a failure in between, nothing may be generated until an update of all tensors has succeeded. Its start closes
    the failed one: then every layer is whole again, and only its weights are meaningless.
    """

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo
    supports_draft_weight_update = False
    _file: tuple[str, Any] | None = None  # path and open file of an update that has touched layers
    _expert_kernels: dict[Any, Any]  # keyed by the layer's vLLM method, while an update may replace them
    _linears: PlainLinears | None = None  # once an update has come
    _loaded: set[str]  # the tensors of this update that have been loaded

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        self._close()  # an update that failed half way, if there is one

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        tensors = self._open(update_info.weights_file)
        assert self._linears is not None
        names = self._linears.load(update_info.names, tensors.get_tensor)
        # Views of the mapped file: a layer's loaders copy them once it is complete.
        self.model.load_weights((name, tensors.get_tensor(name)) for name in names)
        self._loaded.update(update_info.names)

    def _open(self, weights_file: str) -> Any:
        """Return the open file. The first call of an update reads its header, and only then touches the layers."""
        if self._file is None:
            file = safe_open(weights_file, framework="pt")
            self._linears = self._linears or PlainLinears(self.model)
            self._linears.begin()
            self._loaded = set()
            initialize_layerwise_reload(self.model)
            self._expert_kernels = self._take_expert_kernels()
            self._file = (weights_file, file)
        path, file = self._file
        if path != weights_file:
            raise ValueError(f"this update loads from {path}; finish it before one that loads from {weights_file}")
        return file

    def finish_weight_update(self) -> None:
        if self._file is None:
            return
        _, file = self._file
        self._close()
        assert self._linears is not None
        self._linears.learn(self._loaded, file.get_tensor)

    def _close(self) -> None:
        """Put the layers back together. The file of an update that failed may have other bytes by now."""
        if self._file is None:
            return
        finalize_layerwise_reload(self.model, self.model_config)
        for method, kernel in self._expert_kernels.items():
            if method.moe_kernel is None:  # the weights of these experts did not arrive, so they are packed as before
                method.moe_kernel = kernel
        if getattr(self.model_config.hf_text_config, "tie_word_embeddings", False):
            self._share_packed_embedding()
        self._file = None
        give_back_if_scarce()  # memory of the load, and at first of vLLM's start

    def _take_expert_kernels(self) -> dict[Any, Any]:
        """Take the kernels away and return them. On the CPU vLLM packs experts' weights when it makes their kernel,
        and it makes one only where there is none. Elsewhere nothing is packed, and a captured graph needs its kernel.
        """
        if not current_platform.is_cpu():
            return {}
        methods = {module.quant_method for module in self.model.modules() if hasattr(module, "quant_method")}
        kernels = {method: method.moe_kernel for method in methods if getattr(method, "moe_kernel", None) is not None}
        for method in kernels:
            method.moe_kernel = None
        return kernels

    def _share_packed_embedding(self) -> None:
        """Give a tied head the embedding's packed weight. On the CPU a layer computes with a packed copy of its weight,
        made when the weight is loaded. A tied head's weight is loaded as the embedding's, which never uses its copy.
        """
        embeddings = [module for module in self.model.modules() if isinstance(module, VocabParallelEmbedding)]
        heads = [module for module in embeddings if isinstance(module, ParallelLMHead)]
        for head in heads:
            for embedding in embeddings:
                if embedding not in heads and embedding.weight is head.weight and hasattr(embedding, "cpu_linear"):
                    head.cpu_linear = embedding.cpu_linear

    def shutdown(self) -> None:
        pass


def register() -> None:
    """Register with vLLM. This entry point is called once or more in every vLLM process, a forked one included."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, FileWeightTransferEngine)
        ModelRegistry.register_model("MixtralForCausalLM", "services.rollout.engines.vllm_mixtral:MixtralForCausalLM")
        vllm_kernels.register()
    keep_causes()
    # This logger warns at every load about layers that no checkpoint holds (rotary tables, tied heads).
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
    if multiprocessing.current_process().name.startswith("EngineCore"):
        end_with_parent()
