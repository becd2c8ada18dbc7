"""The runner of groups whose responses are episodes: all of a group's episodes side by side, on one policy version.

gate: pinned to the version of the group
   +-- episodes with a session each --> the environment's process plays them
         outcome --> the recorded calls are a response
         failure --> again with a new session, up to environment.max_attempts; then the group's attempt fails
"""

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from onbeat.contracts.records import EpisodeWait
from onbeat.contracts.states import EpisodeFailureKind as Kind
from onbeat.environments import Outcome, Task
from onbeat.streams.codec import PromptTask, Response
from services.rollout import meters
from services.rollout.episodes.contract import EnvironmentRunner, EpisodeFailure, PlayRequest, PlayResult, Program
from services.rollout.episodes.episode import Episode, Generate, GroupContext
from services.rollout.episodes.recorder import Call, common_prompt, to_response
from services.rollout.episodes.rendering import Renderer
from services.rollout.inflight import Flight
from services.rollout.prompts import GroupFailed, PromptEncoder
from services.rollout.retries import delay_after

if TYPE_CHECKING:
    from services.rollout.episodes.server import SessionServer  # only rollouts of jobs with an environment need it

MAX_MESSAGE = 500  # characters of a failure
UNREACHABLE_S = 60.0  # longer than a server takes to start again
SHOWN_WAIT_S = 10.0  # a shorter wait for an environment is not worth a word


