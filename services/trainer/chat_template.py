"""The check of a model's chat template before a job of episodes begins, which would fail at every episode.

Whether a template takes the roles that an environment uses shows at its first call.
"""

from typing import Any

from onbeat.config import JobConfig
from services.tokenizer import load_tokenizer

CONVERSATION = [
    {"role": "user", "content": "a-first-question"},
    {"role": "assistant", "content": "an-answer"},
    {"role": "user", "content": "a-second-question"},
]
REMEDY = (
    "give the model a template that does (chat_template.jinja in its folder), or set data.as_chat = false for an "
    "environment that sends token ids only"
)


def check_chat_template(source: str, config: JobConfig) -> None:
    """Raise ValueError when the job's environment cannot talk to the model in several turns."""
    if config.environment is None or not getattr(config.data, "as_chat", True):
        return
    if problem := problem_of(load_tokenizer(source)):
        raise ValueError(f"the chat template of {config.model.path} {problem}; episodes need that: {REMEDY}")


def problem_of(tokenizer: Any) -> str:
    """Return why a conversation cannot be rendered, in words behind `the chat template`; '' if it can."""
    from jinja2.exceptions import TemplateError

    try:
        text = tokenizer.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=True)
    except (TemplateError, ValueError, TypeError, LookupError, AttributeError) as error:
        reason = str(error).splitlines() or [type(error).__name__]
        return f"does not render a conversation of user, assistant and user ({reason[0][:200]})"
    last = CONVERSATION[-1]["content"]
    return "" if last in text else "does not show the last message of a conversation"
