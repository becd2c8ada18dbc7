"""The seconds per step against TRL's GRPOTrainer: same model, prompts, group size, response length, dtype and cores.

Responses of both have the same length, whatever each policy learns: the model is a copy whose end-of-sequence token is
one that it never samples, so every response runs to the limit. All cores of this machine run Onbeat, then TRL, then
Onbeat again, because other load on it may change; in the dtype that Onbeat chooses for it. Figures are medians over the
steps after warm-up.
"""

import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from harness import ROOT, median_of, own_dtype, run_job, save, temporary_folder

NUM_STEPS, WARMUP, NUM_PROMPTS, GROUP_SIZE, NUM_TOKENS = 6, 2, 8, 8, 24
NEVER_SAMPLED = {"eos_token_id": 16, "eos_token": "<empty_output>"}  # in SmolLM2's vocabulary, in none of its texts


def quickstart_model() -> Path:
    prepare = [sys.executable, "-m", "services.trainer.model.bundled", "smollm2-135m-instruct"]
    return Path(subprocess.run(prepare, check=True, capture_output=True, text=True).stdout.strip().splitlines()[-1])


def copy_without_end(source: Path, target: Path) -> Path:
    """Copy a model; its responses end at the limit of tokens only."""
    shutil.copytree(source, target)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        content = json.loads((target / name).read_text())
        content |= {key: value for key, value in NEVER_SAMPLED.items() if key in content}
        (target / name).write_text(json.dumps(content))
    return target


def run_trl(model: Path, folder: Path, dtype: str) -> dict:
    output = folder / "trl.json"
    sizes = [str(value) for value in (NUM_STEPS, NUM_PROMPTS, GROUP_SIZE, NUM_TOKENS)]
    command = [sys.executable, str(ROOT / "benchmarks" / "trl_baseline.py"), str(model), *sizes, dtype, str(output)]
    subprocess.run(command, check=True, timeout=1800)
    return json.loads(output.read_text())


def run_onbeat(model: Path, dtype: str) -> dict:
    return run_job(
        "examples/quickstart.toml",
        f"model.path={model}",
        f"model.dtype={dtype}",
        f"schedule.num_iterations={NUM_STEPS}",
        f"rollout.num_prompts_per_iteration={NUM_PROMPTS}",
        f"rollout.num_samples_per_prompt={GROUP_SIZE}",
        f"rollout.max_response_tokens={NUM_TOKENS}",
        "training.max_tokens_per_micro_batch=704",  # three groups in a row, as of the quick start's shorter responses
    )


def main() -> None:
    dtype = own_dtype()
    with temporary_folder() as folder:
        model = copy_without_end(quickstart_model(), folder / "model")
        before, trl, after = run_onbeat(model, dtype), run_trl(model, folder, dtype), run_onbeat(model, dtype)
    report = {"iterations": before["iterations"][WARMUP:] + after["iterations"][WARMUP:]}
    iterations, trl_steps = report["iterations"], trl["step_s"][WARMUP:]
    trl_s, onbeat_s = statistics.median(trl_steps), median_of(report, "wall_s")
    save(
        "vs_trl",
        {
            "dtype": f"{dtype} (TRL: weights, and autocast if bfloat16; Onbeat: weights, with float32 masters)",
            "seconds_per_step": {"trl": trl_s, "onbeat": onbeat_s},
            "times_fewer_seconds": trl_s / onbeat_s,
            "medians_of_onbeat": {name: median_of(report, name) for name in ("generate_s", "train_s")},
            "mean_response_tokens": {
                "trl": statistics.fmean(trl["mean_response_tokens"][WARMUP:]),
                "onbeat": statistics.fmean(each["response_tokens"] / each["num_responses"] for each in iterations),
            },
            "share_of_groups_without_gradient": statistics.fmean(
                each["metrics"]["train/skipped_groups"] / each["num_groups"] for each in iterations
            ),
            "steps": {"trl": trl_steps, "onbeat": [each["wall_s"] for each in iterations]},
            "num_prompts": NUM_PROMPTS,
            "num_samples_per_prompt": GROUP_SIZE,
            "response_tokens": NUM_TOKENS,
            "warmup_steps": WARMUP,
        },
        dtype,
    )


if __name__ == "__main__":
    main()
