"""The token with which a chat template ends an answer. Some models never stop at it: their files name another one."""

from pathlib import Path

from onbeat.config.templates import TemplateArguments
from services.rollout.engines.stops import read_end_ids
from services.rollout.episodes.templates import PROBE, ChatTemplate
from services.rollout.prompts import PromptEncoder


def end_of_turn(encoder: PromptEncoder) -> int | None:
    """Return the special token right behind an answer, such as `<|im_end|>`; None without a template, or where it
    shows none."""
    tokenizer = encoder.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        return None
    mark = encoder.prompts.mark_at(ChatTemplate(encoder.prompts).end_of_answer([PROBE], []) or "")
    token_id: int | None = tokenizer.convert_tokens_to_ids(mark) if mark else None
    return token_id


def add_end_of_turn(encoder: PromptEncoder, data: TemplateArguments, model_dir: Path) -> str:
    """Let the template's end of an answer end responses, too, if the model does not stop at it by itself. Return a
    sentence about it; '' if nothing is added."""
    if not getattr(data, "as_chat", True) or (token_id := end_of_turn(encoder)) is None:
        return ""
    end_ids = read_end_ids(model_dir) | {encoder.tokenizer.eos_token_id}
    if token_id in end_ids:
        return ""
    encoder.turn_end_ids = (token_id,)
    text = encoder.tokenizer.decode([token_id], skip_special_tokens=False)
    named = ", ".join(map(str, sorted(end_ids - {None}))) or "none"
    return (
        f"the chat template ends an answer with {text} (token {token_id}), at which the model does not stop by its own "
        f"files (eos_token_id: {named}): responses end there, too"
    )
