"""A checkpoint has the tensors of the source's files, by their names; and transformers reads what was trained."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import MixtralConfig

from services.trainer.checkpoints.store import CheckpointStore, TrainState, check
from services.trainer.model import exported_weights
from services.trainer.model.exported_weights import conversion
from services.trainer.model.lora import published_tensors
from services.trainer.model.model import load_model
from services.trainer.model.tensor_files import StoredWeights
from tests.architectures import CPU
from tests.exported import FAMILIES, logits_of, train_and_export, write_source
from tests.trainer_fixtures import tiny_config, tiny_model


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoint_is_the_model_that_was_trained(family, tmp_path):
    source = write_source(tmp_path / "source", family)
    (first, second), (_, trained_logits) = train_and_export(source, tmp_path / "checkpoints")
    weights, of_source = (load_file(folder / "model.safetensors") for folder in (first, source))
    assert weights.keys() == of_source.keys()
    assert all(torch.equal(weights[name], of_source[name]) for name in weights)
    assert torch.equal(logits_of(first), logits_of(source))
    assert (logits_of(second) - trained_logits).abs().max() < 1e-4 < (trained_logits - logits_of(source)).abs().max()


def test_tensors_that_are_those_of_the_files_are_not_copied(tmp_path):
    tiny_model(tiny_config(), torch.bfloat16).save_pretrained(tmp_path)
    assert conversion(load_model(str(tmp_path), torch.bfloat16, CPU)) is None


@pytest.mark.parametrize("is_sharded", [False, True])
def test_many_experts_are_written_in_several_files(is_sharded, tmp_path, monkeypatch):
    """Never all copies at once: each file is written before the tensors of the next one are made."""
    monkeypatch.setattr(exported_weights, "PART_BYTES", 10_000)
    source = tmp_path / "source"
    tiny_model(tiny_config(MixtralConfig, num_local_experts=2), torch.bfloat16).save_pretrained(source)
    model = load_model(str(source), torch.bfloat16, CPU)
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    state = TrainState("job", "tiny", next_iteration=1)
    store.save(state, published_tensors(model), {}, {}, is_sharded=is_sharded, convert=conversion(model))
    store.wait()
    assert check(store.path(1)) == state
    index = json.loads((store.path(1) / "model.safetensors.index.json").read_text())["weight_map"]
    written, expected = {}, load_file(source / "model.safetensors")
    for name in set(index.values()):
        written |= load_file(store.path(1) / name)
    assert len(set(index.values())) > 2
    assert index.keys() == written.keys() == expected.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
    assert StoredWeights.find(str(store.path(1))).files.keys() == expected.keys()
