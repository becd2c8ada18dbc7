"""`python -m services.trainer.prompt_lengths MODEL` counts the tokens of prompts, as a rollout tokenises them.

It reads one JSON object a line, `{"messages": [...]}` or `{"text": ...}`, and writes one number a line. With `--text`
behind the model it writes `{"num_tokens": ..., "text": ...}`, with the prompt as the model gets it.
"""

import json
import sys
from typing import Any

from onbeat.process.confine import die_with_parent
from services.tokenizer import load_tokenizer
from services.trainer.model.bundled import resolve_model
from services.trainer.settings import Settings


def tokenise(tokenizer: Any, prompt: dict[str, Any]) -> list[int]:
    """Tokenise a prompt as `PromptEncoder` of the rollout does."""
    if not prompt.get("messages"):
        return list(tokenizer(prompt["text"])["input_ids"])
    encoded = tokenizer.apply_chat_template(prompt["messages"], add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])


def main() -> None:
    die_with_parent()  # the parent is killed at its limit
    try:
        source = resolve_model(sys.argv[1], Settings().cache_dir)
    except ValueError as error:
        sys.exit(str(error))
    modules: dict[str, Any] = sys.modules
    modules.setdefault("torch", None)  # tokenizers do without it, and it takes long to import
    tokenizer = load_tokenizer(source)
    for line in sys.stdin:
        token_ids = tokenise(tokenizer, json.loads(line))
        result: Any = len(token_ids)
        if "--text" in sys.argv[2:]:
            result = {"num_tokens": len(token_ids), "text": tokenizer.decode(token_ids)}
        sys.stdout.write(f"{json.dumps(result)}\n")


if __name__ == "__main__":
    main()
