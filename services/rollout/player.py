"""Groups that an environment plays: their responses are episodes, played side by side on one policy version."""

import time

from onbeat.contracts.intervals import Interval, total_s, union_of
from onbeat.engines import GeneratedResponse, Sampling
from onbeat.streams.codec import RolloutGroup
from services.rollout import meters
from services.rollout.episodes.runner import EpisodeRunner
from services.rollout.generation import Generation
from services.rollout.inflight import Flight, Stage
from services.rollout.meters import marks_of


class Player:
    def __init__(self, generation: Generation, episodes: EpisodeRunner) -> None:
        self._generation = generation
        self._episodes = episodes

    def num_playable(self) -> int:
        """Return how many groups can be played at a time."""
        return self._episodes.num_groups()

    async def fill(self, flight: Flight, group: RolloutGroup, deadline: float) -> None:
        """Fill the group with episodes; the caller cancels this at the deadline. `generate_s` is the time in which at
        least one call of the episodes was in the engine, and `score_s` the time in which all of them waited for their
        environment."""
        in_engine: list[Interval] = []
        async with self._generation.pinned(flight) as generate:

            async def answer(prompt_token_ids: list[int], sampling: Sampling) -> GeneratedResponse:
                started = time.monotonic()
                try:
                    (response,) = await generate(prompt_token_ids, 1, sampling)
                finally:
                    in_engine.append((started, time.monotonic()))
                if not response.token_ids:
                    raise RuntimeError("the engine gave no token to a call of an environment")
                return response

            flight.stage = Stage.GENERATING
            played = await self._episodes.play(flight, answer)
        began_at = time.monotonic() - played.played_s
        flight.stage = Stage.SCORING
        group.prompt_token_ids.extend(played.prompt_token_ids)
        group.responses.extend(played.responses)
        calls = union_of(in_engine)
        group.timings.generate_s = total_s(calls)
        group.timings.score_s = max(0.0, played.played_s - group.timings.generate_s)
        for start, end in marks_of(calls):
            group.timings.in_engine.add(start_s=max(0.0, start - began_at), end_s=max(0.0, end - began_at))
        meters.GENERATE_S.observe(group.timings.generate_s)
        meters.SCORE_S.observe(group.timings.score_s)
