"""`python -m services.trainer.prompt_lengths MODEL` counts the tokens of prompts, as a rollout tokenises them.

It reads one JSON object a line, `{"messages": [...]}` or `{"text": ...}`, and writes one number a line. The first line
is `{"arguments": {...}, "chat_template": ...}`: the job's arguments of the chat template, and its template or null;
with `"memory_mb"`, that is the limit of its address space.
With `--text` behind the model it writes `{"num_tokens": ..., "text": ..., "suffix": ...}`, with the prompt as the model
gets it, and its end behind the messages.
"""

import json
import resource
import sys
from typing import Any

from onbeat.config.templates import TemplateArguments
from onbeat.process.confine import MEBIBYTE, die_with_parent, lower_limits
from services.prompts.prompt_tokenizer import PromptTokenizer, check_template_options
from services.prompts.tokenizer import load_tokenizer
from services.trainer.model.bundled import resolve_model
from services.trainer.settings import Settings


def tokenise(prompts: PromptTokenizer, prompt: dict[str, Any]) -> list[int]:
    """Tokenise a prompt as `PromptEncoder` of the rollout does."""
    messages = prompt.get("messages")
    return prompts.encode_messages(messages) if messages else prompts.encode_text(prompt["text"])


def main() -> None:
    die_with_parent()  # the parent is killed at its limit
    given = json.loads(sys.stdin.readline())
    if "memory_mb" in given:
        lower_limits({resource.RLIMIT_AS: given["memory_mb"] * MEBIBYTE})
    try:
        source = resolve_model(sys.argv[1], Settings().cache_dir)
    except ValueError as error:
        sys.exit(str(error))
    modules: dict[str, Any] = sys.modules
    modules.setdefault("torch", None)  # tokenizers do without it, and it takes long to import
    tokenizer = load_tokenizer(source, given["chat_template"])
    arguments = TemplateArguments.model_validate(given["arguments"])
    try:
        check_template_options(tokenizer, arguments)
    except ValueError as error:
        sys.exit(str(error))
    prompts = PromptTokenizer(tokenizer, arguments)
    for line in sys.stdin:
        prompt = json.loads(line)
        token_ids = tokenise(prompts, prompt)
        result: Any = len(token_ids)
        if "--text" in sys.argv[2:]:
            suffix = prompts.suffix(prompt["messages"]) if prompt.get("messages") else ""
            result = {"num_tokens": len(token_ids), "text": tokenizer.decode(token_ids), "suffix": suffix}
        sys.stdout.write(f"{json.dumps(result)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
