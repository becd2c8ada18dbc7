"""Generation for groups: pinned to the group's policy version, and counted in busy seconds and tokens."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from onbeat.engines import Engine, GeneratedResponse, Sampling
from services.rollout import meters
from services.rollout.gate import VersionGate
from services.rollout.inflight import Flight
from services.rollout.meters import BusyMeter, TokenRate
from services.rollout.prompts import GroupFailed, PromptEncoder
from services.rollout.puller import VersionGone
from services.rollout.sampling import check_taken, ended

# Prompt's token ids, number of responses, sampling -> responses
PinnedGenerate = Callable[[list[int], int, Sampling], Awaitable[list[GeneratedResponse]]]


class Generation:
    def __init__(self, gate: VersionGate, encoder: PromptEncoder) -> None:
        self._gate, self._encoder = gate, encoder
        self.busy = BusyMeter()
        self.token_rate = TokenRate()
        self._num_cancelled_tokens = 0  # counted so far, of those of the engine

    @asynccontextmanager
    async def pinned(self, flight: Flight) -> AsyncIterator[PinnedGenerate]:
        """Yield a function that generates responses on the group's policy version, and counts their tokens in the
        flight. Raises as `VersionGate.pinned`.

        An evaluation's group fails when its version is gone for good. A training group is handed back instead, as a
        trainer that replays publishes the version again.
        """
        task = flight.claim.task
        try:
            async with self._gate.pinned(task.policy_version) as engine:

                async def generate(
                    prompt_token_ids: list[int], num_samples: int, sampling: Sampling
                ) -> list[GeneratedResponse]:
                    check_taken(engine, sampling)
                    try:
                        with self.busy.running(task.iteration, task.is_evaluation):
                            responses = await engine.generate(
                                prompt_token_ids, num_samples, sampling, expected_version=task.policy_version
                            )
                    except asyncio.CancelledError:
                        flight.num_tokens += self._take_cancelled_tokens(engine)
                        raise
                    if len(responses) != num_samples:
                        raise RuntimeError(f"the engine gave {len(responses)} of {num_samples} responses")
                    responses = ended(engine, responses, sampling, self._encoder)
                    num_tokens = sum(len(response.token_ids) for response in responses)
                    flight.num_tokens += num_tokens
                    self.token_rate.add(num_tokens)
                    meters.RESPONSE_TOKENS.inc(num_tokens)
                    return responses

                yield generate
        except VersionGone as error:
            if not task.is_evaluation:
                raise
            raise GroupFailed("version_gone", f"training has moved on: {error}") from error

    def _take_cancelled_tokens(self, engine: Engine) -> int:
        """Return the tokens of cancelled calls since the last time, as far as the engine reports them."""
        before, self._num_cancelled_tokens = self._num_cancelled_tokens, getattr(engine, "num_cancelled_tokens", 0)
        return self._num_cancelled_tokens - before
