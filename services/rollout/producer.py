"""The steps of one group: prompt -> generate, pinned to its policy version -> score -> RolloutGroup."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from onbeat.streams.codec import (
    GroupFailure,
    PromptTask,
    Response,
    RolloutGroup,
    Timings,
    VersionSpan,
    check_group,
    check_logprobs,
)
from services.rollout import meters
from services.rollout.engines.interface import GeneratedResponse, Sampling
from services.rollout.episodes.runner import EpisodeRunner
from services.rollout.gate import VersionGate
from services.rollout.inflight import Flight, Stage
from services.rollout.meters import BusyMeter, Interval, TokenRate, marks_of, union_of
from services.rollout.prompts import GroupFailed, PromptEncoder, prompt_text
from services.rollout.puller import VersionGone
from services.rollout.rewards.outcome import RewardRefused, RewardRequest, Score, weigh
from services.rollout.rewards.scorer import Scorer

MAX_REMEMBERED = 1000  # groups that were given back here; another rollout may have finished them
LONGEST_S = 3600.0  # the deadline of a task that names none, as every wait has one


class DeadlineExceeded(Exception):
    """A group was not ready in time. Another attempt may succeed."""


@dataclass(frozen=True)
class Attempts:
    """The largest numbers of attempts."""

    reward: int  # seconds to score a response, if its reward names no number
    group: int  # seconds to produce a group


class GroupProducer:
    def __init__(
        self,
        gate: VersionGate,
        encoder: PromptEncoder,
        rewards: Scorer,
        max_attempts: Attempts,
        episodes: EpisodeRunner | None = None,
    ) -> None:
        """Take the parts of a job's session. `episodes` is None for a job without an environment."""
        self._gate = gate
        self._encoder = encoder
        self._rewards = rewards
        self._max_attempts = max_attempts
        self._episodes = episodes
        self._last_errors: dict[str, str] = {}  # group id -> why it was given back
        self._failed_episodes: dict[str, Counter[str]] = {}  # group id -> failed attempts at episodes, by kind
        self.busy = BusyMeter()
        self.token_rate = TokenRate()

    async def produce(self, flight: Flight) -> RolloutGroup:
        """Return a group with responses, or with the reason why there are none. It has yet to say who claimed it.

        Raises errors that another attempt may cure: DeadlineExceeded, WeightsError, VersionMismatch, RewardUnavailable,
        EnvironmentFailed, and the errors of engines.
        """
        task = flight.claim.task
        deadline_s = task.deadline_s or LONGEST_S
        group = RolloutGroup(
            group_id=task.group_id,
            iteration=task.iteration,
            is_evaluation=task.is_evaluation,
            policy_version=task.policy_version,
            prompt_text=prompt_text(task),
            data_row=task.data_row if task.HasField("data_row") else None,
        )
        try:
            self._check_attempts(flight)
            deadline = asyncio.get_running_loop().time() + deadline_s
            async with asyncio.timeout_at(deadline) as timeout:
                if task.HasField("environment"):
                    await self._play(flight, group)
                else:
                    await self._respond(flight, group, deadline)
            refuse_broken(group)
        except GroupFailed as failure:
            del group.responses[:]
            group.failure.CopyFrom(GroupFailure(kind=failure.kind, message=str(failure)))
        except TimeoutError as error:
            if not timeout.expired():
                raise
            still = ": ".join(filter(None, (flight.stage, flight.doing)))
            message = f"not ready {deadline_s:g} s after its claim (rollout.group_deadline_s), still {still}"
            raise DeadlineExceeded(message) from error
        group.timings.worker_busy_s = self.busy.seconds(task.iteration)
        group.failed_episodes.update(self._failed_episodes.pop(task.group_id, {}))
        self._last_errors.pop(task.group_id, None)
        return group

    def num_playable(self) -> int | None:
        """Return how many groups can be played in environments at a time; None for a job without episodes."""
        return self._episodes.num_groups() if self._episodes is not None else None

    def remember_error(self, task: PromptTask, reason: str) -> None:
        """Keep the reason of an error. The group's failure names it if the group runs out of attempts here."""
        self._last_errors[task.group_id] = reason
        forget_oldest(self._last_errors)

    def _check_attempts(self, flight: Flight) -> None:
        task, attempt = flight.claim.task, flight.claim.attempt
        if attempt > self._max_attempts.group:
            last = self._last_errors.get(task.group_id, "not known here, see the logs of the other rollouts")
            raise GroupFailed(
                "environment_failed" if task.HasField("environment") else "generation_failed",
                f"given up after {self._max_attempts.group} attempts (rollout.max_group_attempts); last error: {last}",
            )

    async def _respond(self, flight: Flight, group: RolloutGroup, deadline: float) -> None:
        """Fill the group with one response per sample, and score them."""
        task = flight.claim.task
        requests = self._reward_requests(task)
        for request in requests:
            self._rewards.source(request.name, request.options)  # a missing service fails before anything is generated
        prompt_token_ids = self._encoder.encode(task)
        group.prompt_token_ids.extend(prompt_token_ids)
        with final_when_gone(task):
            responses = await self._generate(flight, prompt_token_ids, group.timings)
        texts = [response.text for response in responses]
        scores = await self._score(
            [replace(unanswered, responses=texts) for unanswered in requests], deadline, group.timings
        )
        lengths = await self._token_lengths(responses)
        group.responses.extend(map(to_response, responses, scores, lengths))

    async def _play(self, flight: Flight, group: RolloutGroup) -> None:
        """Fill the group with episodes. `generate_s` is then the time in which at least one of their calls was in the
        engine, and `score_s` the time in which all of them waited for their environment."""
        assert self._episodes is not None, "a job whose tasks have an environment has one in its configuration"
        task = flight.claim.task
        calls: list[Interval] = []  # times of calls in the engine
        failures = self._failed_episodes.setdefault(task.group_id, Counter())
        forget_oldest(self._failed_episodes)

        async def generate(prompt_token_ids: list[int], sampling: Sampling) -> GeneratedResponse:
            started = time.monotonic()
            try:
                with self.busy.running(task.iteration, task.is_evaluation):
                    responses = await engine.generate(prompt_token_ids, 1, sampling, task.policy_version)
            finally:
                calls.append((started, time.monotonic()))
            if len(responses) != 1 or not responses[0].token_ids:
                raise RuntimeError("the engine gave no response to a call of an environment")
            self._count([responses[0]])
            return responses[0]

        with final_when_gone(task):
            async with self._gate.pinned(task.policy_version) as engine:
                flight.stage = Stage.GENERATING
                played = await self._episodes.play(flight, generate, failures)
        began_at = time.monotonic() - played.played_s
        flight.stage = Stage.SCORING
        group.prompt_token_ids.extend(played.prompt_token_ids)
        group.responses.extend(played.responses)
        in_engine = union_of(calls)
        group.timings.generate_s = sum(end - start for start, end in in_engine)
        group.timings.score_s = max(0.0, played.played_s - group.timings.generate_s)
        for start, end in marks_of(in_engine):
            group.timings.in_engine.add(start_s=max(0.0, start - began_at), end_s=max(0.0, end - began_at))
        meters.GENERATE_S.observe(group.timings.generate_s)
        meters.SCORE_S.observe(group.timings.score_s)

    async def _generate(self, flight: Flight, prompt_token_ids: list[int], timings: Timings) -> list[GeneratedResponse]:
        task = flight.claim.task
        sampling = Sampling(task.max_response_tokens, task.temperature, task.seed)
        async with self._gate.pinned(task.policy_version) as engine:
            flight.stage = Stage.GENERATING
            started = time.monotonic()
            with self.busy.running(task.iteration, task.is_evaluation):
                try:
                    responses = await engine.generate(
                        prompt_token_ids, task.num_samples, sampling, expected_version=task.policy_version
                    )
                except ValueError as error:
                    raise GroupFailed("generation_failed", f"the engine refuses the request: {error}") from error
            timings.generate_s = time.monotonic() - started
        if len(responses) != task.num_samples:
            raise RuntimeError(f"the engine gave {len(responses)} of {task.num_samples} responses")
        flight.stage = Stage.SCORING
        self._count(responses)
        meters.GENERATE_S.observe(timings.generate_s)
        return responses

    def _count(self, responses: Sequence[GeneratedResponse]) -> None:
        num_tokens = sum(len(response.token_ids) for response in responses)
        self.token_rate.add(num_tokens)
        meters.RESPONSE_TOKENS.inc(num_tokens)

    def _reward_requests(self, task: PromptTask) -> list[RewardRequest]:
        """Build a request to each reward, with no responses yet."""
        return [
            RewardRequest(
                name=reward.name,
                options=json.loads(reward.options_json or "{}"),
                context=json.loads(task.reward_context_json or "{}"),
                responses=[],
                timeout_s=reward.timeout_s,
                memory_limit_mb=reward.memory_limit_mb,
                max_attempts=reward.max_attempts or self._max_attempts.reward,
                weight=reward.weight if reward.part else 1.0,
                part=reward.part,
            )
            for reward in task.rewards or [task.reward]
        ]

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


def forget_oldest(notes: dict[str, Any]) -> None:
    if len(notes) > MAX_REMEMBERED:
        del notes[next(iter(notes))]


@contextmanager
def final_when_gone(task: PromptTask) -> Iterator[None]:
    """Fail an evaluation's group when its version is gone for good. A training group is handed back instead, as a
    trainer that replays publishes the version again."""
    try:
        yield
    except VersionGone as error:
        if not task.is_evaluation:
            raise
        raise GroupFailed("version_gone", f"training has moved on: {error}") from error


def to_response(generated: GeneratedResponse, score: Score, token_lengths: list[int]) -> Response:
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
        token_lengths=token_lengths,
    )


def refuse_broken(group: RolloutGroup) -> None:
    """Raise GroupFailed for an empty response, a logprob that is not finite or a gap in the versions: the ledger
    would refuse the group."""
    try:
        check_group(group)
        check_logprobs(group)
    except ValueError as error:
        raise GroupFailed("generation_failed", f"the engine's output is not usable: {error}") from error
