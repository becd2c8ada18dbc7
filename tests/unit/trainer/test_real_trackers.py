"""W&B, MLflow and Trackio themselves, offline: two trainers in turn leave one run with each point and table once."""

import json
import os
import sqlite3
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.installed import install_lock
from tests.trainer_fixtures import job_config

pytestmark = pytest.mark.rare

ROOT = Path(__file__).parents[3]
LOG = """
import importlib, sys
from onbeat.config import JobConfig
from services.trainer.trackers.points import Point
from services.trainer.trackers.samples import Row

config = JobConfig.model_validate_json(sys.stdin.read())
library = importlib.import_module("services.trainer.trackers." + config.tracking[0].type)
for steps, has_succeeded in ((range(3), None), (range(3, 5), True)):
    run = library.Run(config.tracking[0], config, "job-1")
    points = [Point(step, 1000.0 + step, {"iteration/reward_mean": step / 8}) for step in steps]
    points.append(Point(max(steps), 1010.0, {"eval/reward_mean": max(steps) / 4}, is_evaluation=True))
    for point in points:
        run.log(point)
        run.log_samples(point, [Row(point.step, "2 + 2", 'is\\n"4", | <b>', 0.5, False, "answer 1")] * 2)
    run.finish(has_succeeded)
"""
READ_WANDB = """
import json, sys
from pathlib import Path

from wandb.proto import wandb_internal_pb2

for line in sys.stdin:
    record = wandb_internal_pb2.Record()
    record.ParseFromString(bytes.fromhex(line))
    items = record.history.item
    values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
    for name, value in values.items():
        if name.endswith("/path"):
            (file,) = Path("wandb").glob("offline-run-*/files/" + value)
            name, value = name.removesuffix("/path"), json.loads(file.read_text(encoding="utf-8"))["data"]
        elif not name.endswith("/reward_mean"):
            continue
        print(json.dumps([name, int(values.get("eval/after_iterations", record.history.step.num)), value]))
"""
READ_MLFLOW = """
import csv, json
from pathlib import Path
from mlflow.tracking import MlflowClient

client = MlflowClient()
(run,) = client.search_runs([client.get_experiment_by_name("onbeat").experiment_id])
assert run.info.status == "FINISHED"
assert run.data.params["schedule.num_iterations"] == "3"
for name in ("iteration/reward_mean", "eval/reward_mean"):
    for metric in client.get_metric_history(run.info.run_id, name):
        print(json.dumps([name, metric.step, metric.value]))
for name in ("samples/training", "samples/evaluation"):
    for file in client.list_artifacts(run.info.run_id, name):
        text = Path(client.download_artifacts(run.info.run_id, file.path)).read_text(encoding="utf-8")
        columns, *rows = csv.reader(text.splitlines(keepends=True))
        assert columns == ["iteration", "prompt", "response", "reward", "is_truncated", "reward_parts"]
        print(json.dumps([name, int(Path(file.path).stem), rows]))
"""
HEADER_BYTES, BLOCK_BYTES = 7, 32_768  # W&B's file is a log of LevelDB, with a header as long as that of a record


class Library:
    """A Python with the packages of the lock, in a folder of its own, without a network."""

    def __init__(self, folder: Path) -> None:
        self.folder, packages = folder, install_lock(ROOT / "requirements/trackers.lock")
        offline = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(folder / "trackio"), "MLFLOW_ALLOW_FILE_STORE": "true"}
        offline |= {"MLFLOW_TRACKING_URI": f"file://{folder}/mlruns", "HF_HUB_OFFLINE": "1"}
        self._environment = os.environ | offline | {"PYTHONPATH": f"{packages}{os.pathsep}{ROOT}"}

    def run(self, program: str, given: str = "") -> list[str]:
        """Run the program, and return the lines that it prints."""
        options = {"cwd": self.folder, "env": self._environment, "input": given, "timeout": 120}
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, **options)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()


def read_wandb(library: Library) -> list[str]:
    files = sorted(library.folder.glob("wandb/offline-run-*/run-job-1.wandb"))
    assert len(files) == 2, "each trainer has a file"
    return library.run(READ_WANDB, "\n".join(record.hex() for file in files for record in records_of(file)))


def records_of(file: Path) -> list[bytes]:
    data, at, records, started = file.read_bytes(), HEADER_BYTES, list[bytes](), b""
    while at + HEADER_BYTES <= len(data):
        if BLOCK_BYTES - at % BLOCK_BYTES < HEADER_BYTES:
            at += BLOCK_BYTES - at % BLOCK_BYTES
        _, size, kind = struct.unpack_from("<IHB", data, at)
        started += data[at + HEADER_BYTES : at + HEADER_BYTES + size]
        at += HEADER_BYTES + size
        if kind in (1, 4):  # a whole record, or the last part of one
            records.append(started)
            started = b""
    return records


def read_trackio(library: Library) -> list[str]:
    with sqlite3.connect(library.folder / "trackio" / "onbeat.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert {run for run, _, _ in rows} == {"job-1"}
    points = [(name, step, value) for _, step, text in rows for name, value in json.loads(text).items()]
    return [json.dumps((name, step, rows_of(value))) for name, step, value in points]


def rows_of(value):
    """Return the rows of a table of Trackio; a number as it is."""
    return [list(row.values()) for row in value["_value"]] if isinstance(value, dict) else value


@pytest.mark.parametrize(
    ("name", "read"),
    [("wandb", read_wandb), ("mlflow", lambda library: library.run(READ_MLFLOW)), ("trackio", read_trackio)],
)
def test_real_tracker_has_each_point_and_table_once(name, read, tmp_path):
    library = Library(tmp_path)
    library.run(LOG, job_config().model_copy(update={"tracking": [{"type": name}]}).model_dump_json(warnings=False))
    logged = sorted((json.loads(line) for line in read(library)), key=lambda entry: entry[:2])
    tables = [(name, step, [list(map(str, row)) for row in rows]) for name, step, rows in logged if "samples" in name]
    assert tables == [
        (name, step, [[str(step), "2 + 2", 'is\n"4", | <b>', "0.5", "False", "answer 1"]] * 2)
        for name, steps in (("samples/evaluation", (2, 4)), ("samples/training", range(5)))
        for step in steps
    ]
    assert [tuple(entry) for entry in logged if "samples" not in entry[0]] == [
        ("eval/reward_mean", 2, 0.5),
        ("eval/reward_mean", 4, 1.0),
        *(("iteration/reward_mean", step, step / 8) for step in range(5)),
    ]
