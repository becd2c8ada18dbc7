"""`python -m services.trainer.prompt_lengths MODEL` counts the tokens of prompts, as a rollout tokenises them.

It reads one JSON object a line, `{"messages": [...]}` or `{"text": ...}`, and writes one number a line.
"""

import json
import sys
from typing import Any

from services.trainer.model import bundled
from services.trainer.settings import Settings


def count_tokens(tokenizer: Any, prompt: dict[str, Any]) -> int:
    """Count the tokens of a prompt. This does what `PromptEncoder` of the rollout does."""
    if not prompt.get("messages"):
        return len(tokenizer(prompt["text"])["input_ids"])
    return len(
        tokenizer.apply_chat_template(prompt["messages"], add_generation_prompt=True, return_dict=True)["input_ids"]
    )


def main() -> None:
    source = sys.argv[1]
    if source.startswith("bundled:"):
        source = str(bundled.prepare(source.removeprefix("bundled:"), Settings().cache_dir))
    modules: dict[str, Any] = sys.modules
    modules.setdefault("torch", None)  # tokenizers do without it, and it takes long to import
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    for line in sys.stdin:
        sys.stdout.write(f"{count_tokens(tokenizer, json.loads(line))}\n")


if __name__ == "__main__":
    main()
