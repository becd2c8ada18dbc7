"""Backups of compose's volumes, here three folders: what a local stack wrote is restored there, and the other way."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from onbeat.contracts.errors import OnbeatError
from onbeat.local import volumes as storage
from onbeat.local.backup import write_backup
from onbeat.local.redis_choice import choose_server, format_version
from onbeat.local.resting import read_jobs, resting_redis
from onbeat.local.restore import restore_backup, settle

pytestmark = pytest.mark.slow


@pytest.fixture
def volumes(tmp_path: Path) -> Path:
    for name in storage.NAMES:
        (tmp_path / "volumes" / name).mkdir(parents=True)
    return tmp_path / "volumes"


@pytest.fixture
def release(tmp_path: Path) -> str:
    release = choose_server(tmp_path / "none").release
    return f"{release.kind} server v={format_version(release.version)} sha=00000000:0\n"


def fill(volumes: Path, archive: Path, release: str, is_replacing: bool = False) -> None:
    with archive.open("rb") as source:
        storage.restore(volumes, source, archive.stat().st_size, release, is_replacing)


def files_of(volumes: Path) -> list[str]:
    return sorted(str(path.relative_to(volumes)) for path in volumes.rglob("*") if path.is_file())


@contextmanager
def lock_held(volumes: Path) -> Iterator[None]:
    folder = os.open(volumes / "trainer", os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    yield
    os.close(folder)


def test_backups_of_both_kinds_of_stacks_are_one_format(
    stopped: Path, backup: Path, volumes: Path, release: str, tmp_path: Path
) -> None:
    fill(volumes, backup, release)
    tensors = "jobs/job-paused/checkpoints/iteration-000002/optimizer/rank-00000-of-00001.safetensors"
    assert {f"trainer/{tensors}", "broker/datasets/rows.jsonl"} <= {*files_of(volumes)}
    assert not [name for name in files_of(volumes) if ".restoring" in name or name == "redis/server.json"]
    for leftover in ("trainer/.backup-dead", "broker/.restoring"):  # left by killed commands
        (volumes / leftover).mkdir()
    again = tmp_path / "again.tar"
    with resting_redis(volumes) as redis:
        with storage.data_folder(volumes) as folder:
            jobs = {job.id: job for job in settle(redis, 4, folder, storage.DATA_DIR)}
        named = {job.id: job.checkpoint for job in read_jobs(redis)}
        with again.open("wb") as output:
            storage.backup(volumes, redis, output)
    assert named["job-paused"] == "/data/jobs/job-paused/checkpoints/iteration-000002"
    assert named["job-fork"] == ""
    assert not list((volumes / "trainer").glob(".backup-*"))
    assert not (volumes / "broker" / ".restoring").exists()
    assert not list((volumes / "redis").glob("*.rdb"))
    local = restore_backup(again, tmp_path / "data")
    assert [(job.id, job.state) for job in local] == [(job.id, job.state) for job in jobs.values()]
    for name in (tensors, "datasets/rows.jsonl"):
        assert (tmp_path / "data" / name).read_bytes() == (stopped / name).read_bytes()


def test_volumes_that_hold_data_are_replaced_only_when_told(
    backup: Path, volumes: Path, release: str, tmp_path: Path
) -> None:
    (volumes / "broker" / "datasets").mkdir()
    fill(volumes, backup, release)  # an empty folder is no data
    (volumes / "broker" / "datasets" / "newer.jsonl").write_text("{}\n", "utf-8")
    before = files_of(volumes)
    with pytest.raises(OnbeatError, match="the volumes of redis and trainer and broker hold data already; --replace"):
        fill(volumes, backup, release)
    (tmp_path / "damaged.tar").write_bytes(backup.read_bytes().replace(b'{"prompt": "1"}', b'{"prompt": "2"}'))
    with pytest.raises(OnbeatError, match=r"the backup is damaged: datasets/rows.jsonl is not what was backed up"):
        fill(volumes, tmp_path / "damaged.tar", release, is_replacing=True)
    assert files_of(volumes) == before
    fill(volumes, backup, release, is_replacing=True)
    assert files_of(volumes) == [name for name in before if "newer" not in name]


def test_ledger_that_the_stack_s_redis_cannot_read_is_refused(backup: Path, volumes: Path) -> None:
    with pytest.raises(OnbeatError, match=r"has data of Redis .*, which Redis 6\.0\.1 cannot read; set ONBEAT_REDIS_"):
        fill(volumes, backup, "Redis server v=6.0.1 sha=00000000:0")
    with pytest.raises(OnbeatError, match="prints no version that is known: 'hello'"):
        fill(volumes, backup, "hello")
    assert files_of(volumes) == []


def test_second_backup_at_a_time_is_refused(backup: Path, volumes: Path, release: str) -> None:
    with lock_held(volumes), pytest.raises(OnbeatError, match="another backup or restore of this stack is running"):
        fill(volumes, backup, release)
    fill(volumes, backup, release)


def test_name_that_a_backup_would_lose_is_refused(volumes: Path) -> None:
    (volumes / "broker" / "logs").mkdir()
    with pytest.raises(OnbeatError, match=r"the broker's volume has 'logs'.*rename it"), storage.data_folder(volumes):
        pass


def test_ledger_without_all_its_jobs_is_refused(stopped: Path, tmp_path: Path) -> None:
    write_backup(stopped, tmp_path / "b.tar")
    with resting_redis(stopped) as redis, pytest.raises(OnbeatError, match="has 5 jobs, but its ledger 4"):
        settle(redis, 5, stopped, stopped)
