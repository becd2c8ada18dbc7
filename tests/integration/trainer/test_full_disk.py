"""A disk that is really full: what its writers raise then costs a checkpoint, and training goes on."""

import subprocess
from pathlib import Path

import pytest

from tests.trainer_fixtures import RecordedJob, job_config, recorded_iterations, train

SIZE_KIB = 700  # two checkpoints of the tiny model, and not a third


class CrampedJob(RecordedJob):
    """Checkpoints whose disk grows when a checkpoint has found no room."""

    disk: Path

    def emit(self, kind, message):
        super().emit(kind, message)
        subprocess.run(["mount", "-o", "remount,size=100m", str(self.disk)], check=True)


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_KIB}k", "none", str(folder)]
    if (mounted := subprocess.run(mount, capture_output=True, text=True)).returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_costs_a_checkpoint_and_not_the_job(tmp_path, small_disk):
    config = job_config(schedule={"num_iterations": 5}, checkpoint={"every_iterations": 1, "keep": 8})
    job = CrampedJob(config, recorded_iterations(5))
    job.disk = small_disk
    train(config, None, tmp_path, job=job)
    ((kind, message),) = job.events
    assert kind == "checkpoint.failed"
    assert "No space left on device" in message
    lost = int(message.partition("iteration-")[2][:6])
    assert 1 < lost < 5
    whole = {path.parent.name for path in small_disk.glob("iteration-*/state.json")}
    assert whole == {f"iteration-{number:06}" for number in range(1, 6) if number != lost}
    assert list(small_disk.glob(".*.partial")) == []
