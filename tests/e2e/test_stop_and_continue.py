"""`onbeat run` is stopped in the middle, and the same command goes on: real services on a tiny model."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.e2e.stack import tiny_job

NUM_ITERATIONS, STOPPED_AFTER = 12, 2


def start(job: Path, data_dir: Path, *options: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "onbeat.cli", "run", str(job), "--engine", "transformers", *options]
    environment = os.environ | {"ONBEAT_DATA_DIR": str(data_dir), "ONBEAT_MAX_NUM_SEQS": "24"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.timeout(300)
def test_stopped_run_goes_on_where_it_was(tmp_path):
    others = psutil.Process().children(recursive=True)  # such as a Redis of other tests
    (tmp_path / "data").mkdir()
    job = tmp_path / "job.json"
    job.write_text(json.dumps(tiny_job(tmp_path, schedule={"num_iterations": NUM_ITERATIONS})))
    first = start(job, tmp_path / "data")
    shown = ""
    while f"iteration {STOPPED_AFTER}/{NUM_ITERATIONS} " not in shown:
        line = first.stdout.readline()
        assert line, shown
        shown += line
    first.send_signal(signal.SIGTERM)
    shown += first.communicate(timeout=90)[0]
    assert first.returncode == 130, shown
    (job_folder,) = (tmp_path / "data" / "jobs").iterdir()
    (checkpoint,) = (job_folder / "checkpoints").iterdir()
    done = int(checkpoint.name.removeprefix("iteration-"))
    assert STOPPED_AFTER <= done < NUM_ITERATIONS
    assert f"is PAUSED after {done} of {NUM_ITERATIONS} iterations: the same command continues it" in shown
    assert "computed again" not in shown

    second = start(job, tmp_path / "data", "--report", str(tmp_path / "report.json"))
    shown = second.communicate(timeout=150)[0]
    assert second.returncode == 0, shown
    assert f"continuing job {job_folder.name} after {done} of {NUM_ITERATIONS} iterations" in shown
    assert "(replayed)" not in (tmp_path / "data" / "logs" / "trainer.log").read_text()
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["state"], len(report["iterations"])) == ("SUCCEEDED", NUM_ITERATIONS)
    assert psutil.Process().children(recursive=True) == others
