"""A model's prompts: a conversation or plain text in, token ids out, alike for rollouts, length counts and checks."""

from collections.abc import Sequence
from typing import Any


class PromptTokenizer:
    """The chat template and the tokenizer of a model; like the tokenizer of transformers, for one thread at a time."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def render(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = (), *, is_prompt: bool = True
    ) -> str:
        """Return the text of a conversation for `encode`; a prompt ends where the next answer begins.

        Raises what templates raise: TemplateError, ValueError, TypeError, LookupError, AttributeError, RecursionError.
        """
        text: str = self.tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=is_prompt
        )
        return text

    def encode(self, rendered: str) -> list[int]:
        """Tokenise what `render` returned, or a piece of that. Raises TypeError for halves of surrogate pairs."""
        return list(self.tokenizer(rendered, add_special_tokens=False)["input_ids"])

    def encode_messages(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        return self.encode(self.render(messages))

    def encode_text(self, text: str) -> list[int]:
        """Tokenise a prompt that is no conversation, with the tokens that the tokenizer puts before a text."""
        return list(self.tokenizer(text)["input_ids"])
