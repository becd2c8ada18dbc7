"""The records that cross process boundaries as JSON: of jobs, iterations, groups, workers and what is shown of them."""

from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from onbeat.contracts.deadlines import SILENT_S, STARTING_S
from onbeat.contracts.states import EvaluationState, IterationState, JobState

MAX_TRAINER_SPANS = 500  # spans of an iteration, in Redis; where there are as many, neighbours may have been merged
MAX_TURNS = 1_024  # calls of the policy in an episode
MAX_LISTED_JOBS = 500  # jobs in one answer: other requests wait while a list is read and written
MAX_LISTED_ITERATIONS = 10_000  # or policy versions, in one answer
DATASETS_FOLDER = "datasets"  # folder of uploaded files, in the broker's data folder


class Record(BaseModel):
    model_config = ConfigDict(extra="ignore")

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Yield the known fields that are short enough to show."""
        for name, value in super().__repr_args__():
            if value is not None and value != {}:
                yield name, value.value if isinstance(value, StrEnum) else value


class Picture:
    """The way from a job to its picture in a notebook. It is no part of the record's value, nor of copies of it."""

    def __init__(self, draw: Callable[["JobRecord"], str | None] = lambda job: None) -> None:
        self.draw = draw

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Picture)

    def __reduce__(self) -> tuple[type["Picture"], tuple[()]]:
        return Picture, ()


def num_before_rl(config: Mapping[str, Any]) -> int:
    """Return the number of supervised iterations before RL in a recorded job, whatever version of Onbeat it is of."""
    return int((config.get("warm_start") or {}).get("num_iterations") or 0)


class JobRecord(Record):
    """A job as REST shows it. Times are Unix seconds by the Redis clock."""

    id: str
    name: str
    pool: str
    state: JobState
    error: str | None = None
    created_at: float
    queued_at: float | None = None  # when it was resumed, after it had been over
    started_at: float | None = None  # start of a resumed job, from which its time of work is counted
    finished_at: float | None = None
    num_iterations: int
    first_iteration: int = 0  # first iteration of a fork: those before are of the job whose checkpoint it started from
    num_opened: int = 0  # iterations whose prompts are or were out, counted from 0
    next_iteration: int = 0  # first iteration that is not committed
    policy_version: int | None = None  # newest published
    # Engine and trainer share this: "cores" | "accelerators" | "nothing"; None: not known (yet).
    sharing: str | None = None
    dtype: str | None = None  # trainer and rollouts compute in it; None until a trainer has resolved `model.dtype`
    # Tokens of a packed row; None where the job has the number itself, or no trainer has chosen it yet.
    max_tokens_per_micro_batch: int | None = Field(None, exclude_if=lambda num_tokens: num_tokens is None)
    teacher_digest: str | None = None  # BLAKE3 of the teacher; None: there is none, or no trainer has loaded it yet
    num_handed_back: int = 0  # times that a rollout handed a group back: after an error, at a stop or a move
    num_discarded_tokens: int = 0  # sampled for groups that were then handed back, lost or failed, as far as reported
    checkpoint: str | None = None  # newest checkpoint, a path on the trainer's machine
    queue_position: int | None = None  # 1: the pool's next free trainer takes it; None: it does not wait for one
    config: dict[str, Any] = Field(repr=False)
    _picture: Picture = PrivateAttr(default_factory=Picture)

    @property
    def first_after_warm_start(self) -> int:
        """The first iteration whose time and reward tell of those to come; of a job with sft alone, its first one."""
        return max(self.first_iteration, num_before_rl(self.config))

    def drawn_by(self, draw: Callable[["JobRecord"], str | None]) -> Self:
        """Have notebooks show the HTML that `draw` returns for the job; None: they show it as text."""
        self._picture = Picture(draw)
        return self

    def _repr_html_(self) -> str | None:
        return self._picture.draw(self)


