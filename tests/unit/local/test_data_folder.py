"""Backups, restoring and cleaning of a data folder whose stack is stopped; the Redis is real."""

import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from onbeat.contracts.errors import OnbeatError
from onbeat.local.backup import ledger_files, write_backup
from onbeat.local.clean import clean
from onbeat.local.redis_choice import Release, read_record
from onbeat.local.resting import read_jobs, resting_redis
from onbeat.local.restore import restore_backup
from onbeat.local.state import StackLock
from onbeat.process.stacks import StackState

pytestmark = pytest.mark.slow


def test_restored_folder_has_the_jobs_and_names_its_own_paths(
    stopped: Path, backup: Path, tmp_path: Path, onbeat: Callable[..., str]
) -> None:
    data_dir = tmp_path / "new" / "data"
    assert f"{data_dir} has 4 jobs again, 2 unfinished" in onbeat("restore", backup, "--data-dir", data_dir)
    with resting_redis(data_dir) as redis:
        jobs = {job.id: job for job in read_jobs(redis)}
    checkpoint = Path(jobs["job-paused"].checkpoint)
    assert checkpoint == data_dir / "jobs" / "job-paused" / "checkpoints" / "iteration-000002"
    tensors = "optimizer/rank-00000-of-00001.safetensors"
    assert (checkpoint / tensors).read_bytes() == bytes([2]) * 100_000
    assert (data_dir / "datasets" / "rows.jsonl").read_bytes() == (stopped / "datasets" / "rows.jsonl").read_bytes()
    assert not list(data_dir.rglob("*.partial")), "an unfinished checkpoint came along"
    assert backup.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in data_dir.parent.iterdir()] == ["data"]
    assert not list(stopped.glob(".backup-*"))
    assert not list((stopped / "redis").glob("*.rdb"))


def test_nothing_is_overwritten(stopped: Path, backup: Path, onbeat: Callable[..., str]) -> None:
    before = backup.read_bytes()
    said = onbeat("backup", backup, "--data-dir", stopped, code=1)
    assert f"{backup} exists already; give another name, a backup overwrites nothing" in said
    said = onbeat("restore", backup, "--data-dir", stopped, code=1)
    assert f"{stopped} is not empty, and nothing is overwritten; name a new folder with --data-dir" in said
    assert backup.read_bytes() == before
    assert "there is nothing to back up" in onbeat("backup", "b.tar", "--data-dir", stopped.parent / "none", code=1)


def test_damaged_backups_are_refused_whole(backup: Path, tmp_path: Path) -> None:
    whole = backup.read_bytes()
    with tarfile.open(backup) as archive:
        names = {entry.name: entry for entry in archive}
    tensors = names["jobs/job-paused/checkpoints/iteration-000002/optimizer/rank-00000-of-00001.safetensors"]
    changed = bytearray(whole)
    changed[tensors.offset_data + 5_000] ^= 1
    at_digests = names["digests.json"].offset
    cases = {
        bytes(changed): f"is damaged: {tensors.name} is not what was backed up; take another backup",
        whole[:at_digests] + bytes(1024): "is cut off: it has no digests.json at its end",
        whole[: tensors.offset_data + 500]: "unexpected end of data",
        b"something else": "is no backup of Onbeat",
        whole.replace(b'"format": 1', b'"format": 9'): "has format 9, this version reads 1",
    }
    for content, reason in cases.items():
        (tmp_path / "wrong.tar").write_bytes(content)
        with pytest.raises(OnbeatError, match=reason):
            restore_backup(tmp_path / "wrong.tar", tmp_path / "data")
        assert [path.name for path in tmp_path.iterdir()] == ["wrong.tar"]


