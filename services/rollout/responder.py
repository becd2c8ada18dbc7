"""Groups that rewards score: one response to each sample of the prompt, and the scores of these responses."""

import asyncio
import json
import time
from dataclasses import replace

from onbeat.engines import GeneratedResponse
from onbeat.streams.codec import PromptTask, Response, RolloutGroup, Timings, VersionSpan
from services.rollout import meters
from services.rollout.generation import Generation
from services.rollout.inflight import Flight, Stage
from services.rollout.prompts import GroupFailed, PromptEncoder
from services.rollout.rewards.outcome import RewardRefused, RewardRequest, Score, weigh
from services.rollout.rewards.scorer import Scorer
from services.rollout.sampling import sampling_of

NO_SCORE = Score(None, {})  # a job without rewards learns from a teacher alone


class Responder:
    def __init__(self, generation: Generation, encoder: PromptEncoder, rewards: Scorer, max_attempts: int) -> None:
        """Take the parts of a job's session. `max_attempts`: to score a response, if its reward names no number."""
        self._generation = generation
        self._encoder = encoder
        self._rewards = rewards
        self._max_attempts = max_attempts

    def num_playable(self) -> None:
        """Return None: these groups have no episodes."""

    async def fill(self, flight: Flight, group: RolloutGroup, deadline: float) -> None:
        """Fill the group with one response per sample, and score them."""
        task = flight.claim.task
        requests = reward_requests(task, self._max_attempts)
        for request in requests:
            self._rewards.source(request.name, request.options)  # a missing service fails before anything is generated
        prompt_token_ids = self._encoder.encode(task)
        group.prompt_token_ids.extend(prompt_token_ids)
        group.teacher_prompt_token_ids.extend(self._encoder.encode_for_teacher(task))
        responses = await self._generate(flight, prompt_token_ids, group.timings)
        texts = [response.text for response in responses]
        ending = self._encoder.ending(task)
        requests = [replace(request, context=request.context | ending, responses=texts) for request in requests]
        scores = [NO_SCORE] * len(texts)
        if requests:
            scores = await self._score(requests, deadline, group.timings)
        lengths = await self._token_lengths(responses)
        group.responses.extend(map(to_response, responses, scores, lengths))

    async def _generate(self, flight: Flight, prompt_token_ids: list[int], timings: Timings) -> list[GeneratedResponse]:
        task = flight.claim.task
        sampling = sampling_of(task, self._encoder, task.seed)
        async with self._generation.pinned(flight) as generate:
            flight.stage = Stage.GENERATING
            started = time.monotonic()
            try:
                responses = await generate(prompt_token_ids, task.num_samples, sampling)
            except ValueError as error:
                raise GroupFailed("generation_failed", f"the engine refuses the request: {error}") from error
            timings.generate_s = time.monotonic() - started
        flight.stage = Stage.SCORING
        meters.GENERATE_S.observe(timings.generate_s)
        return responses

    async def _token_lengths(self, responses: list[GeneratedResponse]) -> list[list[int]]:
        """Return the lengths of each response's tokens; other tasks get a turn between responses."""
        lengths = []
        for response in responses:
            lengths.append(self._encoder.token_lengths(response.token_ids, response.text))
            await asyncio.sleep(0)
        return lengths

    async def _score(self, requests: list[RewardRequest], deadline: float, timings: Timings) -> list[Score]:
        """Ask each reward in turn; return the weighted sums."""
        started, scores = time.monotonic(), []
        try:
            for request in requests:
                scores.append(await self._rewards.score(request, deadline))
            weighed = weigh(requests, scores)
        except RewardRefused as error:
            raise GroupFailed("reward_failed", f"reward {request.name}: {error}") from error
        finally:
            timings.score_s = time.monotonic() - started
        meters.SCORE_S.observe(timings.score_s)
        return weighed


def reward_requests(task: PromptTask, max_attempts: int) -> list[RewardRequest]:
    """Build a request to each reward, with no responses yet. `max_attempts`: where the reward names no number."""
    return [
        RewardRequest(
            name=reward.name,
            options=json.loads(reward.options_json or "{}"),
            context=json.loads(task.reward_context_json or "{}"),
            responses=[],
            timeout_s=reward.timeout_s,
            memory_limit_mb=reward.memory_limit_mb,
            max_attempts=reward.max_attempts or max_attempts,
            weight=reward.weight if reward.part else 1.0,
            part=reward.part,
            seed=task.seed,
        )
        for reward in task.rewards or ([task.reward] if task.HasField("reward") else [])
    ]


def to_response(generated: GeneratedResponse, score: Score, token_lengths: list[int]) -> Response:
    return Response(
        token_ids=generated.token_ids,
        rollout_logprobs=generated.rollout_logprobs,
        version_spans=[
            VersionSpan(policy_version=span.policy_version, start=span.start, end=span.end)
            for span in generated.version_spans
        ],
        finish_reason=generated.finish_reason,
        reward=0.0 if score.reward is None else score.reward,
        has_no_reward=score.reward is None,
        reward_parts=score.parts,
        text=generated.text,
        token_lengths=token_lengths,
    )
