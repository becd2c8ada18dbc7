"""The check of a job's stops before it begins: a stop that the model can never sample would only be noticed by its
absence."""

from onbeat.config import JobConfig
from services.prompts.tokenizer import load_tokenizer


def check_stops(source: str, config: JobConfig) -> None:
    """Raise ValueError for a stop token that the model lacks, and for a stop string that its text never has."""
    rollout, model = config.rollout, config.model.path
    if not rollout.stop and not rollout.stop_token_ids:
        return
    tokenizer = load_tokenizer(source)
    if unknown := [token_id for token_id in rollout.stop_token_ids if token_id >= len(tokenizer)]:
        raise ValueError(
            f"rollout.stop_token_ids: {unknown[0]} is not one of the {len(tokenizer)} tokens of {model}; take the id "
            "from its tokenizer.json, or name the token's text in rollout.stop"
        )
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    for stop in rollout.stop:
        inside = [content for content in special if content in stop and content != stop]
        if inside:
            raise ValueError(
                f"rollout.stop: {stop!r} has the special token {max(inside, key=len)} of {model} inside, and the text "
                f"of a response has no special tokens; use {max(inside, key=len)!r} alone"
            )