class EnvironmentFailed(Exception):
    """An episode has failed as often as the job allows; another rollout may have more luck. `kind`: of its last
    failure."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(f"{kind}: {message[:MAX_MESSAGE]}")
        self.kind = kind


@dataclass(frozen=True)
class PlayedGroup:
    prompt_token_ids: list[int]
    responses: list[Response]
    played_s: float


class GroupPlay:
    """The episodes of one attempt of a group."""

    def __init__(self, group: GroupContext, request: PlayRequest, failures: Counter[str]) -> None:
        """Take a request without sessions, and `failures`: failed tries by kind, to which new ones are added."""
        self._group, self._request, self._failures = group, request, failures
        self._num_samples = group.task.num_samples
        self._playing: list[Episode] = []
        self._finished: dict[int, tuple[list[Call], Outcome]] = {}
        self._started = time.monotonic()
        self._note = ""  # text that replaces the wait in reports

    @property
    def wait(self) -> EpisodeWait | None:
        """The wait of the episode that waits longest for its environment; None when none waits for long."""
        episode = max(self._playing, key=lambda playing: playing.waited_s, default=None)
        if episode is None or episode.waited_s < SHOWN_WAIT_S:
            return None
        return episode.wait(self._request.program.name, self._request.timeout_s)

    @property
    def doing(self) -> str:
        """The wait in words; of a cancelled group the one that it was cancelled in."""
        if self._note or (wait := self.wait) is None:
            return self._note
        waited_s = wait.waited_s // SHOWN_WAIT_S * SHOWN_WAIT_S  # heartbeats carry it: it should not change often
        return f"group {wait.group_id}: episode {wait.episode} waits for {wait.waits_for} for over {waited_s:.0f} s"

    @property
    def is_unanswered(self) -> bool:
        """Return whether the engine has been asked in this attempt, and has never answered."""
        return bool(self._group.calls["asked"]) and not self._group.calls["answered"]

    @property
    def num_waiting(self) -> int:
        """How many episodes hold no place in the engine: they wait for their environment, or have ended."""
        return self._num_samples - sum(episode.holds_place for episode in self._playing)

    async def play(self, server: "SessionServer", environments: EnvironmentRunner, max_attempts: int) -> PlayedGroup:
        """Play all episodes, each at most `max_attempts` times. Raises as `EpisodeRunner.play` does.

        Tries that fail because a server is away do not count for UNREACHABLE_S after the first of them.
        """
        attempt, num_failures, away_since = 1, 0, math.inf
        while missing := [index for index in range(self._num_samples) if index not in self._finished]:
            failure = await self._play_once(server, environments, missing, attempt)
            if failure is None:
                continue
            if failure.kind is Kind.UNREACHABLE:
                away_since = min(away_since, time.monotonic())
            if failure.kind is not Kind.UNREACHABLE or time.monotonic() - away_since >= UNREACHABLE_S:
                if attempt == max_attempts:
                    raise failure
                attempt += 1
            num_failures += 1
            self._note = f"{self._group.task.group_id}: {failure}; it is tried again"
            await asyncio.sleep(delay_after(num_failures))
            self._note = ""
        return await self._to_group()

    async def _play_once(
        self, server: "SessionServer", environments: EnvironmentRunner, indexes: Sequence[int], attempt: int
    ) -> EnvironmentFailed | None:
        """Play these episodes and keep what they gave. Return the first failure, of the worst kind. Raises the engine's
        error as soon as there is one."""
        self._playing = [Episode(self._group, index, attempt) for index in indexes]
        access = [server.open(episode) for episode in self._playing]
        request = replace(
            self._request, access=access, on_begin=self._begin, on_end=lambda index: server.close(access[index])
        )
        playing, broken = asyncio.create_task(environments.play(request)), self._group.broken
        ends: set[asyncio.Future[Any]] = {playing, broken}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if broken.done():
                raise broken.result()
            results = playing.result()
        except asyncio.CancelledError:
            self._note = self.doing
            raise
        finally:  # this may have been cancelled
            for episode_access in access:
                server.close(episode_access)
            playing.cancel()
            await asyncio.wait({playing})
            await asyncio.gather(*(episode.close() for episode in self._playing))
        failures = [self._settle(episode, result) for episode, result in zip(self._playing, results, strict=True)]
        reported = [failure for failure in failures if failure is not None]
        return min(reported, key=lambda failure: failure.kind is Kind.UNREACHABLE, default=None)

    def _begin(self) -> None:
        for episode in self._playing:
            episode.begin()

    def _settle(self, episode: Episode, result: PlayResult) -> EnvironmentFailed | None:
        calls = episode.calls
        if isinstance(result, Outcome):
            result = judge(result, calls, episode.refusal)
        if isinstance(result, Outcome):
            meters.EPISODES.labels(outcome="finished").inc()
            self._finished[episode.index] = (calls, result)
            return None
        meters.EPISODES.labels(outcome=result.kind).inc()
        self._failures[result.kind] += 1
        message = f"episode {episode.index} of environment {self._request.program.name}: {result.message}"
        return EnvironmentFailed(result.kind, message)

    async def _to_group(self) -> PlayedGroup:
        """Put the recorded calls together; other tasks get a turn between episodes."""
        episodes = [self._finished[index] for index in range(self._num_samples)]
        prompt_token_ids = common_prompt(calls for calls, _ in episodes)
        if not prompt_token_ids:
            message = "the prompts of its episodes have no first token in common, so the group has no prompt"
            raise GroupFailed("environment_failed", f"environment {self._request.program.name}: {message}")
        responses = []
        for calls, outcome in episodes:
            responses.append(to_response(calls, prompt_token_ids, outcome))
            await asyncio.sleep(0)
        return PlayedGroup(prompt_token_ids, responses, time.monotonic() - self._started)


class EpisodeRunner:
    """The runner of a rollout. `max_attempts`: tries of each episode in one attempt of its group, where its task names
    no number."""

    def __init__(
        self, encoder: PromptEncoder, environments: EnvironmentRunner, server: "SessionServer", max_attempts: int
    ) -> None:
        self._encoder, self._environments, self._server = encoder, environments, server
        self._max_attempts = max_attempts
        self._renderer = Renderer(encoder.prompts)

    def num_groups(self) -> int:
        """Return how many groups can be played at a time."""
        return self._environments.num_groups()

    async def play(self, flight: Flight, generate: Generate) -> PlayedGroup:
        """Play all episodes of a group, and add failed tries to `flight.failed_episodes`. When this is cancelled, all
        sessions end.

        Raises EnvironmentFailed; GroupFailed when the episodes have no prompt in common; and what `generate` raises,
        but for ValueError, which the environment gets.
        """
        request = to_request(flight.claim.task)
        messages, broken = request.task.messages, asyncio.get_running_loop().create_future()
        group = GroupContext(flight.claim.task, messages, generate, self._encoder, self._renderer, broken)
        flight.episodes = GroupPlay(group, request, flight.failed_episodes)
        max_attempts = flight.claim.task.environment.max_attempts or self._max_attempts
        played = await flight.episodes.play(self._server, self._environments, max_attempts)
        flight.episodes = None
        return played


def to_request(task: PromptTask) -> PlayRequest:
    """Return what the environment's process needs to know, without sessions."""
    environment, origin = task.environment, json.loads(task.reward_context_json or "{}")
    messages = [{"role": message.role, "content": message.content} for message in task.messages]
    return PlayRequest(
        program=Program(environment.name, environment.options_json or "{}", environment.memory_limit_mb),
        task=Task(
            messages=messages or [{"role": "user", "content": task.text}],
            question=origin.pop("question", ""),
            answer=origin.pop("answer", None),
            metadata=origin.pop("metadata", None) or {},
            origin=origin,
            seed=task.seed,
        ),
        timeout_s=environment.timeout_s,
    )


def judge(outcome: Outcome, calls: Sequence[Call], refusal: str) -> PlayResult:
    """Return the outcome, or the failure that it is; its numbers are within bounds (`EnvironmentProcess`). `refusal`:
    of a call, if there was one."""
    if not calls:
        message = "it ended without a call of the policy, so there is nothing to train on"
        message += f"; a call was refused: {refusal}" if refusal else ""
        return EpisodeFailure(Kind.NO_CALL, message)
    unknown = sorted(outcome.turn_rewards.keys() - {call.call_id for call in calls})
    if unknown:
        message = f"turn_rewards names {unknown[0]!r}, which is not a call of this episode"
        return EpisodeFailure(Kind.INVALID, message)
    return outcome
