"""vLLM plug-in: loads a policy's safetensors file into the model inside a vLLM worker process.

It is reached only through the `vllm.general_plugins` entry point, because workers are separate processes. The file is
checked before it gets here (weight_file); what is done here is the loading, and the repair of tied output heads.
It also ends vLLM's processes when ours is killed.
"""

import logging
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import dataclass

from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

BACKEND = "onbeat_safetensors"

# For the engine core to end its workers after the process that started it has died.
EXIT_GRACE_S = 10.0


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand: a file has no peer."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    weights_file: str  # absolute path, readable by the worker; complete weights under HF names


class FileWeightTransferEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """start -> receive (the whole file, once) -> finish. A load that fails in between leaves layers half restored,
    and the next one is refused: the layerwise loader would count the tensors it already has twice.
    """

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo
    supports_draft_weight_update = False
    _is_loading = False

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        if self._is_loading:
            raise RuntimeError("an earlier weight update failed half way; restart the engine")

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        with safe_open(update_info.weights_file, framework="pt") as tensors:  # mmap: pages are read as they are copied
            self._is_loading = True
            initialize_layerwise_reload(self.model)
            self.model.load_weights((name, tensors.get_tensor(name)) for name in tensors.keys())  # noqa: SIM118

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.model_config.hf_text_config.tie_word_embeddings:
            self._repack_tied_heads()
        self._is_loading = False

    def _repack_tied_heads(self) -> None:
        """On the CPU a head computes with a packed copy of its weight, and packs it when its weight is loaded. A tied
        head's weight is loaded as the embedding's, so nothing packs it again and it would stay the old policy's.
        """
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        pass


def register() -> None:
    """Entry point, called once or more in every vLLM process."""
    if BACKEND in WeightTransferEngineFactory._registry:
        return
    WeightTransferEngineFactory.register_engine(BACKEND, FileWeightTransferEngine)
    # It warns at every load of layers that a checkpoint never holds (rotary tables, tied heads).
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
    if multiprocessing.current_process().name.startswith("EngineCore"):
        threading.Thread(target=_exit_with_parent, name="exit-with-parent", daemon=True).start()


def _exit_with_parent() -> None:
    """vLLM's workers follow their engine core, but the core outlives a killed parent and would keep the device."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(EXIT_GRACE_S)
    os._exit(1)
