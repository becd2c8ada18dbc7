"""Every Redis key of Onbeat. All keys of one job share the hash tag `{job}`, so scripts stay in one cluster slot;
create_job and resume_job also count the pending jobs of an API key.

No other module builds keys, and nothing ever flushes a database: Redis may be shared with other programs.
"""

from collections.abc import Callable
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


class Key:
    """A key that a job has once; it ends with the name of its attribute."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, keys: "JobKeys", owner: type) -> str:
        return f"{PREFIX}:{{{keys.job_id}}}:{self._name}"


class NumberedKey:
    """A key that a job has for each iteration, evaluation or policy version: `JobKeys(job_id).groups(3)`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, keys: "JobKeys", owner: type) -> Callable[[int], str]:
        return lambda number: f"{PREFIX}:{{{keys.job_id}}}:{self._name}:{number}"


@dataclass(frozen=True)
class JobKeys:
    job_id: str

    job = Key()  # hash: state, config, lease, progress
    deleted = Key()  # hash: the job's record while its other keys are being removed; then a mark that lasts for a day
    prompts = Key()  # stream of PromptTask; an entry lives until its group is accepted
    lost_rollouts = Key()  # hash: entry of `prompts` -> ids of the rollouts that were lost with it, as JSON
    rollouts = Key()  # stream of RolloutGroup; pending for the trainer until the step that used it is durable
    events = Key()  # stream of events, newest few thousand
    audit = Key()  # stream, a chain: `line` and `link`, the hash of the previous link and of the line
    chats = Key()  # stream of chat requests that no rollout has taken; expires a minute after the last one
    lengths = Key()  # hash: row of the data -> mean tokens per response, when last generated; for rows that come again
    versions = Key()  # hash: policy version -> time when the first rollout served it
    open_evaluations = Key()  # set: the numbers of evaluations that have not ended
    notices = Key()  # set: notices to the operator that a broker has sent; only with ONBEAT_NOTIFY_*
    outcomes_before = Key()  # hash: `rows`, what a fork knows of its parent's rows, as JSON
    held_out_rows = Key()  # hash: `rows`, on which a job with supervised iterations measures its loss, as JSON
    traces = Key()  # hash: the first iteration left to export as a trace; expires a day after a broker last looked

    # These are for each iteration.
    iteration = NumberedKey()  # hash: state, policy version, counts, times, metrics
    # Hash: group id -> `waiting:<prompts entry id>` | `accepted:<rollouts entry id>`; `row`: of a supervised iteration
    # until its tokens are recorded.
    groups = NumberedKey()
    rows = NumberedKey()  # hash: group id -> conversation as JSON, until the trainer has recorded its tokens
    busy = NumberedKey()  # hash: worker id -> seconds with a response in flight
    # List: group id (in a job of several sources the source), PromptTask and so on, in order: spare prompts while the
    # iteration is open.
    spares = NumberedKey()
    micro_batches = NumberedKey()  # hash: `<trainer replica>:<index>` -> number and group ids, which a replay follows
    taken = NumberedKey()  # set: ids of the groups that a trainer replica has taken
    outcomes = NumberedKey()  # hash: group id -> `row solved rewarded`; only where prompts are chosen by difficulty
    advantages = NumberedKey()  # hash: group id -> one per response, as JSON; from commit to trimming

    # These are for each evaluation. The last two are removed when it has ended.
    evaluation = NumberedKey()  # hash: state, policy version, counts, times, scores
    evaluation_groups = NumberedKey()  # hash like `groups`
    evaluation_results = NumberedKey()  # stream of RolloutGroup

    # This is for each policy version.
    weights = NumberedKey()  # hash: `digest`; as JSON `published` (trainer), `rollout:<worker id>`

    def chat(self, chat_id: str) -> str:
        """Return the key of a chat. Stream of a rollout's replies; expires half a minute after it was last wanted."""
        return f"{PREFIX}:{{{self.job_id}}}:chat:{chat_id}"

    @property
    def of_job(self) -> list[str]:
        """Every key of the job that has no number, except its records `job` and `deleted`."""
        names = [name for name, kind in vars(JobKeys).items() if isinstance(kind, Key)]
        return [getattr(self, name) for name in names if name not in ("job", "deleted")]

    def numbered(self, number: int) -> list[str]:
        """Return every key of the iteration, the evaluation and the policy version of this number."""
        return [getattr(self, name)(number) for name, kind in vars(JobKeys).items() if isinstance(kind, NumberedKey)]
