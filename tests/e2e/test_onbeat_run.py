"""`onbeat run` as a user types it: real Redis, gRPC, vLLM and the quick start's pretrained model."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from onbeat.machine.processor import read_processor

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two iterations of the quick start."""
    data_dir = tmp_path_factory.mktemp("quickstart")
    report = data_dir / "report.json"
    command = [sys.executable, "-m", "onbeat.cli", "run", str(ROOT / "examples" / "quickstart.toml")]
    command += ["--data-dir", str(data_dir), "--set", "schedule.num_iterations=2", "--report", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return data_dir, done.stdout, json.loads(report.read_text())


@pytest.mark.timeout(960)  # 270 s were measured on AVX2 beside other work
def test_quick_start_succeeds_and_reports_every_field(finished):
    identity = ["iteration", "policy_version", "reward_mean", "num_groups", "num_responses"]
    shares_and_gaps = ["rollout_idle_frac", "trainer_idle_frac", "staleness_max", "mismatch_mean", "mismatch_max"]
    tokens_and_times = ["prompt_tokens", "response_tokens", "wall_s", "generate_s", "train_s", "weight_sync_s", "tpspd"]
    report_fields = identity + tokens_and_times + shares_and_gaps
    _, _, report = finished
    assert (report["state"], report["mode"]) == ("SUCCEEDED", "periodic")
    assert [iteration["iteration"] for iteration in report["iterations"]] == [0, 1]
    for iteration in report["iterations"]:
        assert all(iteration[field] is not None for field in report_fields)
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
    assert f"precision: {report['dtype']} (" in output


def test_the_checkpoint_is_an_ordinary_model(finished):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = finished[0] / "jobs" / finished[2]["job_id"] / "checkpoints" / "iteration-000002"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("1 + 1 =", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=2, do_sample=False).shape[1] == prompt["input_ids"].shape[1] + 2


def test_finished_job_answers_a_question(finished):
    data_dir, output, report = finished
    job_id = report["job_id"]
    assert f"onbeat chat {job_id} --data-dir " in output
    command = [sys.executable, "-m", "onbeat.cli", "chat", job_id, "Calculate 1 + 1.", "--data-dir", str(data_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout.strip() != "") == (0, True), done.stdout + done.stderr


def test_nothing_is_left_running(finished):
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            for facts in (environment, environment.with_name("cmdline")):
                assert os.fsencode(finished[0]) not in facts.read_bytes(), environment
