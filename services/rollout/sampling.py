"""The sampling that a task asks the engine for: its numbers, and all that ends a response."""

from onbeat.engines import Engine, GeneratedResponse, Sampling
from onbeat.streams.codec import PromptTask
from services.rollout.engines.stops import cut_at_stop
from services.rollout.prompts import PromptEncoder

STOPS = {"stop", "stop_token_ids"}  # an engine that does not know them generates more, which is cut off


def sampling_of(task: PromptTask, encoder: PromptEncoder, seed: int, max_tokens: int | None = None) -> Sampling:
    """Return the sampling of one response. A stop string that is a special token of the model is taken as that token:
    texts of responses are without special tokens."""
    special = special_tokens(encoder) if task.stop else {}
    token_ids = [*task.stop_token_ids, *(special[stop] for stop in task.stop if stop in special)]
    return Sampling(
        max_response_tokens=task.max_response_tokens if max_tokens is None else max_tokens,
        temperature=task.temperature,
        seed=seed,
        top_p=task.top_p if task.HasField("top_p") else 1.0,
        top_k=task.top_k,
        min_p=task.min_p,
        min_tokens=task.min_tokens if max_tokens is None else min(task.min_tokens, max_tokens),
        stop=tuple(stop for stop in task.stop if stop not in special),
        stop_token_ids=(*token_ids, *encoder.turn_end_ids),
    )


def special_tokens(encoder: PromptEncoder) -> dict[str, int]:
    added = encoder.tokenizer.added_tokens_decoder.items()
    return {token.content: token_id for token_id, token in added if token.special}


def check_taken(engine: Engine, sampling: Sampling) -> None:
    """Raise ValueError for what the engine does not follow; stops aside, at which its responses can be cut."""
    defaults = Sampling(sampling.max_response_tokens, sampling.temperature, sampling.seed)
    asked = {name for name in vars(defaults) if getattr(sampling, name) != getattr(defaults, name)}
    asked |= {"greedy"} if sampling.temperature == 0 else set()
    if unknown := sorted(asked - STOPS - taken_by(engine)):
        name = type(engine).__name__
        raise ValueError(
            f"the engine {name} does not follow {', '.join(unknown)} of the evaluation (`takes`, docs/engines.md); "
            "leave them out, or use --engine vllm"
        )


def ended(
    engine: Engine, responses: list[GeneratedResponse], sampling: Sampling, encoder: PromptEncoder
) -> list[GeneratedResponse]:
    """Return the responses as far as their first stop."""
    asked = {name for name in STOPS if getattr(sampling, name)}
    if asked <= taken_by(engine):
        return responses
    return [cut_at_stop(response, encoder.decode, sampling) for response in responses]


def taken_by(engine: Engine) -> frozenset[str]:
    names: frozenset[str] = getattr(engine, "takes", frozenset())
    return names
