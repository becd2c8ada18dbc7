"""The check of a model's chat template at the trainer's start, with the tokenizer that the rollouts use.

For a model in a folder, the broker makes it at submission as well.
"""

from onbeat.config import JobConfig
from onbeat.contracts.chat_check import template_problem
from services.prompt_tokenizer import PromptTokenizer, check_template_options
from services.tokenizer import load_tokenizer


def check_chat_template(source: str, config: JobConfig) -> None:
    """Raise ValueError when the model's template cannot show the job's prompts, or its environment's conversations."""
    if not getattr(config.data, "as_chat", True):
        return
    tokenizer = load_tokenizer(source, config.model.chat_template)
    check_template_options(tokenizer, config.data)
    if problem := template_problem(
        PromptTokenizer(tokenizer, config.data).render,
        f"the chat template of {config.model.path}" if config.model.chat_template is None else "model.chat_template",
        has_environment=config.environment is not None,
        has_system_prompt=bool(config.data.system_prompt),
    ):
        raise ValueError(problem)
