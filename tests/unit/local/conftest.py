"""A stopped stack with jobs of several states, its backup, and the command line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from onbeat.cli import main
from onbeat.local.backup import write_backup
from onbeat.local.resting import resting_redis
from onbeat.streams.keys import ALL_JOBS, JobKeys


def write_checkpoint(data_dir: Path, job_id: str, number: int) -> Path:
    folder = data_dir / "jobs" / job_id / "checkpoints" / f"iteration-{number:06d}"
    (folder / "optimizer").mkdir(parents=True)
    (folder / "optimizer" / "rank-00000-of-00001.safetensors").write_bytes(bytes([number]) * 100_000)
    (folder / "state.json").write_text("{}", "utf-8")
    return folder


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the data folder of a stopped stack with a paused job, its finished parent, and one that was deleted."""
    data_dir = tmp_path_factory.mktemp("stopped") / "data"
    jobs = {"job-over": ("SUCCEEDED", 4), "job-paused": ("PAUSED", 2), "job-parent": ("CANCELLED", 1)}
    with resting_redis(data_dir) as redis:
        for number, (job_id, (state, done)) in enumerate(jobs.items()):
            folder = write_checkpoint(data_dir, job_id, done)
            record = {"name": "test", "state": state, "next_iteration": done, "checkpoint_iteration": done}
            redis.hset(JobKeys(job_id).job, mapping=record | {"checkpoint": str(folder), "config": "{}"})
            redis.zadd(ALL_JOBS, {job_id: number})
        fork = json.dumps({"fork": {"job": "job-parent", "iteration": 1}})
        record = {"name": "fork", "state": "PENDING", "next_iteration": 1, "config": fork}
        redis.hset(JobKeys("job-fork").job, mapping=record)
        redis.zadd(ALL_JOBS, {"job-fork": 9})
    write_checkpoint(data_dir, "job-deleted", 7)
    (data_dir / "datasets").mkdir()
    (data_dir / "datasets" / "rows.jsonl").write_text('{"prompt": "1"}\n', "utf-8")
    (data_dir / "jobs" / "job-over" / "checkpoints" / ".iteration-000005.1.partial").mkdir()
    (data_dir / "jobs" / "job-over" / "checkpoints" / ".iteration-000005.1.partial" / "half").write_bytes(b"1" * 9)
    return data_dir


@pytest.fixture(scope="module")
def backup(stopped: Path) -> Path:
    file = stopped.parent / "backup.tar"
    write_backup(stopped, file)
    return file


@pytest.fixture
def onbeat(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    def run(*arguments: object, code: int = 0) -> str:
        monkeypatch.setattr("sys.argv", ["onbeat", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        assert (ended.value.code or 0) == code, printed
        return printed.out + printed.err

    return run
