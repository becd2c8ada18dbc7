"""vLLM and the tokenizer's library are never imported by two threads at once."""

import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from services.rollout.engines.imports import IMPORTING
from services.rollout.engines.vllm_engine import import_vllm
from services.rollout.prompts import PromptEncoder


class NoTokenizer:
    @classmethod
    def from_pretrained(cls, *_: object, **__: object) -> None:
        raise OSError("no such model")


def load_nothing() -> None:
    with pytest.raises(OSError, match="no such model"):
        PromptEncoder.load(Path("nowhere"), None)


@pytest.mark.parametrize("work", [import_vllm, load_nothing])
def test_a_large_import_waits_for_the_other_one(monkeypatch: pytest.MonkeyPatch, work) -> None:
    for name in (
        "vllm",
        "vllm.v1",
        "vllm.v1.engine",
        "vllm.v1.engine.async_llm",
        "services.rollout.engines.weight_transfer",
    ):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    # At once, so that only the lock makes it wait.
    monkeypatch.setitem(
        sys.modules, "transformers", SimpleNamespace(AutoTokenizer=NoTokenizer, PreTrainedTokenizerFast=NoTokenizer)
    )
    ended = threading.Event()
    thread = threading.Thread(target=lambda: (work(), ended.set()), daemon=True)
    with IMPORTING:
        thread.start()
        assert not ended.wait(0.3), "it did not wait"
    assert ended.wait(60)