def test_names_outside_the_folder_are_refused(backup: Path, tmp_path: Path) -> None:
    with tarfile.open(backup) as source, tarfile.open(tmp_path / "evil.tar", "w") as target:
        header = source.getmember("backup.json")
        target.addfile(header, source.extractfile(header))
        target.addfile(tarfile.TarInfo("../outside"))
    with pytest.raises(OnbeatError, match=r"'../outside', which is no file of a data folder; nothing was restored"):
        restore_backup(tmp_path / "evil.tar", tmp_path / "data")
    assert [path.name for path in tmp_path.iterdir()] == ["evil.tar"]


def test_backup_of_a_job_without_its_checkpoint_is_refused(stopped: Path, tmp_path: Path) -> None:
    folder = stopped / "jobs" / "job-paused" / "checkpoints"
    folder.rename(folder.with_name("elsewhere"))
    try:
        with pytest.raises(
            OnbeatError, match="job-paused goes on from its checkpoint after 2 iterations, which is not"
        ):
            write_backup(stopped, tmp_path / "b.tar")
    finally:
        folder.with_name("elsewhere").rename(folder)
    assert list(tmp_path.iterdir()) == []


def test_ledger_of_a_newer_redis_is_the_base_of_its_file(tmp_path: Path) -> None:
    """Redis 7 reads a manifest and a base, as docs/kubernetes.md restores them by hand."""
    files = ledger_files(Release("Redis", (7, 2, 4)), tmp_path / "dump.rdb", tmp_path)
    base = "redis/appendonlydir/appendonly.aof.1.base.rdb"
    assert files.pop(base) == tmp_path / "dump.rdb"
    manifest = files.pop("redis/appendonlydir/appendonly.aof.manifest")
    assert manifest.read_text("utf-8") == "file appendonly.aof.1.base.rdb seq 1 type b\n"
    assert list(files) == ["redis/server.json"]
    assert read_record(tmp_path) == Release("Redis", (7, 2, 4))


# ---- clean -------------------------------------------------------------------------------------------------------


def test_clean_removes_what_is_named_and_nothing_that_is_needed(
    backup: Path, tmp_path: Path, onbeat: Callable[..., str]
) -> None:
    data_dir = tmp_path / "data"
    restore_backup(backup, data_dir)
    place = ("--data-dir", data_dir)
    (data_dir / "torchinductor").mkdir()
    (data_dir / "torchinductor" / "kernel").write_bytes(b"1" * 2_500)
    shown = onbeat("clean", *place).splitlines()
    assert any(line.split()[:3] == ["caches", "2.5", "kB"] for line in shown), shown
    assert any(line.startswith("-") and "job-paused (test, PAUSED)" in line for line in shown), shown
    assert "nothing was removed; --yes removes it" in onbeat("clean", "caches", *place, code=2)
    assert "job job-paused is not over" in onbeat("clean", "job-paused", "--yes", *place, code=2)
    assert "job job-parent is not over, or another job starts" in onbeat("clean", "job-parent", *place, code=2)
    assert "there is no 'cache' to remove; did you mean caches?" in onbeat("clean", "cache", *place, code=2)
    assert (data_dir / "torchinductor" / "kernel").exists()
    assert "removed " in onbeat("clean", "caches", "checkpoints", "--yes", *place)
    kept = {path.parents[2].name for path in data_dir.glob("jobs/*/checkpoints/*/state.json")}
    assert kept == {"job-paused", "job-parent"}
    assert not (data_dir / "torchinductor").exists()
    with resting_redis(data_dir) as redis:
        assert {job.id: bool(job.checkpoint) for job in read_jobs(redis)}["job-over"] is False
    lock = StackLock(data_dir)
    try:
        assert "is just starting or ending" in onbeat("clean", "logs", "--yes", *place, code=1)
        lock.write(StackState(os.getpid(), "up", "http://127.0.0.1:1", "redis://127.0.0.1:1", 0.0))
        with pytest.raises(OnbeatError, match=r"a stack of `onbeat up` runs in .*; stop it first"):
            clean(data_dir, ["logs"])
    finally:
        lock.release()
