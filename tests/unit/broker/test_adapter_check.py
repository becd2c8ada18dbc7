"""The adapter that a job starts from is checked when the job is submitted, by its configuration and headers alone."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from onbeat.config import JobConfig
from services.broker.admission.adapter import review_adapter_to_train
from tests.world import job_body

Shapes = dict[str, tuple[int, ...]]
LAYER = "model.layers.1.self_attn.q_proj"
BASE: Shapes = {f"model.layers.{number}.self_attn.q_proj.weight": (24, 16) for number in range(2)}
ADAPTER = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": "/elsewhere/base"}


def write_tensors(path: Path, shapes: Shapes) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * shape[0] * shape[1]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def factors(layer: str = LAYER, size_out: int = 24, size_in: int = 16) -> Shapes:
    name = f"base_model.model.{layer}.lora_"
    return {f"{name}A.weight": (4, size_in), f"{name}B.weight": (size_out, 4)}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 2}', encoding="utf-8")
    write_tensors(folder / "model.safetensors", BASE)
    return folder


def write_adapter(folder: Path, shapes: Shapes, **options: Any) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(ADAPTER | options), encoding="utf-8")
    write_tensors(folder / "adapter_model.safetensors", shapes)
    return folder


def complaints(path: object, adapter: object, has_model_folders: bool = True) -> list[tuple[str, str]]:
    model = {"path": str(path), "adapter": str(adapter)}
    job = JobConfig.model_validate(job_body(model=model, lora={"rank": 4, "alpha": 8.0}))
    return review_adapter_to_train(job, has_model_folders)


@pytest.mark.parametrize(
    ("shapes", "options", "sentence"),
    [
        (factors(), {"r": 8}, "has r = 8, and lora.rank is 4; set lora.rank to that"),
        (factors(), {"peft_type": "IA3"}, "is an adapter of the type IA3, and only LORA is trained"),
        (
            factors("model.layers.2.self_attn.q_proj"),
            {},
            "is an adapter of another model: it adapts model.layers.2.self_attn.q_proj, and {base} has 2 layers",
        ),
        (
            factors(size_out=40),
            {},
            f"is an adapter of another model: it adapts {LAYER} as a weight of the shape (40, 16), and {{base}} has "
            "(24, 16)",
        ),
    ],
)
def test_adapter_of_another_model_is_refused_in_a_sentence(tmp_path, base, shapes, options, sentence):
    folder = write_adapter(tmp_path / "adapter", shapes, **options)
    assert complaints(base, folder) == [("model.adapter", f"{folder} {sentence.format(base=base)}")]
    assert complaints(base, folder, has_model_folders=False) == []


def test_adapter_of_another_hub_model_is_refused(tmp_path):
    folder = write_adapter(tmp_path / "adapter", factors(), base_model_name_or_path="org/other")
    ((_, message),) = complaints("org/base", folder)
    assert message == f"{folder} is an adapter of org/other, and model.path is org/base; give one of that model"


@pytest.mark.parametrize("damage", ["no folder", "no weights", "torn weights", "torn configuration"])
def test_adapter_that_cannot_be_read_is_refused(tmp_path, base, damage):
    folder = tmp_path / "adapter"
    if damage != "no folder":
        write_adapter(folder, factors())
    name = "adapter_config.json" if damage == "torn configuration" else "adapter_model.safetensors"
    if damage.startswith("torn"):
        (folder / name).write_bytes((folder / name).read_bytes()[:20])
    if damage == "no weights":
        (folder / name).unlink()
    ((field, message),) = complaints(base, folder)
    assert field == "model.adapter"
    assert message.startswith(f"{folder} cannot be read (")
    assert message.endswith("; give a folder that `save_pretrained` of PEFT wrote")


@pytest.mark.parametrize(
    "shapes",
    [
        factors(),
        factors(size_out=16, size_in=24),  # a layer of GPT-2 keeps its weight transposed
        factors("base.text.layers.1.self_attn.q_proj"),  # another prefix than in the file
        factors("model.layers.1.mlp.experts.gate", 3, 5),  # a name that the file does not have
    ],
)
def test_adapter_that_may_fit_is_left_to_the_trainer(tmp_path, base, shapes):
    assert complaints(base, write_adapter(tmp_path / "adapter", shapes)) == []


def test_check_needs_no_torch():
    program = "import sys, services.broker.admission.review; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