class IterationRecord(Record):
    """An iteration. Names are those of the report; a value is None until it is known. Durations are in seconds."""

    iteration: int
    state: IterationState
    policy_version: int
    num_groups: int
    is_supervised: bool = Field(False, exclude_if=lambda is_set: not is_set)  # rows of examples, no groups
    num_accepted: int = 0
    num_replaced: int = 0  # accepted, but without signal, so that another prompt came in its place
    num_not_replaced: int = 0  # the same, but no prompt was left: so many groups with signal are missing
    # Numbers of prompts by the reason for their choice, where the outcomes of earlier iterations decide (data.order).
    num_chosen: dict[str, int] = {}
    num_failed_groups: int = 0
    num_stale: int = 0
    num_duplicate: int = 0
    num_lost: int = 0  # submissions without the lease
    opened_at: float
    engine_ready_at: float | None = None  # when the first rollout served this version
    first_accepted_at: float | None = None
    drained_at: float | None = None
    committed_at: float | None = None
    num_responses: int | None = None
    prompt_tokens: int | None = None  # counted once per response
    response_tokens: int | None = None
    num_training_devices: int | None = None
    reward_mean: float | None = None
    reward_std: float | None = None
    wall_s: float | None = None  # seconds since the previous commit (first: the opening), without pauses and queues
    generate_s: float | None = None  # first engine ready -> all groups accepted
    first_group_s: float | None = None  # first engine ready -> first group accepted
    train_s: float | None = None  # trainer busy: micro-batches and the step
    weight_sync_s: float | None = None  # commit that published this version -> first engine ready on it
    rollout_idle_frac: float | None = None
    trainer_idle_frac: float | None = None
    # Share of the seconds of generation in which the trainer ran a micro-batch, too. None: nothing was generated, the
    # trainer was replaced meanwhile, or the record is of an older release.
    overlap_frac: float | None = None
    staleness_max: int | None = None  # policy version trained minus the oldest version of any token
    mismatch_mean: float | None = None  # |trainer_logprobs - rollout_logprobs| per token
    mismatch_max: float | None = None
    tpspd: float | None = None  # (prompt + response tokens) / wall_s / (training devices + rollouts that submitted)
    metrics: dict[str, float] = Field(default={}, repr=False)  # everything else, `area/name`


class PublishedWeights(Record):
    """A trainer's numbers on a policy version that it publishes."""

    full_bytes: int
    delta_bytes: int | None = None  # bytes from the version published before; None: only the full copy is served
    encode_s: float  # time of the threads that make digests and delta, all together, beside the optimizer
    publish_s: float  # time from the start of the optimizer step to the announcement


class WeightUpdate(Record):
    """A rollout's report of its move to a policy version. The durations of the three parts overlap."""

    received_bytes: int  # over the network, failed tries included; 0 when read from this machine's memory
    sources: list[str] = []  # addresses of the trainer and of other rollouts
    pull_s: float  # last try: from the manifest to the last verified tensor
    apply_s: float  # decoding and verifying, summed over shards
    load_s: float  # loading into the engine, including waits for tensors
    # From the optimizer step's start to the engine open; None: it joined with this version, or had served a newer one.
    open_s: float | None = None
    held_s: float | None = None  # time from the last verified tensor to the engine open; None: not reported
    num_faults: int = 0  # problems on the way that were overcome
    weights_digest: str = ""  # digest of the weights that were loaded; "" in records of older releases


class DatasetRecord(Record):
    """An uploaded data file. A job names it by `path`. `sha256` is None for a file that was copied there."""

    name: str
    path: str
    num_bytes: int
    sha256: str | None = None
    uploaded_at: float


class WeightsRecord(Record):
    """A policy version on its way from the trainer to the rollouts. A value that was not reported is None."""

    policy_version: int
    full_bytes: int | None = None
    delta_bytes: int | None = None
    encode_s: float | None = None
    publish_s: float | None = None
    rollouts: dict[str, WeightUpdate] = {}  # updates of the rollouts that have served it, by worker id


