"""Two gloo processes against one: sums, FSDP2, GAC, checkpoints. The checks are in distributed_worker.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from onbeat.config import OptimizerConfig
from services.trainer.checkpoints.store import CheckpointStore
from services.trainer.model.optimizer import MasterAdamW
from tests.integration.trainer.distributed_worker import CHECKS, STATE
from tests.trainer_fixtures import tiny_config, tiny_model

PROJECT = Path(__file__).parents[3]


def launch(folder: Path) -> str:
    """Run all checks on two ranks of this machine, one thread each; returns what they wrote. Ends with all of them.

    Tensors of 256 KiB and more are given back to the system when they are freed, so that a peak is of what is held.
    """
    worker = ["tests.integration.trainer.distributed_worker", ",".join(CHECKS), str(folder)]
    ranks = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", *worker],
        cwd=PROJECT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(256 << 10)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
    )
    return ranks.stdout


def train_alone(seed):
    optimizer = MasterAdamW(tiny_model(tiny_config(initializer_range=seed), torch.float32), OptimizerConfig())
    for gradient in optimizer.gradients().values():
        gradient.normal_()
    optimizer.step()
    return optimizer


@pytest.fixture(scope="module")
def checked(tmp_path_factory) -> tuple[Path, str]:
    """Run all checks in one launch, as starting takes longer than checking; return (folders, the ranks' output)."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "load_whole").mkdir()
    written_alone = train_alone(0.05).state_tensors()
    save_file(written_alone, folder / "load_whole" / "expected.safetensors")
    store = CheckpointStore(folder / "load_whole" / "checkpoints", keep=1)
    store.save(STATE, [], written_alone, {})
    store.wait()
    return folder, launch(folder)


@pytest.mark.parametrize("name", CHECKS)
def test_two_processes_equal_one(name, checked):
    folder, output = checked
    ranks = [0] if name == "a_lost_peer" else [0, 1]
    assert all((folder / f"{name}.rank{rank}.passed").exists() for rank in ranks), f"{name} or one before:\n{output}"


def test_one_process_reads_what_two_wrote(checked):
    folder, output = checked
    optimizer = train_alone(0.07)
    store = CheckpointStore(folder / "save_sharded" / "checkpoints", keep=1)
    state = store.restore("job", "tiny", optimizer.load_state_tensors)
    assert state == STATE, output
    expected = load_file(folder / "save_sharded" / "expected.safetensors")
    assert expected.keys() > optimizer.state_tensors().keys()  # GAC's history is there too
    for name, tensor in optimizer.state_tensors().items():
        assert torch.equal(tensor, expected[name]), name
    exported = load_file(store.path(3) / "model.safetensors")
    assert all(torch.equal(exported[name], expected[f"master.{name}"].bfloat16()) for name in exported)
