"""TRL's GRPOTrainer on the quick start's task: seconds and mean reward of each step. It runs in its own process.

Model, prompts, group size, response limit and cores are the same; vLLM is not available to it. TRL's other defaults are
kept.
"""

import itertools
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch

from onbeat.config import JobConfig
from onbeat.config.data import ReasoningGymData

SETTINGS: dict[str, Any] = {
    "beta": 0.0,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "report_to": [],
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
}
QUICKSTART = Path(__file__).parent / "jobs" / "quickstart-0.1.toml"


def last_number_reward(completions: list[list[dict[str, str]]], answer: list[str], **columns: Any) -> list[float]:
    """Return 1 if the last number of the text is the answer, as the quick start scores it."""
    answers = [re.findall(r"-?\d+", completion[0]["content"]) for completion in completions]
    return [float(bool(numbers) and numbers[-1] == right) for numbers, right in zip(answers, answer, strict=True)]


def train(
    model: str, rows: list[dict[str, Any]], limit_s: float, config: dict[str, Any], **options: Any
) -> dict[str, Any]:
    """Train on one device, the CPU, and return seconds, response tokens and rewards by step. `config`: of GRPOConfig,
    `options`: of GRPOTrainer."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(2)
    times: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]  # transformers is imported without its types
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            times.append(time.perf_counter())

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control.should_training_stop |= time.perf_counter() - times[0] > limit_s
            return control

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            times.append(time.perf_counter())

    arguments = GRPOConfig(**SETTINGS | config)
    trainer = GRPOTrainer(model, args=arguments, train_dataset=Dataset.from_list(rows), callbacks=[Clock()], **options)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "completions/mean_length" in entry]
    return {
        "first_step_at": times[0],  # the clock that all processes share on Linux
        "step_s": [end - start for start, end in itertools.pairwise(times)],
        "mean_response_tokens": [entry["completions/mean_length"] for entry in logged],
        "rewards": [entry["reward"] for entry in logged],
    }


def dtype_settings(dtype: str) -> dict[str, Any]:
    """Return the settings of bfloat16 (weights, autocast), float32, or mixed (float32 weights, bfloat16 autocast)."""
    weights = "bfloat16" if dtype == "bfloat16" else "float32"
    return {"bf16": dtype != "float32", "model_init_kwargs": {"dtype": weights}}


def main(
    model: str,
    num_steps: int,
    num_prompts: int,
    group_size: int,
    max_tokens: int,
    dtype: str,
    output: Path,
    learning_rate: float = 2e-5,
    limit_s: float = float("inf"),
) -> None:
    """Train. Training ends after `num_steps`, or after the first step beyond `limit_s` seconds."""
    import reasoning_gym

    data = JobConfig.from_file(QUICKSTART).data
    assert isinstance(data, ReasoningGymData)
    tasks = reasoning_gym.create_dataset(data.task, seed=0, size=num_prompts * num_steps, **data.options)
    rows = [{"prompt": [{"role": "user", "content": t["question"]}], "answer": t["answer"]} for t in tasks]
    config = {
        "output_dir": str(output.parent / "trl"),
        "per_device_train_batch_size": num_prompts * group_size,
        "num_generations": group_size,
        "max_completion_length": max_tokens,
        "max_steps": num_steps,
        "learning_rate": learning_rate,
    }
    result = train(model, rows, limit_s, config | dtype_settings(dtype), reward_funcs=last_number_reward)
    output.write_text(json.dumps(result))


if __name__ == "__main__":
    if len(sys.argv) < 8:
        raise SystemExit(f"{__doc__}\nIt is started by time_to_reward.py and vs_trl.py.")
    model, *counts, dtype, output = sys.argv[1:8]
    num_steps, num_prompts, group_size, max_tokens = map(int, counts)
    limits = map(float, sys.argv[8:])
    main(model, num_steps, num_prompts, group_size, max_tokens, dtype, Path(output), *limits)
