"""TRL's GRPOTrainer on the quick start's task: seconds and mean reward of each step. It runs in its own process.

Model, prompts, group size, response limit and cores are the same; vLLM is not available to it. TRL's other defaults are
kept.
"""

import itertools
import json
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from onbeat.config import JobConfig

QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart.toml"


@dataclass(frozen=True)
class Run:
    """A run of TRL. It ends after `num_steps`, or after the first step beyond `limit_s` seconds."""

    model: str
    num_steps: int
    num_prompts: int
    group_size: int
    max_tokens: int
    dtype: str  # bfloat16 (weights and autocast), float32, or mixed (float32 weights, bfloat16 autocast)
    learning_rate: float = 2e-5
    limit_s: float = float("inf")


def last_number_reward(completions, answer, **kwargs):
    """Return 1 if the last number of the text is the answer, as the quick start scores it."""
    found = [re.findall(r"-?\d+", completion[0]["content"]) for completion in completions]
    return [float(bool(numbers) and numbers[-1] == right) for numbers, right in zip(found, answer, strict=True)]


def rows_of(run: Run) -> list[dict[str, Any]]:
    """Return the prompts of all steps, with their answers."""
    import reasoning_gym

    data = JobConfig.from_file(QUICKSTART).data
    tasks = reasoning_gym.create_dataset(data.task, seed=0, size=run.num_prompts * run.num_steps, **data.options)
    return [{"prompt": [{"role": "user", "content": t["question"]}], "answer": t["answer"]} for t in tasks]


def config_of(run: Run, folder: Path) -> Any:
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=run.num_prompts * run.group_size,
        num_generations=run.group_size,
        max_completion_length=run.max_tokens,
        max_steps=run.num_steps,
        learning_rate=run.learning_rate,
        beta=0.0,
        bf16=run.dtype != "float32",
        use_cpu=True,
        model_init_kwargs={"dtype": "bfloat16" if run.dtype == "bfloat16" else "float32"},
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )


def train(run: Run, folder: Path) -> dict[str, list[float]]:
    """Train and return the seconds, lengths and rewards of each step."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            times.append(time.perf_counter())

        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop |= time.perf_counter() - times[0] > run.limit_s
            return control

        def on_train_end(self, *args, **kwargs):
            times.append(time.perf_counter())

    torch.set_num_threads(2)
    rows = Dataset.from_list(rows_of(run))
    trainer = GRPOTrainer(run.model, last_number_reward, config_of(run, folder), rows, callbacks=[Clock()])
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "completions/mean_length" in entry]
    return {
        "step_s": [end - start for start, end in itertools.pairwise(times)],
        "mean_response_tokens": [entry["completions/mean_length"] for entry in logged],
        "rewards": [entry["reward"] for entry in logged],
    }


def main(model: str, counts: list[str], dtype: str, output: Path, limits: list[str]) -> None:
    run = Run(model, *map(int, counts), dtype, *map(float, limits))
    output.write_text(json.dumps(train(run, output.parent)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:6], sys.argv[6], Path(sys.argv[7]), sys.argv[8:])
