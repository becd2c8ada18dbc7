"""TRL's GRPOTrainer with an `environment_factory`: seconds of each step of episodes. It runs in its own process.

TRL parses calls of tools out of answers. The small model makes none, so each answer counts as one call here, with the
answer as its argument, as Onbeat's side of the benchmark does it (EveryAnswerCalls in bench_environments.py). The tool,
the turns, the tokens of an answer and the chat template are the same. vLLM is not available to TRL on this machine: it
generates with `model.generate` of transformers.
"""

import json
import sys
from pathlib import Path
from typing import Any

from bench_environments import Lookup
from trl_baseline import dtype_settings, train

MAX_OBSERVED_TOKENS = 64  # tokens between two answers


def main(
    model: str,
    num_steps: int,
    num_prompts: int,
    group_size: int,
    max_tokens: int,
    num_turns: int,
    dtype: str,
    data: Path,
    output: Path,
) -> None:
    """Train on the first rows of a JSONL file; `max_tokens`: of each answer, which has no fewer either."""
    from transformers import AutoTokenizer
    from trl.trainer import grpo_trainer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_template = {}  # TRL refuses templates whose calls it cannot parse; they are not parsed

    def every_answer_calls(tokenizer: Any, ids: list[int], **kwargs: Any) -> dict[str, Any]:
        text = tokenizer.decode(ids, skip_special_tokens=True)
        call = {"type": "function", "function": {"name": "look", "arguments": {"text": text}}}
        return {"role": "assistant", "content": text, "tool_calls": [call]}

    grpo_trainer.parse_response = every_answer_calls
    config = {
        "output_dir": str(output.parent / "trl"),
        "per_device_train_batch_size": group_size,  # all rows of a step at a time take more than 24 GB
        "gradient_accumulation_steps": num_prompts,
        "num_generations": group_size,
        "max_steps": num_steps,
        "max_tool_calling_iterations": num_turns - 1,
        "max_completion_length": num_turns * (max_tokens + MAX_OBSERVED_TOKENS),  # tokens of a whole episode
        "generation_kwargs": {"min_new_tokens": max_tokens, "max_new_tokens": max_tokens},  # tokens of an answer
    }
    lines = [json.loads(line) for line in data.read_text().splitlines()]
    rows = [{"prompt": line["prompt"]} for line in lines][: num_prompts * num_steps]
    options = {"processing_class": tokenizer, "environment_factory": Lookup}
    result = train(model, rows, float("inf"), config | dtype_settings(dtype), **options)
    output.write_text(json.dumps(result))


if __name__ == "__main__":
    if len(sys.argv) < 10:
        raise SystemExit(f"{__doc__}\nIt is started by episodes.py.")
    model, *counts, dtype, data, output = sys.argv[1:10]
    num_steps, num_prompts, group_size, max_tokens, num_turns = map(int, counts)
    main(model, num_steps, num_prompts, group_size, max_tokens, num_turns, dtype, Path(data), Path(output))
