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
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness import ROOT, command_line, medians, own_dtype, quickstart_model, run_job, save, start, temporary_folder

NUM_STEPS, WARMUP, NUM_PROMPTS, GROUP_SIZE, NUM_TOKENS = 6, 2, 8, 8, 24
NEVER_SAMPLED = {"eos_token_id": 16, "eos_token": "<empty_output>"}  # a token of SmolLM2 that is in none of its texts


def copy_without_end(source: Path, target: Path) -> Path:
    """Copy a model; its responses end at the limit of tokens only."""
    shutil.copytree(source, target)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        content = json.loads((target / name).read_text())
        content |= {key: value for key, value in NEVER_SAMPLED.items() if key in content}
        (target / name).write_text(json.dumps(content))
    return target


def run_trl(
    script: str, folder: Path, arguments: Iterable[object], more: Iterable[object] = (), timeout_s: float = 1800
) -> dict[str, Any]:
    """Run a script of this folder, whose last arguments are the file of its result and `more`; return the result."""
    output = folder / "trl.json"
    command = [sys.executable, ROOT / "benchmarks" / script, *arguments, output, *more]
    subprocess.run(list(map(str, command)), check=True, timeout=timeout_s)
    result: dict[str, Any] = json.loads(output.read_text())
    return result


def compare(before: dict[str, Any], trl: dict[str, Any], after: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return the figures of the steps after warm-up: TRL's, and those of Onbeat's runs before and after it."""
    iterations = before["iterations"][WARMUP:] + after["iterations"][WARMUP:]
    trl_steps, onbeat_steps = trl["step_s"][WARMUP:], [iteration["wall_s"] for iteration in iterations]
    trl_s, onbeat_s = statistics.median(trl_steps), statistics.median(onbeat_steps)
    return {
        "dtype": f"{dtype} (TRL: weights, and autocast if bfloat16; Onbeat: weights, with float32 masters)",
        "seconds_per_step": {"trl": trl_s, "onbeat": onbeat_s},
        "times_fewer_seconds": trl_s / onbeat_s,
        "medians_of_onbeat": medians(iterations, "generate_s", "train_s"),
        "mean_response_tokens": {
            "trl": statistics.fmean(trl["mean_response_tokens"][WARMUP:]),
            "onbeat": statistics.fmean(
                iteration["response_tokens"] / iteration["num_responses"] for iteration in iterations
            ),
        },
        "share_of_groups_without_gradient": statistics.fmean(
            iteration["metrics"]["train/skipped_groups"] / iteration["num_groups"] for iteration in iterations
        ),
        "steps": {"trl": trl_steps, "onbeat": onbeat_steps},
        "warmup_steps": WARMUP,
    }


def run_onbeat(model: Path, dtype: str) -> dict[str, Any]:
    return run_job(
        "benchmarks/jobs/quickstart-0.1.toml",
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
        before = run_onbeat(model, dtype)
        arguments = (model, NUM_STEPS, NUM_PROMPTS, GROUP_SIZE, NUM_TOKENS, dtype)
        trl = run_trl("trl_baseline.py", folder, arguments)
        after = run_onbeat(model, dtype)
    sizes = {"num_prompts": NUM_PROMPTS, "num_samples_per_prompt": GROUP_SIZE, "response_tokens": NUM_TOKENS}
    save("vs_trl", compare(before, trl, after, dtype) | sizes, dtype)


if __name__ == "__main__":
    start(command_line(__doc__))
    main()
