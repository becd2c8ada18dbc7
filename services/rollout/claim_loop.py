"""The claim loop: it claims groups of one job up to the free capacity, runs each as a task, and settles the outcome.

claimed --> produced --> submitted: accepted | duplicate, closed (dropped) | stale (handed back)
   |           |
   |           +--> error that another attempt may cure: the lease is handed back, the attempt counts
   +--> no weights, no time left, no such reward service here, this process ends: the lease is handed back as if it had
   |    never been claimed
   +--> lease lost: cancelled, another worker has it
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from redis.exceptions import RedisError

from onbeat.config import JobConfig
from onbeat.contracts.errors import WeightsError
from onbeat.contracts.states import Verdict
from onbeat.engines import Engine, EngineBroken, EngineDied, VersionMismatch
from onbeat.streams.best_effort import best_effort
from onbeat.streams.ledger import Claim, Ledger
from onbeat.streams.outcomes import Outcome
from onbeat.streams.signal import Signal
from services.rollout import meters
from services.rollout.deadlines import CANCEL_DEADLINE_S, FAREWELL_S
from services.rollout.episodes.runner import EnvironmentFailed
from services.rollout.inflight import Flight, RoundSize, Stage, num_claimable
from services.rollout.producer import DeadlineExceeded, GroupProducer
from services.rollout.puller import Announcements
from services.rollout.rewards.outcome import RewardUnavailable, ServiceMissing
from services.rollout.settings import Settings

logger = logging.getLogger(__name__)

CLAIM_AT_ONCE = 4  # the longest prompts come first: no rollout takes all of them
POLL_S = 1.0  # leases that others lost or handed back are noticed this late
RETRY_DELAY_S = 1.0  # no claims for this long after an error
MISSING_SERVICE_S = 10.0  # no claims for this long when a reward service is not among the settings
MISSING_VERSION_S = 60.0  # no claims for this long after a version could not be had, unless it is announced before
MAX_ENGINE_ERRORS = 5  # errors in a row, before the process gives up


class StaleGroup(Exception):
    """The engine stamped a group with another version than the one it was asked for."""


# These are not the engine's fault.
PASSING_ERRORS = (WeightsError, DeadlineExceeded, RewardUnavailable, EnvironmentFailed)

# These are not the group's fault: they do not count as attempts.
BLAMELESS_ERRORS = (WeightsError, VersionMismatch, StaleGroup, EngineBroken, RedisError, ServiceMissing)


@dataclass(frozen=True)
class Assignment:
    """A job, and what this rollout serves it with."""

    settings: Settings
    ledger: Ledger
    job_id: str
    config: JobConfig


@dataclass(frozen=True)
class Ends:
    """The two ends of a session, set by the one who decides on them."""

    drain: asyncio.Event = field(default_factory=asyncio.Event)  # claim no more
    abandon: asyncio.Event = field(default_factory=asyncio.Event)  # abandon groups in flight


class Pause:
    """The time without claims: after an error, and while groups wait for a version that a restarted trainer lacks."""

    def __init__(self, announcements: Announcements) -> None:
        self._announcements = announcements
        self._resume_at = self._missing_until = 0.0
        self._missing_version = 0  # one that could not be pulled

    def begin(self, error: BaseException, policy_version: int) -> None:
        """Pause after the error of a group of this version."""
        now = time.monotonic()
        self._resume_at = now + (MISSING_SERVICE_S if isinstance(error, ServiceMissing) else RETRY_DELAY_S)
        if isinstance(error, WeightsError):
            self._missing_version, self._missing_until = policy_version, now + MISSING_VERSION_S

    @property
    def left_s(self) -> float:
        """Seconds of the pause after an error; 0 or less when there is none."""
        return self._resume_at - time.monotonic()

    def is_on(self) -> bool:
        has_waited = time.monotonic() >= self._missing_until
        return self.left_s > 0 or not (has_waited or self._announcements.has_reached(self._missing_version))


class ClaimLoop:
    def __init__(
        self, job: Assignment, engine: Engine, producer: GroupProducer, announcements: Announcements, ends: Ends
    ) -> None:
        self._job, self._engine, self._producer, self._ends = job, engine, producer, ends
        self._arrival: asyncio.Task[str] | None = None  # arrival of prompts
        self._last_seen = "0"
        self._pause = Pause(announcements)
        self._num_engine_errors = 0
        self.flights: dict[str, Flight] = {}  # flights by the id of their stream entry
        self.num_workers = 1  # workers that share this job, this one included

    async def serve(self) -> None:
        """Claim and run groups until the drain begins. Raises EngineBroken and Redis errors."""
        ending = asyncio.create_task(self._ends.drain.wait())
        try:
            while not self._ends.drain.is_set():
                await self._settle()
                self._note_arrival()
                while not self._ends.drain.is_set() and (claims := await self._claim()):
                    self._launch(claims)
                await self._wait_for_change(ending)
        finally:
            ending.cancel()
            if self._arrival is not None:
                self._arrival.cancel()

    async def drain(self) -> None:
        """Finish what is generating within the drain time; hand back at once what has not begun."""
        drain_s = self._job.settings.drain_s
        if self.flights:
            logger.info("draining %d groups, for at most %.0f s", len(self.flights), drain_s)
        for flight in self.flights.values():
            if flight.stage is Stage.WAITING:
                flight.task.cancel()
        abandoning = asyncio.create_task(self._ends.abandon.wait())
        deadline = time.monotonic() + drain_s
        while self.flights and not abandoning.done() and (left_s := deadline - time.monotonic()) > 0:
            waited = {*self._tasks(), abandoning}
            await asyncio.wait(waited, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            await self._settle()
        abandoning.cancel()

    async def keep_leases(self) -> None:
        """Renew the leases of what is in flight, for ever; cancel what another worker has taken over."""
        job = self._job
        while True:
            await asyncio.sleep(job.settings.lease_s / 3)
            entry_ids = list(self.flights)
            renewed = await job.ledger.rollout.renew(job.job_id, job.settings.worker_id, entry_ids)
            lost = set(entry_ids) - set(renewed)
            for flight in self.flights.values():
                is_newly_lost = flight.claim.entry_id in lost and not flight.is_lost
                if is_newly_lost and flight.stage is not Stage.SUBMITTING:  # cancelled again, it would not clean up
                    logger.warning("%s is another worker's now, or done", flight.claim.task.group_id)
                    flight.is_lost = True
                    flight.task.cancel()

    async def abandon(self) -> None:
        """Cancel everything and hand the leases back, as far as Redis can be reached."""
        flights = list(self.flights.values())
        self.flights.clear()
        for flight in flights:
            flight.task.cancel()
        if flights:  # an engine that ignores the cancellation is left behind
            await asyncio.wait({flight.task for flight in flights}, timeout=CANCEL_DEADLINE_S)
        with best_effort(f"{len(flights)} leases were not handed back; they run out by themselves"):
            async with asyncio.timeout(FAREWELL_S):
                await asyncio.gather(*map(self._hand_back, flights))
        meters.IN_FLIGHT.set(0)

    # ---- steps of the loop ---------------------------------------------------------------------------------------

    async def _claim(self) -> list[Claim]:
        job, count = self._job, min(self._num_claimable(), CLAIM_AT_ONCE)
        if not count:
            return []
        return await job.ledger.rollout.claim(job.job_id, job.settings.worker_id, count, job.settings.lease_s)

    def _num_claimable(self) -> int:
        if self._pause.is_on():
            return 0
        training, evaluation = round_sizes(self._job.config)
        flights, capacity, num_playable = self.flights.values(), self._engine.capacity(), self._producer.num_playable()
        return num_claimable(flights, capacity, training, evaluation, self.num_workers, num_playable)

    def _launch(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            if (flight := self.flights.get(claim.entry_id)) is not None:  # our own lease ran out
                flight.is_lost = False  # it is ours again; when a cancelled flight has ended, it is handed back
                continue
            flight = Flight(claim)
            flight.task = asyncio.create_task(self._run(flight), name=f"group {claim.task.group_id}")
            self.flights[claim.entry_id] = flight
        meters.IN_FLIGHT.set(len(self.flights))

    def _tasks(self) -> set[asyncio.Task[None]]:
        return {flight.task for flight in self.flights.values()}

    def _note_arrival(self) -> None:
        """Note which prompts have arrived. This is done before a claim: those that it misses must end the next wait."""
        if self._arrival is not None and self._arrival.done():
            self._last_seen = self._arrival.result()
            self._arrival = None

    async def _wait_for_change(self, ending: asyncio.Task[bool]) -> None:
        """Wait until a group is done, prompts arrive (if there is capacity), the end comes, or POLL_S has passed."""
        changes: set[asyncio.Task[object]] = {*self._tasks(), ending}
        if self._num_claimable():
            wait = self._job.ledger.rollout.wait_for_prompts
            self._arrival = self._arrival or asyncio.create_task(wait(self._job.job_id, self._last_seen, POLL_S))
            changes.add(self._arrival)
        pause_s = self._pause.left_s
        timeout_s = pause_s if 0 < pause_s < POLL_S else POLL_S
        await asyncio.wait(changes, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)

    async def _run(self, flight: Flight) -> None:
        group = await self._producer.produce(flight)
        group.worker_id = self._job.settings.worker_id
        flight.stage = Stage.SUBMITTING
        signal, submit = Signal.of(self._job.config), self._job.ledger.rollout.submit
        outcome = Outcome.of_group(self._job.config, group)
        verdict = await submit(self._job.job_id, flight.claim.entry_id, group, signal, outcome)
        ended_as = group.failure.kind if group.HasField("failure") and verdict is Verdict.ACCEPTED else verdict
        meters.GROUPS.labels(outcome=ended_as).inc()
        if ended_as is not Verdict.ACCEPTED:
            logger.warning("group %s: %s %s", group.group_id, ended_as, group.failure.message)
        if verdict is not Verdict.STALE:
            is_kept = verdict is Verdict.ACCEPTED
            num_kept = sum(len(response.token_ids) for response in group.responses) if is_kept else 0
            await self._count_discarded(max(0, flight.num_tokens - num_kept))
        else:
            raise StaleGroup(f"{group.group_id} has tokens of another version than {group.policy_version}")

    async def _settle(self) -> None:
        """Take finished flights off the table; hand back the leases of those that did not succeed."""
        for flight in [flight for flight in self.flights.values() if flight.task.done()]:
            if flight.task.cancelled():
                del self.flights[flight.claim.entry_id]
                await self._hand_back(flight)
            elif (error := flight.task.exception()) is not None:
                await self._settle_error(flight, error)
            else:
                del self.flights[flight.claim.entry_id]
                self._num_engine_errors = 0
        meters.IN_FLIGHT.set(len(self.flights))

    async def _settle_error(self, flight: Flight, error: BaseException) -> None:
        """Hand the lease back and report why. Raises what ends this process."""
        job, task, reason = self._job, flight.claim.task, f"{type(error).__name__}: {error}"
        if isinstance(error, RedisError):
            raise error
        del self.flights[flight.claim.entry_id]
        self._pause.begin(error, task.policy_version)
        self._producer.remember_error(task, reason)
        meters.RELEASED.inc()
        await self._hand_back(flight)
        message = f"{task.group_id}, attempt {flight.claim.attempt}, on {job.settings.worker_id}: {reason}"
        await job.ledger.event_log.emit(job.job_id, "group.released", message, {"group_id": task.group_id})
        if isinstance(error, PASSING_ERRORS) and not is_engine_silent(flight, error):
            logger.warning("gave back %s", message)
            return
        logger.error("gave back %s", message, exc_info=error)
        self._num_engine_errors += 1
        if isinstance(error, EngineBroken) or self._num_engine_errors >= MAX_ENGINE_ERRORS:
            raise EngineBroken(f"{self._num_engine_errors} errors in a row, the last: {reason}") from error

    async def _hand_back(self, flight: Flight) -> None:
        """Release the lease, if it is ours, of a flight that is over or left behind, and count its tokens."""
        if flight.is_lost:
            return await self._count_discarded(flight.num_tokens)
        meters.HANDED_BACK.inc()
        await self._release([flight.claim.entry_id], flight.num_tokens, is_attempt=is_groups_fault(flight))

    async def _count_discarded(self, num_tokens: int) -> None:
        if num_tokens:
            await self._release([], num_tokens)

    async def _release(self, entry_ids: list[str], num_tokens: int, *, is_attempt: bool = False) -> None:
        meters.DISCARDED_TOKENS.inc(num_tokens)
        job, worker_id = self._job, self._job.settings.worker_id
        await job.ledger.rollout.release(
            job.job_id, worker_id, entry_ids, is_attempt=is_attempt, num_discarded_tokens=num_tokens
        )


def round_sizes(config: JobConfig) -> tuple[RoundSize, RoundSize | None]:
    """Return the sizes of an iteration and of an evaluation."""
    rollout, evaluation = config.rollout, config.evaluation
    training = RoundSize(rollout.num_prompts_per_iteration, rollout.num_samples_per_prompt)
    if evaluation is None:
        return training, None
    return training, RoundSize(
        sum(held_out.num_prompts for held_out in config.held_out), evaluation.num_samples_per_prompt
    )


def is_engine_silent(flight: Flight, error: BaseException) -> bool:
    """Return whether the engine has owed the answer all the time, so that it may have stopped answering at all."""
    if not isinstance(error, DeadlineExceeded | EnvironmentFailed) or flight.stage is not Stage.GENERATING:
        return False
    return flight.episodes is None or flight.episodes.is_unanswered


def is_groups_fault(flight: Flight) -> bool:
    """Return whether a flight failed for a reason that may lie in its group: only that is an attempt."""
    if not flight.task.done() or flight.task.cancelled() or (error := flight.task.exception()) is None:
        return False
    if isinstance(error, DeadlineExceeded):
        return flight.stage is not Stage.WAITING
    if isinstance(error, ServiceMissing) and flight.claim.task.is_evaluation:
        return True  # else its groups would come back first, for ever, and hold training up
    return isinstance(error, EngineDied) or not isinstance(error, BLAMELESS_ERRORS)
