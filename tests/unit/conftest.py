"""Unit tests compute on tensors too small to share: one thread, so that parallel work on the machine costs little."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2():
    """The tokenizer of the bundled model."""
    from transformers import AutoTokenizer

    from services.trainer.model.bundled import BUNDLED_MODELS, find_gguf

    package, file_name = BUNDLED_MODELS["smollm2-135m-instruct"]
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"the package {package} is not installed")
    gguf = find_gguf(Path(spec.origin).parent, file_name)
    return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
