"""The ledger: all state that outlives a process, one typed method for each script, and the plain reads.

Scripts are atomic in Redis, so two brokers, a zombie trainer or a broker that died half-way cannot break a rule.
"""

from typing import Any

from redis.asyncio import Redis

from onbeat.streams import keys
from onbeat.streams.ledger.audit_log import AuditLog
from onbeat.streams.ledger.evaluations import Evaluations
from onbeat.streams.ledger.event_log import EventLog
from onbeat.streams.ledger.iterations import Iterations
from onbeat.streams.ledger.job_lists import JobLists
from onbeat.streams.ledger.jobs import Extension, Jobs
from onbeat.streams.ledger.processes import Processes
from onbeat.streams.ledger.rollout_side import Claim, RolloutSide
from onbeat.streams.ledger.scripts import Scripts
from onbeat.streams.ledger.trainer_side import TrainerSide
from onbeat.streams.ledger.versions import Versions
from onbeat.types import TrainerRecord, WorkerRecord

__all__ = ["Claim", "Extension", "Ledger"]


class Ledger:
    """The ledger of all jobs of one Redis, by who calls it."""

    def __init__(self, redis: Redis) -> None:
        scripts = self._scripts = Scripts(redis)
        self.lists = JobLists(scripts.redis)
        self.jobs = Jobs(scripts, self.lists)
        self.iterations, self.evaluations = Iterations(scripts), Evaluations(scripts)
        self.rollout, self.trainer = RolloutSide(scripts), TrainerSide(scripts, self.jobs)
        self.versions, self.event_log, self.audit_log = Versions(scripts), EventLog(scripts), AuditLog(scripts)
        self.workers = Processes(scripts, WorkerRecord, keys.workers)
        self.trainers = Processes(scripts, TrainerRecord, keys.trainers)

    @property
    def redis(self) -> Any:  # redis-py types answers as unions over both protocols
        return self._scripts.redis

    async def now(self) -> float:
        """Return Unix seconds by the Redis clock, the source of all times in the ledger."""
        return await self._scripts.now()
