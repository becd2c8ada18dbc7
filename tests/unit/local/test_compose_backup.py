"""`onbeat backup --compose` and `onbeat restore --compose` with a `docker` that only records how it is called."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest

from onbeat.contracts.states import JobState
from onbeat.local.archive import write_archive
from onbeat.local.resting import RecordedJob

Onbeat = Callable[..., str]
JOB = RecordedJob("job-1", "test", JobState.PAUSED, 2, 2, "/data/jobs/job-1/checkpoints/iteration-000002", "{}")
DOCKER = """#!/bin/sh
cd "$(dirname "$0")"
echo "$*" >> calls
case "$*" in
  *" ps "*) [ "$COMPOSE_PROFILES" = "*" ] && cat services ;;  # else a GPU's services would not be listed
  *"init show redis-admin-password") echo secret ;;
  *"redis --version") echo "Redis server v=7.2.4 sha=00000000:0" ;;
  *"storage backup") cat archive ;;
  *"storage restore "*) cat > received ;;
esac
case "$*" in
  *"storage $(cat fails)"*) printf 'Container redis Running\\nerror: said by storage\\n\\n' >&2; exit 1 ;;
esac
[ "$REDISCLI_AUTH" = secret ] && echo "$*" >> with_password
exit 0
"""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a `docker` on the PATH whose stack runs. Return the folder with what it answers and what it was asked."""
    folder = tmp_path / "docker"
    folder.mkdir()
    (folder / "docker").write_text(DOCKER, "utf-8")
    (folder / "docker").chmod(0o755)
    written = io.BytesIO()
    write_archive(written, [JOB], {"datasets/rows.jsonl": folder / "docker"})
    (folder / "archive").write_bytes(written.getvalue())
    (folder / "services").write_text("redis\nbroker\n", "utf-8")
    (folder / "fails").write_text("never", "utf-8")
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def calls(docker: Path, file: str = "calls") -> list[str]:
    return [line.removeprefix("compose ") for line in (docker / file).read_text("utf-8").splitlines()]


# ---- backup ----------------------------------------------------------------------------------------------------------


def test_archive_of_the_stack_is_written_whole(docker: Path, tmp_path: Path, onbeat: Onbeat) -> None:
    file = tmp_path / "b.tar"
    assert f"{file} is written: 1 job, " in onbeat("backup", file, "--compose")
    assert file.read_bytes() == (docker / "archive").read_bytes()
    assert file.stat().st_mode & 0o777 == 0o600
    assert calls(docker, "with_password") == calls(docker)[-1:]
    assert "secret" not in "".join(calls(docker))


def test_archive_that_is_cut_off_leaves_no_file(docker: Path, tmp_path: Path, onbeat: Onbeat) -> None:
    whole = (docker / "archive").read_bytes()
    (docker / "archive").write_bytes(whole[: whole.index(b"digests.json")] + bytes(1024))
    assert "is cut off: it has no digests.json at its end" in onbeat("backup", tmp_path / "b.tar", "--compose", code=1)
    assert [path.name for path in tmp_path.iterdir()] == ["docker"]


def test_sentence_of_the_container_is_the_error(docker: Path, tmp_path: Path, onbeat: Onbeat) -> None:
    (docker / "fails").write_text("backup", "utf-8")
    said = onbeat("backup", tmp_path / "b.tar", "--compose", code=1)
    assert said.splitlines() == ["error: said by storage"]
    assert [path.name for path in tmp_path.iterdir()] == ["docker"]


def test_backup_refuses_what_it_cannot_do(
    docker: Path, tmp_path: Path, onbeat: Onbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "b.tar"
    said = onbeat("backup", file, "--compose", "--data-dir", tmp_path, code=2)
    assert "--data-dir names a local stack, and --compose another one; leave one of them out" in said
    file.write_text("mine", "utf-8")
    assert f"{file} exists already; give another name" in onbeat("backup", file, "--compose", code=1)
    assert not (docker / "calls").exists()
    assert file.read_text("utf-8") == "mine"
    (docker / "services").write_text("broker\n", "utf-8")
    said = onbeat("backup", tmp_path / "c.tar", "--compose", code=1)
    assert "the stack's Redis does not run; start it (`docker compose up -d --wait redis`)" in said
    monkeypatch.setenv("PATH", str(docker))
    (docker / "docker").unlink()
    said = onbeat("backup", tmp_path / "c.tar", "--compose", code=1)
    assert "error: `docker`, which has the stack of compose, cannot be run: No such file or directory" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.tar", "docker"]


# ---- restore ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def idle(docker: Path) -> Path:
    """Let only the monitoring run."""
    (docker / "services").write_text("prometheus\ngrafana\n", "utf-8")
    return docker


def test_volumes_are_filled_and_the_ledger_is_checked(idle: Path, onbeat: Onbeat) -> None:
    file = idle / "archive"
    said = onbeat("restore", file, "--compose", "--replace")
    assert "compose's stack has 1 job again, 1 unfinished\ndocker compose up -d --wait continues them" in said
    assert (idle / "received").read_bytes() == file.read_bytes()
    asked, initialised, restored, *settled = calls(idle)[-7:]
    assert asked.endswith("redis --version")
    assert initialised.endswith(" init"), "the image of Redis would give an empty volume its own user again"
    version = "Redis server v=7.2.4 sha=00000000:0"
    assert restored.endswith(f"storage restore {file.stat().st_size} {version} --replace")
    assert settled[0] == "up --detach --wait redis"
    assert settled[2].endswith("storage settle 1")
    assert settled[3] == "stop redis"
    assert calls(idle, "with_password") == [settled[2]]


def test_redis_is_stopped_if_the_ledger_is_refused(idle: Path, onbeat: Onbeat) -> None:
    (idle / "fails").write_text("settle", "utf-8")
    assert "error: said by storage" in onbeat("restore", idle / "archive", "--compose", code=1)
    assert calls(idle)[-1] == "stop redis"


def test_damaged_archive_touches_no_volume(idle: Path, tmp_path: Path, onbeat: Onbeat) -> None:
    damaged = (idle / "archive").read_bytes().replace(b"cat services", b"cat Services")
    (tmp_path / "b.tar").write_bytes(damaged)
    said = onbeat("restore", tmp_path / "b.tar", "--compose", "--replace", code=1)
    assert "is damaged: datasets/rows.jsonl is not what was backed up" in said
    assert "cannot be restored" in onbeat("restore", tmp_path / "none.tar", "--compose", code=1)
    assert {line.split()[0] for line in calls(idle)} == {"ps"}


def test_restore_refuses_a_running_stack(docker: Path, tmp_path: Path, onbeat: Onbeat) -> None:
    said = onbeat("restore", docker / "archive", "--compose", code=1)
    assert "the stack runs (broker, redis); stop it first (`docker compose --profile '*' down`)" in said
    said = onbeat("restore", docker / "archive", "--replace", "--data-dir", tmp_path / "data", code=2)
    assert "--replace is for --compose; a data folder is never overwritten" in said