class RowCounts(Record):
    """The rows of one data set of a job: how many can be used, how many are not used as they stand, and why."""

    field: str  # field of the job: data, evaluation.data
    path: str
    num_accepted: int
    num_changed: int  # accepted rows that were changed
    num_refused: int  # rows that refuse the job, or are left out
    num_not_looked_at: int = 0  # there was no time
    num_repeated: int = 0  # rows whose prompt an earlier row has
    num_in_training: int = 0  # rows of held-out data whose prompt is in the training data
    reasons: dict[str, int] = {}  # numbers of changes and refusals


class Validation(Record):
    """A job that can be created. `notes` are remarks about its data, which would become events of the job."""

    notes: list[str]
    rows: list[RowCounts] = []


class EvaluationRecord(Record):
    """A held-out set on one policy version. Scores are over all responses; None until it is DONE."""

    evaluation: int  # due after this many iterations
    state: EvaluationState
    policy_version: int | None = None  # None: it could not be opened
    num_groups: int = 0
    num_accepted: int = 0
    num_failed_groups: int = 0  # not scored
    opened_at: float | None = None
    ended_at: float | None = None
    message: str = ""  # the score in words, or the reason why it FAILED
    reward_mean: float | None = None
    reward_std: float | None = None
    pass_at_k: float | None = None  # share of prompts of whose k > 1 responses one has a reward of solved_at or more
    response_tokens_mean: float | None = None
    truncated_frac: float | None = None  # responses cut at max_response_tokens
    metrics: dict[str, float] = Field(default={}, repr=False)  # everything else, such as `reward/PART_mean`


class AuditReport(Record):
    """A comparison of the audit log with the ledger and the streams."""

    is_clean: bool  # no violation, and of a job that is over at least one group was trained
    violation: str | None = None  # the first one
    num_entries: int
    num_groups: int  # accepted, each once
    num_failed_groups: int = 0  # accepted without responses: nothing of them was trained
    num_trained_groups: int = 0  # accepted with responses, and used by a commit
    num_commits: int
    num_contents: int  # groups whose stored content has the digest of the log
    num_contents_gone: int  # groups whose content is no longer kept: their iteration is durable
    num_loads: int = 0  # policy versions that rollouts loaded, and whose digest is that of the log
    num_loads_unknown: int = 0  # the same, by rollouts of older releases, which recorded no digest
    head: str  # the newest link: a kept copy shows later whether the log up to here is still the same
    answer_rules: int | None = None  # rules by which answers are compared; None: the rewards compare none


class PromptPart(Record):
    """A part of a prompt as the model saw it: a special token, the text between two of them, or a gap."""

    text: str
    is_special: bool = False  # one special token, and not text that looks like one
    num_left_out: int = 0  # tokens in the middle of a long prompt that are left out here; text is empty


class EpisodeTurn(Record):
    """One call of the policy in an episode: the new messages, and the answer."""

    continues: int | None = None  # the turn that came before it in its history; None: the prompt alone
    is_fork: bool = False  # a rewritten history: it shares only the beginning of that turn, or of the prompt
    messages: list[dict[str, Any]] = []  # the new ones (at first: behind the prompt), from the environment; not trained
    text: str  # sampled, and trained
    num_observed_tokens: int  # tokens of the prompt, behind those that it shares with the turns before
    observed_parts: list[PromptPart] = Field(default=[], repr=False)  # the same as text; []: none, or not recorded
    num_cached_tokens: int = 0  # tokens of the prompt that the engine did not compute again; 0 also if unknown
    num_tokens: int  # sampled; those of an episode follow one another in the response
    finish_reason: str
    call_id: str = ""
    reward: float | None = None  # the environment's reward for this call; not trained
    waited_s: float = 0.0  # time in the environment, since the call before
    generate_s: float = 0.0


