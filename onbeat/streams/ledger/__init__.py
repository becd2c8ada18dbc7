"""The ledger: all state that outlives a process, one typed method for each script, and the plain reads.

Scripts are atomic in Redis, so two brokers, a zombie trainer or a broker that died half-way cannot break a rule.
"""

from redis.asyncio import Redis

from onbeat.contracts.records import TrainerRecord, WorkerRecord
from onbeat.streams import keys
from onbeat.streams.ledger.evaluations import Evaluations
from onbeat.streams.ledger.iterations import Iterations
from onbeat.streams.ledger.job_lists import JobLists
from onbeat.streams.ledger.jobs import Extension, Jobs
from onbeat.streams.ledger.logs import AuditLog, EventLog
from onbeat.streams.ledger.processes import Processes
from onbeat.streams.ledger.rollout_side import Claim, RolloutSide
from onbeat.streams.ledger.scripts import LedgerPart
from onbeat.streams.ledger.trainer_side import TrainerSide
from onbeat.streams.ledger.versions import Versions

__all__ = ["Claim", "Extension", "Ledger"]


class Ledger(LedgerPart):
    """The ledger of all jobs of one Redis, by who calls it."""

    def __init__(self, redis: Redis) -> None:
        super().__init__(redis)
        self.lists = JobLists(redis)
        self.jobs = Jobs(redis, self.lists)
        self.iterations, self.evaluations = Iterations(redis), Evaluations(redis)
        self.rollout, self.trainer = RolloutSide(redis), TrainerSide(redis, self.jobs)
        self.versions, self.event_log, self.audit_log = Versions(redis), EventLog(redis), AuditLog(redis)
        self.workers = Processes(redis, WorkerRecord, keys.workers)
        self.trainers = Processes(redis, TrainerRecord, keys.trainers)
