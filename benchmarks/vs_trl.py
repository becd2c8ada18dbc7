"""Seconds per step against TRL's GRPOTrainer: same model, prompts, group size, response cap, precision and cores.

Both run one after the other on all cores of this machine; medians over the steps after warm-up.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path

from harness import ROOT, median_of, run_job, save, temporary_folder

NUM_STEPS, WARMUP, NUM_PROMPTS, GROUP_SIZE, MAX_TOKENS = 12, 2, 8, 8, 32


def run_trl(model: str) -> dict:
    with temporary_folder() as folder:
        output = Path(folder) / "trl.json"
        sizes = [str(value) for value in (NUM_STEPS, NUM_PROMPTS, GROUP_SIZE, MAX_TOKENS)]
        command = [sys.executable, str(ROOT / "benchmarks" / "trl_baseline.py"), model, *sizes, str(output)]
        subprocess.run(command, check=True, timeout=1800)
        return json.loads(output.read_text())


def main() -> None:
    prepare = [sys.executable, "-m", "services.trainer.prepare_model", "smollm2-135m-instruct"]
    model = subprocess.run(prepare, check=True, capture_output=True, text=True).stdout.strip().splitlines()[-1]
    trl = run_trl(model)
    report = run_job("examples/quickstart.toml", f"schedule.num_iterations={NUM_STEPS}")
    trl_s = statistics.median(trl["step_s"][WARMUP:])
    onbeat_s = median_of(report, "wall_s", WARMUP)
    iterations = report["iterations"]
    save(
        "vs_trl",
        {
            "seconds_per_step": {"trl": trl_s, "onbeat": onbeat_s},
            "times_fewer_seconds": trl_s / onbeat_s,
            "mean_response_tokens": {
                "trl": statistics.fmean(trl["mean_response_tokens"][WARMUP:]),
                "onbeat": statistics.fmean(it["response_tokens"] / it["num_responses"] for it in iterations[WARMUP:]),
            },
            "share_of_groups_without_gradient": statistics.fmean(
                it["metrics"]["train/skipped_groups"] / it["num_groups"] for it in iterations[WARMUP:]
            ),
            "steps": {"trl": trl["step_s"], "onbeat": [iteration["wall_s"] for iteration in iterations]},
            "num_prompts": NUM_PROMPTS,
            "num_samples_per_prompt": GROUP_SIZE,
            "max_response_tokens": MAX_TOKENS,
            "warmup_steps": WARMUP,
            "precision": "bf16 (TRL: bf16 weights and autocast; onbeat: bf16 weights, float32 masters)",
        },
    )


if __name__ == "__main__":
    main()