class Sample(Record):
    """A response for people to read. For a response of an evaluation, `iteration` is the number of the evaluation."""

    iteration: int
    group_id: str
    source: str = ""  # name of the prompt's source, in a job of several
    index: int = 0  # place in the group
    policy_version: int
    prompt: str  # the row's text
    decoded_prompt: str | None = Field(default=None, repr=False)  # as the model saw it; None: not recorded
    response: str
    reward: float | None  # None: no reward of the job had an opinion on it, so it was left out of training and means
    reward_parts: dict[str, float] = {}
    advantage: float | None = None  # as the trainer used it; None: not trained (yet), or not reported
    num_tokens: int
    finish_reason: str
    turns: list[EpisodeTurn] = []  # turns of an episode; empty: one response to the prompt
    is_supervised: bool = Field(False, exclude_if=lambda is_set: not is_set)  # a row of examples: it has no reward


class Token(Record):
    """A sampled token."""

    id: int
    text: str | None  # the token's part of the response, "" where it ends within a character; None: unknown
    logprob: float  # the rollout's, under the tempered distribution


class GroupDetail(Record):
    """A prompt with all its responses, and the engine's data about every token."""

    iteration: int
    group_id: str
    policy_version: int
    worker_id: str
    prompt: str  # the row's text
    prompt_parts: list[PromptPart] = Field(default=[], repr=False)  # as the model saw it; []: not recorded
    num_prompt_tokens: int
    generate_s: float
    score_s: float
    failure: str = ""  # reason why there are no responses
    chosen: str = ""  # row or level of the prompt and the reason for its choice; empty: outcomes did not decide
    responses: list[Sample]  # [G]
    tokens: list[list[Token]] = Field(repr=False)  # [G][T]; [] for the last responses if there were too many
    is_supervised: bool = Field(False, exclude_if=lambda is_set: not is_set)  # a row of examples: no engine saw it


class Event(Record):
    """An event of a job. Events are ordered by `id`, which is the cursor for the next read."""

    id: str
    time: float
    kind: str  # "job.state", "iteration.opened", "group.stale", "worker.joined", ...
    message: str = ""
    data: dict[str, Any] = {}


class HostMemory(Record):
    """The memory of the machine or container that a process is in."""

    name: str  # name of the machine
    available_bytes: int
    total_bytes: int


class EpisodeWait(Record):
    """An episode that waits for its environment, at the moment of a heartbeat."""

    group_id: str
    episode: int
    waits_for: str  # words such as: tool `search`
    waited_s: float
    left_s: float | None = None  # until the episode is given up; None: its environment is still being loaded


class ProcessRecord(Record):
    """The last heartbeat of a trainer or of a rollout replica."""

    id: str
    job_id: str | None = None
    # a trainer: "starting" | "idle" (asks for jobs) | "training" | "stopped"
    # a rollout: "starting" (without a job: the process, with one: the engine) | "idle" | "unsuited" (can serve none of
    # the jobs) | "updating" | "generating" | "draining"
    state: str
    last_seen_at: float = 0.0  # Redis time at which the record was written
    host: HostMemory | None = None
    devices: list[str] | None = None  # devices that it computes on, such as `core 0` or `cuda 1`; None: not known

    def silence_s(self, now: float) -> float:
        """Return the seconds since the heartbeat. `now` is by the Redis clock."""
        return max(0.0, now - self.last_seen_at)

    def is_alive(self, now: float) -> bool:
        """Return whether the process can take jobs, and has neither stopped nor become silent."""
        return self.state != "stopped" and not self.is_starting(now) and self.silence_s(now) < SILENT_S

    def is_starting(self, now: float) -> bool:
        """Return whether the process has announced its start (the last it wrote) and may still load its libraries."""
        return self.state == "starting" and self.job_id is None and self.silence_s(now) < STARTING_S


class EngineFailure(Record):
    """A model that a rollout's engine could not load."""

    epoch: str  # the job's epoch at the time: a job that is resumed, or whose trainer is another one, is tried again
    cause: str  # innermost cause, one line
    is_of_files: bool = False  # the model's files alone decide it, so that no other rollout need try


