"""Makes one group: prompt -> generate, pinned to its policy version -> score -> RolloutGroup."""

import asyncio
import json
import time
from collections.abc import Sequence

from onbeat.streams.codec import (
    GroupFailure,
    PromptTask,
    Response,
    RolloutGroup,
    Timings,
    VersionSpan,
    check_group,
)
from services.rollout import meters
from services.rollout.engine import Engine, GeneratedResponse, Sampling
from services.rollout.gate import VersionGate
from services.rollout.inflight import Flight, Stage
from services.rollout.meters import BusyMeter, TokenRate
from services.rollout.prompts import GroupFailed, PromptEncoder, prompt_text
from services.rollout.puller import VersionGone
from services.rollout.rewards.pool import RewardPool
from services.rollout.rewards.process import RewardError, RewardRequest, Score


class DeadlineExceeded(Exception):
    """A group was not ready in time; another attempt may be."""


class GroupProducer:
    def __init__(
        self,
        engine: Engine,
        gate: VersionGate,
        encoder: PromptEncoder,
        rewards: RewardPool,
        worker_id: str,
        reward_attempts: int,
        max_group_attempts: int,
    ) -> None:
        self._engine = engine
        self._gate = gate
        self._encoder = encoder
        self._rewards = rewards
        self._worker_id = worker_id
        self._reward_attempts = reward_attempts
        self._max_group_attempts = max_group_attempts
        self._last_errors: dict[str, str] = {}  # group id -> why it was given back
        self.busy = BusyMeter()
        self.token_rate = TokenRate()

    async def produce(self, flight: Flight) -> RolloutGroup:
        """A group with responses, or with the reason why there are none.

        Raises what another attempt may cure: DeadlineExceeded, WeightsError, VersionMismatch, and what engines raise.
        """
        task = flight.claim.task
        group = RolloutGroup(
            group_id=task.group_id,
            iteration=task.iteration,
            is_evaluation=task.is_evaluation,
            policy_version=task.policy_version,
            prompt_text=prompt_text(task),
            worker_id=self._worker_id,
        )
        try:
            self._check_attempts(flight)
            prompt_token_ids = self._encoder.encode(task)
            group.prompt_token_ids.extend(prompt_token_ids)
            async with asyncio.timeout(task.deadline_s or None) as deadline:
                responses = await self._generate(flight, prompt_token_ids, group.timings)
                scores = await self._score(flight, responses, group.timings)
            group.responses.extend(map(to_response, responses, scores))
            refuse_broken(group)
        except GroupFailed as failure:
            del group.responses[:]
            group.failure.CopyFrom(GroupFailure(kind=failure.kind, message=str(failure)))
        except TimeoutError as error:
            if not deadline.expired():
                raise
            message = (
                f"not ready {task.deadline_s:g} s after its claim (rollout.group_deadline_s), still {flight.stage}"
            )
            raise DeadlineExceeded(message) from error
        group.timings.worker_busy_s = self.busy.seconds(task.iteration)
        self._last_errors.pop(task.group_id, None)
        return group

    def remember_error(self, task: PromptTask, reason: str) -> None:
        """Named in the failure, should this group run out of attempts here."""
        self._last_errors[task.group_id] = reason

    def _check_attempts(self, flight: Flight) -> None:
        task, attempt = flight.claim.task, flight.claim.attempt
        if attempt > self._max_group_attempts:
            last = self._last_errors.get(task.group_id, "not known here, see the logs of the other rollouts")
            raise GroupFailed(
                "generation_failed",
                f"given up after {self._max_group_attempts} attempts (rollout.max_group_attempts); last error: {last}",
            )

    async def _generate(self, flight: Flight, prompt_token_ids: list[int], timings: Timings) -> list[GeneratedResponse]:
        try:
            return await self._generate_pinned(flight, prompt_token_ids, timings)
        except VersionGone as error:
            if not flight.claim.task.is_evaluation:  # training waits for a trainer that replays
                raise
            raise GroupFailed("version_gone", f"training has moved on: {error}") from error

    async def _generate_pinned(
        self, flight: Flight, prompt_token_ids: list[int], timings: Timings
    ) -> list[GeneratedResponse]:
        task = flight.claim.task
        sampling = Sampling(task.max_response_tokens, task.temperature, task.seed)
        async with self._gate.pinned(task.policy_version):
            flight.stage = Stage.GENERATING
            started = time.monotonic()
            with self.busy.running(task.iteration):
                try:
                    responses = await self._engine.generate(
                        prompt_token_ids, task.num_samples, sampling, expected_version=task.policy_version
                    )
                except ValueError as error:
                    raise GroupFailed("generation_failed", f"the engine refuses the request: {error}") from error
            timings.generate_s = time.monotonic() - started
        if len(responses) != task.num_samples:
            raise RuntimeError(f"the engine gave {len(responses)} of {task.num_samples} responses")
        flight.stage = Stage.SCORING
        num_tokens = sum(len(response.token_ids) for response in responses)
        self.token_rate.add(num_tokens)
        meters.RESPONSE_TOKENS.inc(num_tokens)
        meters.GENERATE_S.observe(timings.generate_s)
        return responses

    async def _score(self, flight: Flight, responses: Sequence[GeneratedResponse], timings: Timings) -> list[Score]:
        task = flight.claim.task
        request = RewardRequest(
            name=task.reward.name,
            options=json.loads(task.reward.options_json or "{}"),
            context=json.loads(task.reward_context_json or "{}"),
            responses=[response.text for response in responses],
            timeout_s=task.reward.timeout_s,
            memory_limit_mb=task.reward.memory_limit_mb,
            max_attempts=self._reward_attempts,
        )
        started = time.monotonic()
        try:
            scores = await self._rewards.score(request)
        except RewardError as error:
            raise GroupFailed("reward_failed", f"reward {task.reward.name}: {error}") from error
        finally:
            timings.score_s = time.monotonic() - started
        meters.SCORE_S.observe(timings.score_s)
        return scores


def to_response(generated: GeneratedResponse, score: Score) -> Response:
    return Response(
        token_ids=generated.token_ids,
        rollout_logprobs=generated.rollout_logprobs,
        version_spans=[
            VersionSpan(policy_version=span.policy_version, start=span.start, end=span.end)
            for span in generated.version_spans
        ],
        finish_reason=generated.finish_reason,
        reward=score.reward,
        reward_parts=score.parts,
        text=generated.text,
    )


def refuse_broken(group: RolloutGroup) -> None:
    """An empty response, a logprob that is not finite or a gap in the versions would be refused at the door."""
    try:
        check_group(group)
    except ValueError as error:
        raise GroupFailed("generation_failed", f"the engine's output is not usable: {error}") from error
