"""The conversion of prompt tasks to token ids, and of tokens to text, with the tokenizer that came with the model."""

import json
from pathlib import Path
from typing import Any

from onbeat.config.templates import TemplateArguments
from onbeat.contracts.answers import PROMPT_SUFFIX
from onbeat.contracts.model_config import context_tokens
from onbeat.streams.codec import PromptTask
from services.prompts.prompt_tokenizer import PromptTokenizer
from services.prompts.tokenizer import load_tokenizer
from services.rollout.engines.imports import large_import
from services.rollout.token_text import TokenText

MAX_CHARS_PER_TOKEN = 32  # a longer text does not fit the context, and is not even tokenised


class GroupFailed(Exception):
    """This group holds no training data, and trying again would not help. `kind` is as in rollout.proto."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class PromptEncoder:
    """An encoder of prompts. `max_context_tokens`: longest prompt plus response; None where the model has no limit."""

    def __init__(
        self, tokenizer: Any, max_context_tokens: int | None, arguments: TemplateArguments | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.prompts = PromptTokenizer(tokenizer, arguments)
        self.token_lengths = TokenText(tokenizer).lengths
        self.max_context_tokens = max_context_tokens
        self.turn_end_ids: tuple[int, ...] = ()  # stop tokens besides the model's own (`end_of_turn`)

    @classmethod
    def load(
        cls, model_dir: Path, max_context_tokens: int | None, arguments: TemplateArguments | None = None
    ) -> "PromptEncoder":
        """Load the model's tokenizer. That takes seconds (it imports transformers): not for the event loop."""
        with large_import():
            tokenizer = load_tokenizer(model_dir, local_files_only=True)
        limits = [limit for limit in (max_context_tokens, read_context_tokens(model_dir)) if limit is not None]
        return cls(tokenizer, min(limits, default=None), arguments)

    def encode(self, task: PromptTask) -> list[int]:
        """Tokenise the prompt. Raises GroupFailed when it has no tokens, does not fit, or the template refuses it."""
        from jinja2.exceptions import TemplateError

        try:
            token_ids = self._tokenise(task)
        except (TemplateError, ValueError, TypeError) as error:
            raise GroupFailed("generation_failed", f"the prompt cannot be tokenised: {error}") from error
        if not token_ids:
            raise GroupFailed("generation_failed", "the prompt has no tokens")
        num_tokens = len(token_ids) + task.max_response_tokens
        if self.max_context_tokens is not None and num_tokens > self.max_context_tokens:
            raise GroupFailed(
                "prompt_too_long",
                f"{len(token_ids)} prompt and up to {task.max_response_tokens} response tokens are {num_tokens}, "
                f"the context has {self.max_context_tokens}; shorten the prompt or lower rollout.max_response_tokens",
            )
        return token_ids

    def encode_for_teacher(self, task: PromptTask) -> list[int]:
        """Tokenise the teacher's prompt; [] where it reads the policy's. Raises GroupFailed as `encode` does."""
        if not task.teacher_messages and not task.teacher_text:
            return []
        longest = task.max_response_tokens
        second = PromptTask(messages=task.teacher_messages, text=task.teacher_text, max_response_tokens=longest)
        try:
            return self.encode(second)
        except GroupFailed as error:
            raise GroupFailed(error.kind, f"the teacher's prompt (teacher.prompt_field): {error}") from error

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of tokens, without the special ones."""
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def ending(self, task: PromptTask) -> dict[str, str]:
        """Return what the reward's context says of the end of a prompt; nothing for plain text."""
        from jinja2.exceptions import TemplateError

        if not task.messages:
            return {}
        try:
            return {PROMPT_SUFFIX: self.prompts.suffix(messages_of(task))}
        except (TemplateError, ValueError, TypeError):  # the template renders prompts only
            return {PROMPT_SUFFIX: ""}

    def _tokenise(self, task: PromptTask) -> list[int]:
        if not task.messages:
            return self.prompts.encode_text(task.text)
        return self.prompts.encode_messages(messages_of(task))


def messages_of(task: PromptTask) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in task.messages]


def read_context_tokens(model_dir: Path) -> int | None:
    """Return the longest context that the model was made for, of its text part when it has several; None if unnamed."""
    return context_tokens(json.loads((model_dir / "config.json").read_text("utf-8")))


def prompt_text(task: PromptTask) -> str:
    """Return the row's prompt as people read it; `prompt_decoder` shows what the model saw."""
    if not task.messages:
        return task.text
    if len(task.messages) == 1:
        return task.messages[0].content
    return "\n".join(f"{message.role}: {message.content}" for message in task.messages)