class WorkerRecord(ProcessRecord):
    """A rollout replica's last heartbeat."""

    doing: str = ""  # the step of its start that it is at, or the environment that it waits for, in words
    waiting_episode: EpisodeWait | None = None  # the episode that waits longest; None: none waits for long
    policy_version: int | None = None
    num_in_flight: int = 0
    num_devices: int = 1
    tokens_per_s: float | None = None
    lease_s: float | None = None  # others take over its prompts when it is silent for this long; None: not reported
    hardware: str = ""  # processor or accelerator that it computes on
    bfloat16: str | None = None  # "native" | "emulated" | "missing" there; None: not reported
    unsuited_for: list[str] = []  # ids of the pool's jobs that it cannot serve, as of its last look
    engine_failures: dict[str, EngineFailure] = {}  # failures by job id, while the job is active


class TrainerRecord(ProcessRecord):
    """A trainer's last heartbeat."""

    trackers: list[str] | None = None  # types of trackers that are installed there; None: not reported


class Finding(Record):
    """A sentence of the doctor, with the same facts as fields."""

    sentence: str
    is_problem: bool = False
    job_id: str | None = None
    who: str = ""  # id of the trainer, rollout or job that it is about, or "redis", "broker"
    waits_for: str = ""
    since_s: float | None = None
    next: str = ""  # the event after the wait
    deadline_s: float | None = None  # until it happens
    key: str = ""  # a key of the job's configuration, to change for better learning
    is_detail: bool = False  # about leases and streams, which views fold


class IterationUpdate(Record):
    """An iteration that has changed, as live streams send it."""

    record: IterationRecord
    point: dict[str, float] = {}  # values in the series of metrics, once the iteration is committed


class Span(Record):
    """A span of time with what was done in it. `start` and `end` are Unix seconds by the Redis clock."""

    lane: str  # id of the rollout, or "trainer"
    # "generate" | "score" | "environment" | "pull" | "load"; of the trainer "wait" | "micro_batch" | "optimizer" |
    # "publish" | "checkpoint"
    kind: str
    start: float
    end: float
    iteration: int  # iteration, or the policy version for "pull" and "load"
    group_id: str | None = None


class Lane(Record):
    """The trainer or a rollout, over the time of the timeline."""

    id: str
    # Share of the time in which a rollout generates nothing, or the trainer waits; None: unknown.
    idle_frac: float | None = None


class Timeline(Record):
    """A record of what trainer and rollouts did during some iterations. Times are Unix seconds by the Redis clock."""

    start: float  # when the first of the iterations was opened
    end: float  # when the last of them was committed, or now
    iterations: list[int]
    lanes: list[Lane]  # the trainer first
    spans: list[Span] = Field(repr=False)  # spans in the order of their starts
    both_work: list[tuple[float, float]] = Field(default=[], repr=False)  # times of generation and a micro-batch
    overlap: str | None = None  # overlap of generation and training, and the reason, in words; None: not measured
    advice: str | None = None  # sides that should have more or fewer devices; None: too few measurements


class PoolStatus(Record):
    """The work that waits in a pool, and the processes that are alive in it."""

    pool: str
    num_jobs: int = 0  # pending, running, paused or being cancelled
    num_prompts: int = 0  # prompts of running jobs whose groups are not accepted yet
    num_unclaimed_prompts: int = 0  # prompts without a rollout
    num_trainers: int  # seen within the last 10 s
    num_starting_trainers: int = 0  # trainers that have announced their start and load their libraries
    num_rollouts: int


class MetricSeries(Record):
    """The curves of a job: `area/name` -> [(iteration, value), ...]; for `eval/name`, (evaluation, value)."""

    metrics: dict[str, list[tuple[int, float]]]


class Diagnosis(Record):
    """The findings of the doctor, most important first. `is_healthy`: none of them is a problem."""

    is_healthy: bool
    verdict: str = ""  # one job's reward, truncated responses and time left; "" before its first commit
    findings: list[Finding]
