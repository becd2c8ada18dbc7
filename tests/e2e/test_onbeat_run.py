"""`onbeat run` as a user types it: real Redis, gRPC, vLLM and the quick start's pretrained model."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from onbeat.hardware.processor import read_processor

ROOT = Path(__file__).resolve().parents[2]
TOKENS_AND_TIMES = ["prompt_tokens", "response_tokens", "wall_s", "generate_s", "train_s", "weight_sync_s", "tpspd"]
SHARES_AND_GAPS = ["rollout_idle_frac", "trainer_idle_frac", "staleness_max", "mismatch_mean", "mismatch_max"]
IDENTITY = ["iteration", "policy_version", "reward_mean", "num_groups", "num_responses"]
REPORT_FIELDS = IDENTITY + TOKENS_AND_TIMES + SHARES_AND_GAPS


def command(data_dir: Path, *options: str) -> list[str]:
    job = str(ROOT / "examples" / "quickstart.toml")
    return [sys.executable, "-m", "onbeat.cli", "run", job, "--data-dir", str(data_dir), *options]


def leftovers(data_dir: Path) -> list[str]:
    """Processes that still belong to a stack in this data folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(data_dir) in (process.environ().get("ONBEAT_DATA_DIR", ""), *process.cmdline()):
                found.append(" ".join(process.cmdline()))
        except (psutil.Error, OSError):
            continue
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Three iterations of the quick start."""
    data_dir = tmp_path_factory.mktemp("quickstart")
    report = data_dir / "report.json"
    options = ["--set", "schedule.num_iterations=3", "--report", str(report)]
    done = subprocess.run(command(data_dir, *options), capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return data_dir, done.stdout, json.loads(report.read_text())


@pytest.mark.timeout(960)  # 270 s were measured on AVX2 beside other work
def test_quick_start_succeeds_and_reports_every_field(finished):
    _, _, report = finished
    assert (report["state"], report["mode"]) == ("SUCCEEDED", "periodic")
    assert [iteration["iteration"] for iteration in report["iterations"]] == [0, 1, 2]
    for iteration in report["iterations"]:
        assert all(iteration[field] is not None for field in REPORT_FIELDS)
        assert (iteration["num_groups"], iteration["num_responses"]) == (8, 64)
        assert iteration["policy_version"] == iteration["iteration"]


def test_quick_start_is_strictly_on_policy_up_to_rounding(finished):
    noise = {"bfloat16": 0.08, "float32": 1e-4}[finished[2]["dtype"]]
    for iteration in finished[2]["iterations"]:
        assert iteration["staleness_max"] == 0
        assert 0 < iteration["mismatch_mean"] < noise, "rollouts and trainer must compute with the same weights"


def test_quick_start_computes_in_what_the_processor_multiplies(finished):
    _, output, report = finished
    processor = read_processor()
    assert report["dtype"] == ("bfloat16" if processor.bfloat16 == "native" else "float32")
    assert f"{processor}: trainer on core" in output
    assert f"job.dtype: computes in {report['dtype']}: " in output


def test_piped_terminal_shows_progress_without_control_codes(finished):
    output = finished[1]
    assert "\x1b" not in output
    assert len(re.findall(r"iteration \d/3", output)) == 3
    assert "before training" in output
    assert "after" in output


def test_the_checkpoint_is_an_ordinary_model(finished):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = finished[0] / "jobs" / finished[2]["job_id"] / "checkpoints" / "iteration-000003"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("1 + 1 =", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=2, do_sample=False).shape[1] == prompt["input_ids"].shape[1] + 2


def test_nothing_is_left_running(finished):
    assert leftovers(finished[0]) == []


@pytest.mark.timeout(180)
def test_ctrl_c_pauses_the_job_and_leaves_no_process(tmp_path):
    """In mid-iteration, on the real engine with its grandchildren."""
    process = subprocess.Popen(
        command(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # whoever runs the tests may ignore it
    )
    log = tmp_path / "logs" / "rollout-0.log"
    deadline = time.monotonic() + 120
    while not (log.exists() and "serving policy version 0" in log.read_text()):
        assert time.monotonic() < deadline, "the rollout never served"
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "is PAUSED after 0 of 25 iterations: the same command continues it" in output
    assert leftovers(tmp_path) == []


def test_a_wrong_job_is_refused_with_field_and_remedy(tmp_path):
    options = ["--set", "rollout.num_samples_per_prompt=1", "--set", "data.task=chain_sums"]
    done = subprocess.run(command(tmp_path, *options), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "num_samples_per_prompt" in done.stdout + done.stderr
    assert leftovers(tmp_path) == []
