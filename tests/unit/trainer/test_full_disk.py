"""A full disk costs a checkpoint, not the job; the last one is waited for; short space is a warning at the start."""

import errno
import re
import shutil
from types import SimpleNamespace

import pytest
import torch

from onbeat.contracts.errors import JobFailed
from onbeat.machine.disk_space import GB
from services.trainer.checkpoints import saver
from services.trainer.checkpoints import store as checkpoint
from services.trainer.checkpoints.saver import checkpoint_bytes, shortage_warning
from services.trainer.checkpoints.store import CheckpointStore
from services.trainer.job.interface import JobCancelled
from services.trainer.policy import Policy
from tests.trainer_fixtures import (
    RecordedJob,
    job_config,
    make_group,
    recorded_iterations,
    tiny_model,
    train,
)

EVERY = {"every_iterations": 1}


@pytest.fixture
def full_disk(monkeypatch):
    """Call it with the checkpoints (by next iteration) that find no room once they are half written, and how often."""
    write, left = checkpoint.write_content, {}

    def write_if_room(partial, content, *place):
        files = write(partial, content, *place)
        if left.get(content.state.next_iteration, 0) > 0:
            left[content.state.next_iteration] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return files

    monkeypatch.setattr(checkpoint, "write_content", write_if_room)
    monkeypatch.setattr(saver, "RETRY_S", 0.01)
    return left


@pytest.mark.parametrize(
    ("failures", "written", "left_out", "first_kept"),
    [
        ({1: 1}, [(0, 2), (2, 3), (3, 4)], [1], [0]),
        ({2: 1, 3: 1}, [(0, 1), (1, 4)], [2, 3], [1, 1]),
        ({1: 1, 2: 3, 3: 1}, [(0, 2), (2, 4)], [1, 3], [0, 2]),  # the second is waited for: it is the first on disk
    ],
    ids=["one", "two in a row", "until the first is there"],
)
def test_checkpoint_without_disk_space_is_left_out_and_reported(
    failures, written, left_out, first_kept, tmp_path, full_disk
):
    full_disk.update(failures)
    config = job_config(checkpoint=EVERY, schedule={"num_iterations": 4})
    _, job = train(config, recorded_iterations(4), tmp_path)
    assert [(first, after) for first, after, _ in job.checkpoints] == written
    assert {kind for kind, _ in job.events} == {"checkpoint.failed"}
    assert all("No space left on device" in message for _, message in job.events)
    goes_on = [message for _, message in job.events if "training goes on without it" in message]
    for message, number, kept in zip(goes_on, left_out, first_kept, strict=True):
        assert f"iteration-00000{number} cannot be written: " in message
        assert f"until the next one the groups from iteration {kept} on stay in Redis" in message
    assert len(list((tmp_path / "checkpoints").iterdir())) == config.checkpoint.keep


def test_job_does_not_run_long_on_a_disk_without_checkpoints(tmp_path, full_disk):
    full_disk.update({1: 99, 2: 99})
    config = job_config(checkpoint=EVERY, schedule={"num_iterations": 4})
    job = RecordedJob(config, recorded_iterations(4))
    with pytest.raises(JobFailed, match="iteration-000002 cannot be written"):
        train(config, recorded_iterations(4), tmp_path, job=job)
    assert job.iterations == [0, 1]
    assert [kind for kind, _ in job.events] == ["checkpoint.failed"] * 2
    assert "it is the first one and tried again" in job.events[1][1]


def test_first_checkpoint_of_a_fork_is_waited_for(tmp_path, full_disk):
    train(job_config(schedule={"num_iterations": 1}), recorded_iterations(1), tmp_path / "jobs" / "job")
    full_disk.update({2: 1, 3: 2})
    config = job_config(fork={"job": "job", "iteration": 1}, checkpoint=EVERY, schedule={"num_iterations": 4})
    job = train(config, recorded_iterations(4)[4:], tmp_path).job
    assert [(first, after) for first, after, _ in job.checkpoints] == [(1, 3), (3, 4)]
    assert "it is the first one and tried again" in job.events[1][1]


