"""A real job on a disk that is really full: it is reported, costs a checkpoint, and the job goes on."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from onbeat.types import JobState
from tests.e2e.stack import running, tiny_job
from tests.waiting import wait_until

SIZE_MB = 12  # four checkpoints of the tiny model, and not what the job keeps of them


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Where the trainer has its jobs' checkpoints; the ledger and the logs are elsewhere."""
    folder = tmp_path / "data" / "jobs"
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MB}m", "none", str(folder)]
    if (mounted := subprocess.run(mount, capture_output=True, text=True)).returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_costs_a_checkpoint_and_not_the_job(tmp_path: Path, small_disk: Path) -> None:
    with running(tmp_path) as stack:
        checkpoint = {"every_iterations": 1, "keep": 8}
        job = tiny_job(tmp_path, schedule={"num_iterations": 12}, checkpoint=checkpoint)
        job_id = stack.client.jobs.create(job).id

        def complete() -> list[Path]:
            return sorted(small_disk.glob("*/checkpoints/iteration-*/state.json"))

        wait_until(lambda: bool(stack.events(job_id, "checkpoint.failed")), "the disk is full")
        before = complete()
        assert before, "those that found room are whole"
        assert stack.job(job_id).state is JobState.RUNNING
        (warning,) = stack.events(job_id, "job.warning")
        assert str(small_disk / job_id / "checkpoints") in warning.message
        failure = stack.events(job_id, "checkpoint.failed")[0].message
        assert "No space left on device" in failure
        subprocess.run(["mount", "-o", "remount,size=100m", str(small_disk)], check=True)
        assert stack.wait(job_id).state is JobState.SUCCEEDED, stack.job(job_id).error
        assert complete()[-1].parent.name == "iteration-000012"
        assert stack.client.jobs.audit(job_id).is_clean
        assert list(small_disk.glob("*/checkpoints/.*.partial")) == []
