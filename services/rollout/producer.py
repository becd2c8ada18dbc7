"""The way of one group, whatever fills it: attempts are counted, the deadline holds, a failure is recorded as such."""

import asyncio
from collections import Counter
from typing import Any, Protocol

from onbeat.config.rollout import RolloutConfig
from onbeat.streams.codec import GroupFailure, PromptTask, RolloutGroup, check_group, check_logprobs
from services.rollout.inflight import Flight
from services.rollout.meters import BusyMeter
from services.rollout.prompt_decoder import PromptDecoder
from services.rollout.prompts import GroupFailed, prompt_text
from services.rollout.rewards.truncation import reward_truncated

MAX_REMEMBERED = 1000  # groups that were given back here; another rollout may have finished them
LONGEST_S = 3600.0  # the deadline of a task that names none, as every wait has one


class DeadlineExceeded(Exception):
    """A group was not ready in time. Another attempt may succeed."""


class GroupFiller(Protocol):
    """The part that fills groups: a `Responder` where rewards score them, a `Player` where an environment plays."""

    async def fill(self, flight: Flight, group: RolloutGroup, deadline: float) -> None:
        """Add the prompt's tokens, the responses and the timings, and move the flight from stage to stage. The caller
        cancels this at the deadline (of the event loop's clock).

        Raises GroupFailed, and errors that another attempt may cure: WeightsError, VersionMismatch, RewardUnavailable,
        EnvironmentFailed, and the errors of engines.
        """

    def num_playable(self) -> int | None:
        """Return how many groups can be played in environments at a time; None for a job without episodes."""


class FillerByTask:
    """The filler of a job of which an environment plays some prompts, or all."""

    def __init__(self, responder: GroupFiller, player: GroupFiller) -> None:
        self._responder, self._player = responder, player
        self.num_playable = player.num_playable

    async def fill(self, flight: Flight, group: RolloutGroup, deadline: float) -> None:
        filler = self._player if flight.claim.task.HasField("environment") else self._responder
        await filler.fill(flight, group, deadline)


class GroupProducer:
    def __init__(self, filler: GroupFiller, decoder: PromptDecoder, busy: BusyMeter, limits: RolloutConfig) -> None:
        self._filler = filler
        self._decoder = decoder
        self._busy = busy
        self._max_attempts, self._max_lost_rollouts = limits.max_group_attempts, limits.max_lost_rollouts
        self._limits = limits
        self._last_errors: dict[str, str] = {}  # group id -> why it was given back
        self._failed_episodes: dict[str, Counter[str]] = {}  # group id -> failed attempts at episodes, by kind
        self.num_playable = filler.num_playable

    async def produce(self, flight: Flight) -> RolloutGroup:
        """Return a group with responses, or with the reason why there are none. It has yet to say who claimed it.

        Raises DeadlineExceeded, and what `GroupFiller.fill` raises besides GroupFailed.
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
            source=task.source,
        )
        flight.failed_episodes = self._failed_episodes.setdefault(task.group_id, flight.failed_episodes)
        forget_oldest(self._failed_episodes)
        try:
            self._check_attempts(flight)
            deadline = asyncio.get_running_loop().time() + deadline_s
            async with asyncio.timeout_at(deadline) as timeout:
                await self._filler.fill(flight, group, deadline)
            reward_truncated(group, self._limits.model_copy(update={"max_response_tokens": task.max_response_tokens}))
            await self._decoder.add_parts(group)
            refuse_broken(group)
        except GroupFailed as failure:
            del group.responses[:]
            await self._decoder.add_parts(group)
            group.failure.CopyFrom(GroupFailure(kind=failure.kind, message=str(failure)))
        except TimeoutError as error:
            if not timeout.expired():
                raise
            still = ": ".join(filter(None, (flight.stage, flight.doing)))
            message = f"not ready {deadline_s:g} s after its claim (rollout.group_deadline_s), still {still}"
            raise DeadlineExceeded(message) from error
        group.timings.worker_busy_s = self._busy.seconds(task.iteration)
        group.failed_episodes.update(flight.failed_episodes)
        self._failed_episodes.pop(task.group_id, None)
        self._last_errors.pop(task.group_id, None)
        return group

    def remember_error(self, task: PromptTask, reason: str) -> None:
        """Keep the reason of an error. The group's failure names it if the group runs out of attempts here."""
        self._last_errors[task.group_id] = reason
        forget_oldest(self._last_errors)

    def _check_attempts(self, flight: Flight) -> None:
        task, lost = flight.claim.task, flight.claim.lost_rollouts
        kind = "environment_failed" if task.HasField("environment") else "generation_failed"
        if flight.claim.attempt > self._max_attempts:
            last = self._last_errors.get(task.group_id, "not known here, see the logs of the other rollouts")
            attempts = f"given up after {self._max_attempts} attempts (rollout.max_group_attempts)"
            raise GroupFailed(kind, f"{attempts}; last error: {last}")
        if len(lost) >= self._max_lost_rollouts:
            times = Counter(lost)
            names = ", ".join(f"{name} ({times[name]} times)" if times[name] > 1 else name for name in times)
            message = f"given up after {len(lost)} rollouts died or fell silent with it (rollout.max_lost_rollouts)"
            raise GroupFailed(kind, f"{message}: {names}; their logs, or dmesg on their machines, may say why")


def forget_oldest(notes: dict[str, Any]) -> None:
    if len(notes) > MAX_REMEMBERED:
        del notes[next(iter(notes))]


def refuse_broken(group: RolloutGroup) -> None:
    """Raise GroupFailed for an empty response, a logprob that is not finite or a gap in the versions: the ledger
    would refuse the group."""
    try:
        check_group(group)
        check_logprobs(group)
    except ValueError as error:
        raise GroupFailed("generation_failed", f"the engine's output is not usable: {error}") from error
