"""The check of a model's chat template at the trainer's start, with the tokenizer that the rollouts use.

For a model in a folder, the broker makes it at submission as well.
"""

import re

from onbeat.config import JobConfig
from onbeat.contracts.chat_check import QUESTION, template_problem
from services.prompts.prompt_tokenizer import PromptTokenizer, check_template_options
from services.prompts.tokenizer import load_tokenizer

OPEN_TAG = re.compile(r"(<[\w:|]*(?:think|thought|reason|reflect|scratchpad)[\w|]*>)\s*$")  # <think> of many models


def check_chat_template(source: str, config: JobConfig) -> str:
    """Return what users should know of the model's template, or ''. Raise ValueError when it cannot show the job's
    prompts, or its environments' conversations."""
    if not getattr(config.rendering, "as_chat", True):
        return ""
    tokenizer = load_tokenizer(source, config.model.chat_template)
    check_template_options(tokenizer, config.rendering, config.rendering_field)
    prompts = PromptTokenizer(tokenizer, config.rendering)
    if problem := template_problem(
        prompts.render,
        f"the chat template of {config.model.path}" if config.model.chat_template is None else "model.chat_template",
        config.rendering_field,
        has_environment=bool(config.environments),
        has_system_prompt=config.has_system_prompt,
    ):
        raise ValueError(problem)
    if not (tag := OPEN_TAG.search(prompts.suffix([QUESTION]))):
        return ""
    return (
        f"the chat template ends prompts with {tag[1]}, which is no part of a response: rewards that look for it in "
        "the responses give 0 to all of them; they have the prompt's end as `prompt_suffix` in their context"
    )
