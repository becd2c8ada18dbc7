"""The narrow interface between the rollout loop and the engine that generates tokens: what an engine promises, and the
errors that it raises. docs/engines.md has a whole engine.

An engine holds exactly one policy version at a time and refuses requests that are pinned to another one.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class VersionSpan:
    """Tokens `start:end` of a response were sampled by the weights of `policy_version`."""

    policy_version: int
    start: int
    end: int


@dataclass(frozen=True)
class Sampling:
    """The parameters of sampling. `rollout_logprobs` are always those of the distribution that was sampled, but at
    temperature 0 those of the model itself.

    Groups that are trained have a temperature above 0 and the whole distribution, without `min_tokens`.
    """

    max_response_tokens: int
    temperature: float  # 0: the likeliest token
    seed: int
    top_p: float = 1.0  # draw from the likeliest tokens that together have this probability
    top_k: int = 0  # draw from so many of the likeliest tokens; 0: from all
    min_p: float = 0.0  # draw from the tokens that have this share of the likeliest one's probability
    min_tokens: int = 0  # no end of the sequence and no stop before so many tokens
    stop: tuple[str, ...] = ()  # the token that completes one of them is the last one; the text ends before it
    stop_token_ids: tuple[int, ...] = ()  # these end a response as the end of the sequence does


@dataclass(frozen=True)
class ChatSampling(Sampling):
    """The parameters of a chat with the policy."""


@dataclass(frozen=True)
class TextPiece:
    text: str  # the new text
    num_tokens: int
    finish_reason: FinishReason | None  # set on the last piece


@dataclass(frozen=True)
class GeneratedResponse:
    token_ids: list[int]  # [T], the end-of-sequence token included when the model emitted it
    rollout_logprobs: list[float]  # [T], natural log, of the sampled token after temperature
    finish_reason: FinishReason
    version_spans: list[VersionSpan]  # cover 0:T without gaps
    text: str
    num_cached_tokens: int = 0  # prompt tokens found in the engine's cache; 0 also if the engine does not report them


class VersionMismatch(Exception):
    """The engine serves another policy version than the request is pinned to."""

    def __init__(self, expected: int, served: int | None) -> None:
        super().__init__(f"request is pinned to policy version {expected}, the engine serves {served}")
        self.expected = expected
        self.served = served


class EngineBroken(Exception):
    """The engine cannot go on; the process has to be replaced."""


class EngineDied(EngineBroken):
    """The engine died while it generated a group. The group may be the cause, so this counts as an attempt at it."""


class BadWeightFile(Exception):
    """A weight file is missing, broken, or holds other tensors than the model."""


class Engine(Protocol):
    """The life cycle is start -> (generate* -> drain -> load)* -> stop. `load` is only legal with nothing in flight.

    Four properties are optional: `doing`, the step of the start in words or ""; `is_dead`, true when processes
    of the engine have died, perhaps while they were idle; `num_cancelled_tokens`, a count of the tokens that were
    sampled for calls of `generate` that were cancelled; `takes`, a set of names: the fields of `Sampling` with a
    default that the engine follows, and "greedy" for temperature 0. Without `takes` it follows none: responses are cut
    at stops afterwards, and requests with the others are refused.
    """

    async def start(self, model_dir: Path, policy_version: int) -> None:
        """Serve the HF-layout model in `model_dir` (config, tokenizer, safetensors) as `policy_version`.

        Raises EngineBroken where the process has to be replaced. Any other error means that this engine cannot load the
        model: its innermost cause becomes the job's error unless another rollout can, and the process goes on with a
        new engine for the next job.
        """

    async def generate(
        self, prompt_token_ids: list[int], num_samples: int, sampling: Sampling, expected_version: int
    ) -> list[GeneratedResponse]:
        """Draw `num_samples` responses.

        Raises VersionMismatch if another version is being served, ValueError for a request that no attempt can serve.
        Any other error is taken for a defect of the engine.
        """

    async def load(self, policy_version: int, weights_file: Path, arrivals: AsyncIterator[Sequence[str]]) -> None:
        """Move to `policy_version`; caches of older weights are dropped.

        weights_file: safetensors (HF names) with a complete header, whose tensors may still change under the engine.
        arrivals: names of tensors whose bytes are final and verified. Each is read from the file once it is named, and
            until `load` returns; one that is never named is the same as in the version served before. Over the whole
            load, not in each batch, names come in whole modules (`whole_modules`), each once.

        Raises BadWeightFile if the file is of another model; what `arrivals` raises; ValueError if required tensors
        did not arrive. After any error the engine serves no version until a later load names every tensor.
        """

    def version(self) -> int | None:
        """Return the served policy version; None before start and after a failed load."""

    def capacity(self) -> int:
        """Return how many responses can be generated concurrently without queueing."""

    async def stop(self) -> None:
        """Release processes and memory. Safe to call twice."""


@runtime_checkable
class StreamingEngine(Protocol):
    """An optional interface of an engine, for chats. Without it, a chat's answer comes in one piece, by `generate`."""

    def stream(
        self, prompt_token_ids: list[int], sampling: ChatSampling, expected_version: int
    ) -> AsyncGenerator[TextPiece]:
        """Yield one response as it is generated, all of it by `expected_version`; raises as `generate` does.

        The last piece has the finish reason. Closing the generator before that frees the response's place at once.
        """
