"""The check of a model's chat template before a job begins: otherwise all groups of its first iteration would fail, or
a message would be left out of every prompt without a word.

Whether a template takes the roles that an environment uses shows at its first call.
"""

from onbeat.config import JobConfig
from services.prompt_tokenizer import PromptTokenizer, check_template_options
from services.tokenizer import load_tokenizer

QUESTION = {"role": "user", "content": "a-first-question"}
CONVERSATION = [
    QUESTION,
    {"role": "assistant", "content": "an-answer"},
    {"role": "user", "content": "a-second-question"},
]
FILE = "chat_template.jinja in its folder, or model.chat_template_file of the job"


def check_chat_template(source: str, config: JobConfig) -> None:
    """Raise ValueError when the model's template cannot show the job's prompts, or its environment's conversations."""
    if not getattr(config.data, "as_chat", True):
        return
    tokenizer = load_tokenizer(source, config.model.chat_template)
    name = f"the chat template of {config.model.path}" if config.model.chat_template is None else "model.chat_template"
    check_template_options(tokenizer, config.data)
    prompts = PromptTokenizer(tokenizer, config.data)
    if config.environment is not None:
        if problem := problem_of(prompts, CONVERSATION):
            raise ValueError(
                f"{name} {problem}; episodes need that: give the model a template that does "
                f"({FILE}), or set data.as_chat = false for an environment that sends token ids only"
            )
        return
    if problem := problem_of(prompts, [QUESTION]):
        raise ValueError(
            f"{name} {problem}; give the model a template that does ({FILE}), or set "
            "data.as_chat = false for prompts that are rendered already"
        )
    system = config.data.system_prompt
    if system and (problem := problem_of(prompts, [{"role": "system", "content": "a-system-prompt"}, QUESTION])):
        raise ValueError(
            f"{name} {problem}; put the text of data.system_prompt into the prompts, or give the "
            f"model a template that does ({FILE})"
        )


def problem_of(prompts: PromptTokenizer, messages: list[dict[str, str]]) -> str:
    """Return why messages cannot be rendered, in words behind `the chat template`; '' if all of them are shown but
    answers, which templates may shorten."""
    from jinja2.exceptions import TemplateError

    roles = " and ".join(message["role"] for message in messages)
    try:
        text = prompts.render(messages)
    except (TemplateError, ValueError, TypeError, LookupError, AttributeError) as error:
        reason = str(error).splitlines() or [type(error).__name__]
        return f"does not render a conversation of {roles} ({reason[0][:200]})"
    left_out = [
        message["role"] for message in messages if message["role"] != "assistant" and message["content"] not in text
    ]
    return f"does not show the message of the role {left_out[0]} in a conversation of {roles}" if left_out else ""
