"""The check of a model's chat template, at the submission of a job and again at the trainer's start.

Otherwise all groups of the first iteration would fail, or a message would be left out of every prompt without a word.

Whether a template takes the roles that an environment uses shows at its first call.
"""

from collections.abc import Callable

Messages = list[dict[str, str]]
Render = Callable[[Messages], str]  # raises errors of Jinja and of Python where the template does not take the messages

QUESTION = {"role": "user", "content": "a-first-question"}
SYSTEM = {"role": "system", "content": "a-system-prompt"}
CONVERSATION = [
    QUESTION,
    {"role": "assistant", "content": "an-answer"},
    {"role": "user", "content": "a-second-question"},
]
FILE = "chat_template.jinja in its folder, or model.chat_template_file of the job"


def template_problem(
    render: Render, template: str, section: str, *, has_environment: bool, has_system_prompt: bool
) -> str:
    """Return why the model's template cannot show a job's prompts, or its environments' conversations, and what to do;
    '' if it can. `template`: its name in the message. `section`: the job's data, which has `as_chat`.
    `has_system_prompt`: of prompts that are answered in one turn."""
    if has_environment and (problem := problem_of(render, CONVERSATION)):
        return (
            f"{template} {problem}; episodes need that: give the model a template that does ({FILE}), or set "
            f"{section}.as_chat = false for an environment that sends token ids only"
        )
    if not has_environment and (problem := problem_of(render, [QUESTION])):
        return (
            f"{template} {problem}; give the model a template that does ({FILE}), or set {section}.as_chat = false for "
            "prompts that are rendered already"
        )
    if has_system_prompt and (problem := problem_of(render, [SYSTEM, QUESTION])):
        return (
            f"{template} {problem}; put the text of {section}.system_prompt into the prompts, or give the model a "
            f"template that does ({FILE})"
        )
    return ""


def problem_of(render: Render, messages: Messages) -> str:
    """Return why messages cannot be rendered, in words behind `the chat template`; '' if all of them are shown but
    answers, which templates may shorten."""
    from jinja2.exceptions import TemplateError

    roles = " and ".join(message["role"] for message in messages)
    try:
        text = render(messages)
    except (TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        reason = str(error).splitlines() or [type(error).__name__]
        return f"does not render a conversation of {roles} ({reason[0][:200]})"
    left_out = [
        message["role"] for message in messages if message["role"] != "assistant" and message["content"] not in text
    ]
    return f"does not show the message of the role {left_out[0]} in a conversation of {roles}" if left_out else ""