def test_the_last_checkpoint_waits_for_room(tmp_path, full_disk):
    full_disk[3] = 4
    _, job = train(job_config(), recorded_iterations(), tmp_path)
    assert [(first, after) for first, after, _ in job.checkpoints] == [(0, 3)]
    ((kind, message),) = job.events
    assert kind == "checkpoint.failed"
    assert "it is the last one and tried again" in message
    assert re.fullmatch(r"waiting for disk space: .*No space left.*\(try 5 of 20 in 0 s\)", job.doings[-2])


def test_last_checkpoint_is_tried_several_times_then_job_fails(tmp_path, full_disk):
    full_disk[3] = 99
    with pytest.raises(JobFailed, match=r"iteration-000003 cannot be written: .*No space left on device; free disk"):
        train(job_config(), recorded_iterations(), tmp_path)
    assert full_disk[3] == 99 - saver.NUM_TRIES
    assert list((tmp_path / "checkpoints").iterdir()) == [], "what was half written gives its room back"


def test_stopped_job_without_its_checkpoint_promises_no_more(tmp_path, full_disk):
    full_disk[2] = 1
    config = job_config(schedule={"stop_without_signal": 2}, checkpoint={"every_iterations": 3})
    groups = [make_group(f"{t}-{i}", version=t, rewards=[0, 0, 0]) for t in range(2) for i in range(4)]
    with pytest.raises(JobFailed, match=r"stopped after 2 iterations.*could not be written.* check the disk"):
        train(config, groups, tmp_path)


def test_whoever_waits_for_room_can_be_cancelled(tmp_path, full_disk, monkeypatch):
    full_disk[3] = 99
    monkeypatch.setattr(saver, "RETRY_S", 60.0)

    def check(job):
        if job.events:
            raise JobCancelled

    monkeypatch.setattr(RecordedJob, "check", check)
    with pytest.raises(JobCancelled):
        train(job_config(), recorded_iterations(), tmp_path)


# ---- room, at the start --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sections",
    [{}, {"gac": {"mode": "off"}}, {"schedule": {"mode": "bounded", "max_staleness": 1, "num_iterations": 3}}],
    ids=["periodic", "without gac", "bounded"],
)
def test_the_size_of_a_checkpoint_is_known_before_the_first(tmp_path, sections):
    config = job_config(checkpoint=EVERY, **sections)
    groups = recorded_iterations()
    estimate = checkpoint_bytes(Policy.create(tiny_model(dtype=torch.float32), config), config)
    train(config, groups, tmp_path)
    files = (tmp_path / "checkpoints" / "iteration-000003").rglob("*.safetensors")
    assert sum(path.stat().st_size for path in files) == pytest.approx(estimate, rel=0.1)


def test_low_disk_space_is_reported_with_free_and_needed_bytes(tmp_path, monkeypatch):
    policy = Policy.create(tiny_model(), job_config())
    size = 2 * GB
    monkeypatch.setattr(saver, "checkpoint_bytes", lambda policy, config: size)
    store = CheckpointStore(tmp_path / "job" / "checkpoints", keep=2)

    def warning(free, **schedule):
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
        return shortage_warning(store, policy, job_config(schedule={"num_iterations": 3, **schedule}, checkpoint=EVERY))

    assert warning(3 * size) == ""
    message = warning(3 * size - GB)
    assert f"{store.folder} has 5.0 GB free" in message
    assert "checkpoints (at most 3 of 2.0 GB at a time) need 6.0 GB; free disk space" in message
    assert warning(2 * size, num_iterations=2) == "", "there are only two"
    (store.folder / "iteration-000001").mkdir(parents=True)
    (store.folder / "iteration-000001" / "state.json").write_text("{}")
    with (store.folder / "iteration-000001" / "weights").open("wb") as sparse:
        sparse.truncate(size)
    assert warning(2 * size) == "", "one of them is there already"
    assert warning(2 * size - 1e8) != ""
