"""A scorer of groups: it tries a scoring process or a service as often as the job allows and the group has time."""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping

from onbeat.contracts.rewards import JUDGE_REWARD, SERVICE_REWARDS
from services.rollout import meters
from services.rollout.retries import delay_after
from services.rollout.rewards.judge import JudgeService
from services.rollout.rewards.outcome import UNREACHABLE, RewardError, RewardRequest, Score, ServiceMissing
from services.rollout.rewards.pool import RewardPool
from services.rollout.rewards.service import RewardService
from services.rollout.settings import RewardServiceSettings

logger = logging.getLogger(__name__)

LAST_MOMENT_S = 0.5  # a call fails this long before the group's deadline, before it would be cancelled
SHORTEST_TRY_S = 0.25  # a repetition with less time would only hide the reason of the try before


class Scorer:
    """The scorer of a rollout. `num_processes`: groups that scoring processes score concurrently. `services`: by name,
    for the rewards http and judge."""

    def __init__(self, num_processes: int, services: Mapping[str, RewardServiceSettings], worker_id: str) -> None:
        self._worker_id = worker_id
        self._pool = RewardPool(num_processes)
        self._services = {
            name: JudgeService(name, settings) if settings.model else RewardService(name, settings)
            for name, settings in services.items()
        }

    def source(self, name: str, options: dict[str, object]) -> RewardPool | RewardService:
        """Return the source of a reward. Raises ServiceMissing: call this before anything is generated in vain."""
        if name not in SERVICE_REWARDS:
            return self._pool
        is_judge = name == JUDGE_REWARD
        services = {
            key: service for key, service in self._services.items() if is_judge == isinstance(service, JudgeService)
        }
        service = options.get("service")
        if not isinstance(service, str) or service not in services:
            known = f"it knows: {', '.join(sorted(services))}" if services else "it knows none"
            noun = "judge (a service with a `model`)" if is_judge else "reward service"
            message = f"{self._worker_id} has no {noun} {service!r} in ONBEAT_REWARD_SERVICES, {known}"
            raise ServiceMissing("missing", message)
        return services[service]

    async def score(self, request: RewardRequest, deadline: float) -> list[Score]:
        """Return one score per response, in order. Raises RewardError once a response has failed `max_attempts` times,
        or when the next try would have no time before the deadline (of the event loop's clock).

        A call that does not reach its service does not count as an attempt: it is repeated until the deadline.
        """
        deadline -= LAST_MOMENT_S
        source, now = self.source(request.name, request.options), asyncio.get_running_loop().time
        last_start = deadline - SHORTEST_TRY_S
        scores: dict[int, Score] = {}
        num_tries: Counter[int | None] = Counter()
        num_failures = 0
        while missing := [index for index in range(len(request.responses)) if index not in scores]:
            try:
                await source.score(request, missing, scores, deadline)
                meters.REWARD_TRIES.labels(outcome="scored").inc()
            except RewardError as error:
                meters.REWARD_TRIES.labels(outcome=error.kind).inc()
                logger.warning("reward %s: %s", request.name, error)
                num_failures += 1
                num_tries[error.index] += error.kind != UNREACHABLE
                delay_s = delay_after(num_failures) + error.retry_after_s
                if num_tries[error.index] >= request.max_attempts or now() + delay_s >= last_start:
                    raise
                await asyncio.sleep(delay_s)
                if now() >= last_start:  # it took longer, on a busy machine
                    raise
        return [scores[index] for index in range(len(request.responses))]

    async def close(self) -> None:
        await self._pool.close()
        for service in self._services.values():
            await service.close()
