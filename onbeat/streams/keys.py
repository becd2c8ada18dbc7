"""Every Redis key of Onbeat. All keys of one job share the hash tag `{job}`, so each script stays in one cluster slot.

No other module builds keys, and nothing ever flushes a database: Redis may be shared with other programs.
"""

from dataclasses import dataclass

PREFIX = "onbeat"
ROLLOUT_GROUP = "rollouts"  # the consumer group of rollout replicas on the prompts stream
TRAINER_GROUP = "trainer"  # the consumer group of trainer replicas on the rollouts stream

ALL_JOBS = f"{PREFIX}:jobs"  # sorted set: job id by creation time
ACTIVE_JOBS = f"{PREFIX}:active"  # sorted set: jobs that were started and are not final, by creation time
WAITING_JOBS = f"{PREFIX}:waiting"  # sorted set: pending jobs, by creation time


def waiting_in(pool: str) -> str:
    """Return the key of a pool's queue. Sorted set: its pending jobs, by creation time."""
    return f"{PREFIX}:waiting:pool:{pool}"


def waiting_of(submitter: str) -> str:
    """Return the key of the pending jobs that were submitted with one API key. Sorted set: by creation time."""
    return f"{PREFIX}:waiting:key:{submitter}"


def ended_jobs(state: str) -> str:
    """Return the key of the jobs in a final state. Sorted set: by the time of their end."""
    return f"{PREFIX}:ended:{state}"


def workers(pool: str) -> str:
    """Return the key of a pool's rollouts. Hash: worker id -> last heartbeat as JSON."""
    return f"{PREFIX}:workers:{pool}"


def trainers(pool: str) -> str:
    """Return the key of a pool's trainers. Hash: trainer id -> last heartbeat as JSON."""
    return f"{PREFIX}:trainers:{pool}"


@dataclass(frozen=True)
class JobKeys:
    job_id: str

    def _key(self, name: str) -> str:
        return f"{PREFIX}:{{{self.job_id}}}:{name}"

    @property
    def job(self) -> str:
        """Hash: state, config, lease, progress."""
        return self._key("job")

    @property
    def deleted(self) -> str:
        """Hash: the job's record while its other keys are being removed; then a mark that lasts for a day."""
        return self._key("deleted")

    @property
    def prompts(self) -> str:
        """Stream of PromptTask; an entry lives until its group is accepted."""
        return self._key("prompts")

    @property
    def rollouts(self) -> str:
        """Stream of RolloutGroup; pending for the trainer until the step that used it is durable."""
        return self._key("rollouts")

    @property
    def events(self) -> str:
        """Stream of events, newest few thousand."""
        return self._key("events")

    @property
    def audit(self) -> str:
        """Stream, a chain: `line` and `link`, the hash of the previous link and of the line."""
        return self._key("audit")

    def iteration(self, iteration: int) -> str:
        """Return the key of an iteration. Hash: state, policy version, counts, times, metrics."""
        return self._key(f"iteration:{iteration}")

    def groups(self, iteration: int) -> str:
        """Return the ledger's key. Hash: group id -> `waiting:<prompts entry id>` | `accepted:<rollouts entry id>`."""
        return self._key(f"groups:{iteration}")

    def busy(self, iteration: int) -> str:
        """Return the key of an iteration's busy times. Hash: worker id -> seconds with a response in flight."""
        return self._key(f"busy:{iteration}")

    def spares(self, iteration: int) -> str:
        """Return the key of an open iteration's spare prompts. List: group id, PromptTask and so on, in order."""
        return self._key(f"spares:{iteration}")

    @property
    def lengths(self) -> str:
        """Hash: row of the data -> mean tokens per response, when last generated; for data whose rows come again."""
        return self._key("lengths")

    def evaluation(self, evaluation: int) -> str:
        """Return the key of an evaluation. Hash: state, policy version, counts, times, scores."""
        return self._key(f"evaluation:{evaluation}")

    def evaluation_groups(self, evaluation: int) -> str:
        """Return the key of an evaluation's groups. Hash like `groups`; removed when the evaluation has ended."""
        return self._key(f"evaluation_groups:{evaluation}")

    def evaluation_results(self, evaluation: int) -> str:
        """Return the key of an evaluation's results. Stream of RolloutGroup; removed when the evaluation has ended."""
        return self._key(f"evaluation_results:{evaluation}")

    @property
    def open_evaluations(self) -> str:
        """Set: the numbers of evaluations that have not ended."""
        return self._key("open_evaluations")

    @property
    def versions(self) -> str:
        """Hash: policy version -> time when the first rollout served it."""
        return self._key("versions")

    def weights(self, version: int) -> str:
        """Return the key of a version. Hash: `digest`; as JSON `published` (trainer), `rollout:<worker id>`."""
        return self._key(f"weights:{version}")

    def micro_batches(self, iteration: int) -> str:
        """Return the key of micro-batches. Hash: `<trainer replica>:<index>` -> its group ids, comma separated.

        A replay follows it.
        """
        return self._key(f"micro_batches:{iteration}")

    def taken(self, iteration: int) -> str:
        """Return the key of the groups that a trainer replica has taken. Set: group ids."""
        return self._key(f"taken:{iteration}")

    @property
    def traces(self) -> str:
        """Hash: the first iteration that is left to export as a trace; expires a day after a broker last looked."""
        return self._key("traces")

    @property
    def chats(self) -> str:
        """Stream of chat requests that no rollout has taken; expires a minute after the last one."""
        return self._key("chats")

    def chat(self, chat_id: str) -> str:
        """Return the key of a chat. Stream of a rollout's replies; expires half a minute after it was last wanted."""
        return self._key(f"chat:{chat_id}")

    def advantages(self, iteration: int) -> str:
        """Return the key of advantages. Hash: group id -> one per response, as JSON; from commit to trimming."""
        return self._key(f"advantages:{iteration}")

    @property
    def of_job(self) -> list[str]:
        """Every key of the job that has no number, except its record."""
        streams = [self.prompts, self.rollouts, self.events, self.audit, self.chats]
        return [*streams, self.lengths, self.versions, self.open_evaluations, self.traces]

    def numbered(self, number: int) -> list[str]:
        """Return every key of the iteration, the evaluation and the policy version of this number."""
        of_iteration = [self.iteration(number), self.groups(number), self.busy(number), self.spares(number)]
        of_training = [self.micro_batches(number), self.taken(number), self.weights(number), self.advantages(number)]
        of_evaluation = [self.evaluation(number), self.evaluation_groups(number), self.evaluation_results(number)]
        return [*of_iteration, *of_training, *of_evaluation]
