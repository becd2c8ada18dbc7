"""Checkpoints in which vLLM computes the log-probabilities that the trainer does.

It is vLLM as others have it: without the plug-ins of Onbeat.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from onbeat.config import LoraConfig
from tests.exported import PROMPT, train_and_export
from tests.tiny_models import write_mixtral_model, write_qwen3_moe_model, write_tied_model, write_untied_model

pytestmark = pytest.mark.rare

READ = """
import json, sys
from vllm import LLM, SamplingParams

prompt = json.loads(sys.argv[1])
for folder in sys.argv[2:]:
    model = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=1)
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (done,) = model.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    logprobs = [place[token].logprob for place, token in zip(done.prompt_logprobs[1:], prompt[1:], strict=True)]
    with open(folder + "/logprobs.json", "w") as file:
        json.dump(logprobs, file)
    del model
"""
PLAIN = {
    "VLLM_PLUGINS": "",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
KINDS: dict[str, tuple[Callable[[Path], Path], LoraConfig | None]] = {
    "tied head": (write_tied_model, None),
    "separate head, biases": (write_untied_model, None),
    "experts, one by one": (partial(write_qwen3_moe_model, has_hub_names=True), None),
    "experts with other names": (partial(write_mixtral_model, has_hub_names=True), None),
    "adapters on a mixture": (partial(write_qwen3_moe_model, has_hub_names=True), LoraConfig(rank=4, alpha=8.0)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_vllm_reads_what_was_trained(tmp_path: Path, kind: str) -> None:
    """It reads version 0, and what an update made of it."""
    write, lora = KINDS[kind]
    folders, trained = train_and_export(write(tmp_path / "source"), tmp_path / "checkpoints", lora)
    command = [sys.executable, "-c", READ, json.dumps(PROMPT[0].tolist()), *map(str, folders)]
    environment = os.environ | PLAIN
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    computed = []
    for folder, logits in zip(folders, trained, strict=True):
        computed.append(torch.tensor(json.loads((folder / "logprobs.json").read_text(encoding="utf-8"))))
        expected = logits[0, :-1].log_softmax(-1).gather(-1, PROMPT[0, 1:, None])[:, 0]
        torch.testing.assert_close(computed[-1], expected, rtol=0, atol=1e-4)
    assert (computed[0] - computed[1]).abs().max() > 0.01  # the update shows
