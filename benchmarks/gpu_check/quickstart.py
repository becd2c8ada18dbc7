"""The quick start with vLLM on the GPU, where vLLM is installed."""

import os
from importlib.util import find_spec

from harness import run_job

from .part import Findings, Place, run_part

TIMEOUT_S = 230


def measure(place: Place, findings: Findings) -> None:
    if place.is_tiny or find_spec("vllm") is None:
        findings.leave_out("the quick start needs a CUDA device and vLLM (`make setup PLATFORM=cuda`)")
        return
    os.environ["ONBEAT_DEVICE"] = "cuda"
    report = run_job("benchmarks/jobs/quickstart-0.1.toml", timeout_s=TIMEOUT_S, may_be_cut=True)
    rewards = [iteration["reward_mean"] for iteration in report["iterations"]]
    findings.figure(
        "the quick start",
        reward_mean=rewards,
        mismatch_mean=[iteration["mismatch_mean"] for iteration in report["iterations"]],
        wall_s=[iteration["wall_s"] for iteration in report["iterations"]],
    )
    if report["state"] == "PAUSED":
        findings.leave_out("the rest of the quick start: its time was over")
    else:
        findings.check("the reward rises", sum(rewards[-5:]) > sum(rewards[:5]))


if __name__ == "__main__":
    run_part(measure)
