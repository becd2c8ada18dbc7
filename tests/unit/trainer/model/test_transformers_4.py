"""Checkpoints that transformers 4 reads as 5 does: the same logits, token ids and prompts.

Version 4 is in a folder of its own (requirements/transformers4.lock), with the PyTorch of this environment.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from services.prompts.tokenizer import load_tokenizer
from services.trainer.model.bundled import resolve_model
from services.trainer.model.exported_files import exported_files
from services.trainer.settings import Settings
from tests.exported import FAMILIES, PROMPT, logits_of, train_and_export, write_source
from tests.installed import install_lock

pytestmark = pytest.mark.rare

ROOT = Path(__file__).parents[4]
CHAT = [{"role": "user", "content": "2 + 2?"}]
READ = """
import json, sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer, __version__

assert __version__.startswith("4."), __version__
prompt, chat, folders = torch.tensor(json.loads(sys.argv[1])), json.loads(sys.argv[2]), sys.argv[3:]
for folder in folders:
    options = {"attn_implementation": "eager", "output_loading_info": True}
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    with torch.no_grad():
        torch.save(model.eval()(input_ids=prompt).logits, folder + "/logits.pt")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
    print(json.dumps({"ids": rendered["input_ids"], "eos": tokenizer.eos_token, "inputs": sorted(rendered)}))
"""


def read_with_4(folders: list[Path]) -> list[dict]:
    """Return what version 4 makes of a chat in each folder, and write its logits of the prompt beside the model."""
    packages = install_lock(ROOT / "requirements/transformers4.lock")
    environment = os.environ | {"PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", READ, json.dumps(PROMPT.tolist()), json.dumps(CHAT), *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def export_bundled(folder: Path) -> list[Path]:
    """Write what a checkpoint of the quick start has beside its weights, and link those of version 0."""
    source = Path(resolve_model("bundled:smollm2-135m-instruct", Settings().cache_dir))
    folder.mkdir()
    for name, content in exported_files(str(source), torch.bfloat16).items():
        (folder / name).write_bytes(content)
    (folder / "model.safetensors").symlink_to(source / "model.safetensors")
    return [folder]


def test_transformers_4_reads_what_was_trained(tmp_path):
    """Also the quick start's model, which transformers 5 converts: its names alone mean a base of 10,000 to version 4.

    One process reads all folders: to import PyTorch takes longer than to read a tiny model.
    """
    folders = export_bundled(tmp_path / "bundled")
    for family in FAMILIES:
        source = write_source(tmp_path / family / "source", family)
        folders += train_and_export(source, tmp_path / family / "checkpoints")[0]
    for folder, chat in zip(folders, read_with_4(folders), strict=True):
        gap = (torch.load(folder / "logits.pt", weights_only=True) - logits_of(folder)).abs().max()
        assert gap < 1e-3, f"{folder}: {gap}"
        tokenizer = load_tokenizer(folder)
        expected = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)
        assert (chat["ids"], chat["eos"]) == (expected["input_ids"], tokenizer.eos_token), folder
        assert chat["inputs"] == sorted(expected), folder
