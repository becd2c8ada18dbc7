"""TRL's GRPOTrainer on the quick start's task: seconds per step. Run by vs_trl.py in a process of its own.

Same model, prompts, group size, response cap, precision (bf16) and cores; TRL's other defaults untouched.
"""

import itertools
import json
import re
import sys
import time
from pathlib import Path

import torch


def last_number_reward(completions, answer, **kwargs):
    """1 if the last number of the text is the answer, as the quick start scores it."""
    found = [re.findall(r"-?\d+", completion[0]["content"]) for completion in completions]
    return [float(bool(numbers) and numbers[-1] == right) for numbers, right in zip(found, answer, strict=True)]


def main(model: str, num_steps: int, num_prompts: int, group_size: int, max_tokens: int, output: str) -> None:
    import reasoning_gym
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(2)
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    tasks = reasoning_gym.create_dataset("chain_sum", seed=0, size=num_prompts * num_steps, **options)
    rows = [{"prompt": [{"role": "user", "content": t["question"]}], "answer": t["answer"]} for t in tasks]
    starts: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            starts.append(time.perf_counter())

        def on_train_end(self, *args, **kwargs):
            starts.append(time.perf_counter())

    config = GRPOConfig(
        output_dir=str(Path(output).parent / "trl"),
        per_device_train_batch_size=num_prompts * group_size,
        num_generations=group_size,
        max_completion_length=max_tokens,
        max_steps=num_steps,
        learning_rate=2e-5,
        beta=0.0,
        bf16=True,
        use_cpu=True,
        model_init_kwargs={"dtype": "bfloat16"},
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(model, last_number_reward, config, Dataset.from_list(rows), callbacks=[Clock()])
    trainer.train()
    step_s = [end - start for start, end in itertools.pairwise(starts)]
    lengths = [
        entry["completions/mean_length"] for entry in trainer.state.log_history if "completions/mean_length" in entry
    ]
    Path(output).write_text(json.dumps({"step_s": step_s, "mean_response_tokens": lengths}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:6]), sys.argv[6])
