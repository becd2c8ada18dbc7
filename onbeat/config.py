"""The job: what to train, as users write it in TOML or JSON. Unknown keys are refused, at every level.

Where a process runs (URLs, ports, devices) is not here: that is each service's `settings`.
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from onbeat.objectives import IS_ACCEPTED, AnyObjective
from onbeat.objectives.grpo import GrpoObjective
from onbeat.rewards import OneOrSeveralRewards, RewardConfig, rewards_in
from onbeat.section import Float, Fraction, Int, PositiveFloat, PositiveInt, Section

MAX_HELD_OUT = 10_000  # prompts of an evaluation
MAX_DEPTH = 32  # lists and mappings within each other; the libraries that read and write JSON end at about 250


class ModelConfig(Section):
    path: str = Field(
        min_length=1,
        description="`bundled:NAME`, a folder in Hugging Face layout on the trainer's machine, or a hub id `org/name`",
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto",
        description="dtype of computation and of published weights; auto: bfloat16 where the trainer and all rollouts "
        "have instructions for it, else float32. Master weights are always float32",
    )
    max_context_tokens: PositiveInt | None = Field(
        None, le=16_777_216, description="longest prompt plus response; default: what the model supports"
    )


class ReasoningGymData(Section):
    type: Literal["reasoning_gym"] = "reasoning_gym"
    task: str = Field(description="a reasoning_gym dataset name, such as `chain_sum`")
    options: dict[str, Any] = Field(default_factory=dict, description="the task's own options, such as `max_terms`")
    system_prompt: str | None = Field(None, description="put before every question as a system message")


class RowData(Section):
    """How a row becomes a prompt."""

    prompt_field: str = Field(
        "prompt", description="a string, or a list of {role, content} messages; `a.b` is field b of the mapping a"
    )
    answer_field: str | None = Field("answer", description="passed to the reward as `answer`; null: no answers")
    answer_pattern: str | None = Field(
        None,
        description="a regular expression: the answer is its last match in the answer's field, or the first group of "
        "it; GSM8K: `#### (.+)`",
    )
    as_chat: bool = Field(True, description="wrap a string prompt into one user message and apply the chat template")
    system_prompt: str | None = Field(None, description="put before every prompt as a system message")
    shuffle: bool = Field(True, description="draw in a new seeded order in every epoch")
    max_prompt_tokens: PositiveInt | None = Field(
        None, description="longer prompts are not trained; counted when the job is submitted, as the model gets them"
    )
    on_too_long: Literal["drop", "refuse"] = Field("drop", description="leave such prompts out, or refuse the job")


class FileData(RowData):
    type: Literal["jsonl", "parquet"]
    path: str = Field(description="the file, on the broker's machine, inside its data folder")


class HubData(RowData):
    """A data set of the Hugging Face hub; the broker needs the package `datasets`."""

    type: Literal["hf"]
    path: str = Field(
        description="its id on the hub, `org/name`; or a folder of that shape in the broker's data folder"
    )
    subset: str | None = Field(None, description="its configuration, where it has several; GSM8K: `main`")
    split: str = Field("train", description="of the data set")
    revision: str | None = Field(None, description="a commit, tag or branch; default: the newest at the first use")


DataConfig = Annotated[ReasoningGymData | FileData | HubData, Field(discriminator="type")]


class EnvironmentConfig(Section):
    """An installed program that calls the policy as often as it needs and gives the reward: responses are episodes."""

    name: str = Field(description="an installed entry point of the group `onbeat.environments`")
    options: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the environment")
    max_turns: PositiveInt = Field(16, le=1_024, description="calls of the policy in one episode; further ones fail")
    timeout_s: Float = Field(
        120.0, gt=0, le=86_400, description="hard limit for one episode, from its start to its reward"
    )
    memory_limit_mb: Int = Field(2048, ge=64, le=1_048_576, description="hard limit of the process that runs a group")
    max_attempts: PositiveInt = Field(2, le=100, description="tries of one episode in one rollout")


class LoraConfig(Section):
    """Low-rank adapters (arXiv 2106.09685) instead of full fine-tuning; the reference policy is then the base model."""

    rank: PositiveInt = Field(16, description="of the two factors of an update")
    alpha: Float = Field(32.0, gt=0, description="the update is scaled by alpha / rank")
    target_modules: list[str] | Literal["all-linear"] = Field(
        "all-linear", description="names of the linear layers that get an adapter, such as q_proj"
    )


class RolloutConfig(Section):
    num_prompts_per_iteration: PositiveInt = Field(le=10_000, description="groups in one iteration")
    num_samples_per_prompt: PositiveInt = Field(le=1_024, description="responses in one group (G)")
    max_response_tokens: PositiveInt = Field(le=1_048_576, description="a response is cut there")
    temperature: Float = Field(
        1.0, ge=0.01, le=10, description="of sampling; logprobs are of the tempered distribution"
    )
    group_deadline_s: Float = Field(
        300.0, gt=0, le=86_400, description="generating and scoring one group, from its claim"
    )
    max_group_attempts: PositiveInt = Field(
        3, le=100, description="tries of one group (its own errors, deaths of workers) until it counts as failed"
    )
    on_group_failure: Literal["skip", "fail"] = Field(
        "skip", description="a group that cannot be produced is recorded and skipped, or fails the job"
    )
    dispatch: Literal["longest_first", "in_order"] = Field(
        "longest_first",
        description="prompts go out by the length of their responses in the epoch before, or as they come in the data; "
        "what is trained is the same",
    )


class OptimizerConfig(Section):
    learning_rate: Float = Field(1e-6, gt=0, lt=1, description="of AdamW, after the warm-up")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.95), description="decay of the two moments")
    eps: Float = Field(1e-8, gt=0, description="added to the root of the second moment")
    weight_decay: Float = Field(0.0, ge=0, description="decoupled from the gradient")
    max_grad_norm: Float = Field(1.0, gt=0, description="a longer gradient is scaled down to this norm")
    num_warmup_iterations: Int = Field(0, ge=0, description="linear learning-rate warm-up")
    decay: Literal["none", "linear", "cosine"] = Field(
        "none", description="of the learning rate, from the end of the warm-up to 0 after the job's last step"
    )


class GacConfig(Section):
    """Gradient alignment control (arXiv 2603.01501); thresholds are our own choice."""

    mode: Literal["off", "metric", "control"] | None = Field(
        None,
        description="metric: only report the cosine of consecutive gradients; control: project and skip; "
        "default: control in `bounded`, metric elsewhere",
    )
    c_low: Float = Field(0.3, ge=0, lt=1, description="project back to this cosine when it is exceeded")
    c_high: Float = Field(0.95, gt=0, le=1, description="skip the step above this cosine")
    is_full_removal: bool = Field(False, description="project to cosine 0 instead of c_low")
    history: Literal["raw", "projected"] = Field("raw", description="which gradient the next one is compared with")

    @model_validator(mode="after")
    def check_thresholds(self) -> "GacConfig":
        if self.c_low >= self.c_high:
            raise ValueError(f"gac.c_low: {self.c_low} must lie below c_high, {self.c_high}")
        return self


class TrainingConfig(Section):
    max_tokens_per_micro_batch: PositiveInt = Field(
        4096,
        le=2**31 - 1,
        description="packed tokens of one forward and backward; a larger group is split, its prompt repeated",
    )
    num_updates_per_iteration: PositiveInt = Field(
        1, description="optimizer steps of one iteration, each on its own share of the prompts, by their order"
    )
    has_gradient_checkpointing: bool = Field(
        False, description="compute activations again in the backward pass: less memory, about a third more time"
    )


class Schedule(Section):
    num_iterations: PositiveInt = Field(le=1_000_000, description="of the whole job")
    earlier_ends: list[PositiveInt] = Field(
        default_factory=list,
        description="how many iterations it had before each `onbeat jobs resume JOB --iterations 50`, "
        "which writes them; the learning rate decays to each",
    )
    iteration_deadline_s: Float = Field(
        1800.0, gt=0, le=7 * 86_400, description="an iteration that makes no progress for this long fails the job"
    )
    start_deadline_s: Float = Field(
        86400.0,
        gt=0,
        le=365 * 86_400,
        description="a pending job fails when no trainer of its pool was alive for this long",
    )
    max_lost_trainers: PositiveInt = Field(
        10, le=1_000, description="trainers lost in a row, without a committed iteration between, that fail the job"
    )


class PeriodicSchedule(Schedule):
    """Train on groups while others are still generated; one policy version per iteration, strictly on-policy."""

    mode: Literal["periodic"] = "periodic"


class SyncSchedule(Schedule):
    """Generate all groups of an iteration, then train."""

    mode: Literal["sync"]


class BoundedSchedule(Schedule):
    """Iteration t is generated by one version >= t - max_staleness, so that rollouts need not wait for the trainer."""

    mode: Literal["bounded"]
    max_staleness: PositiveInt = Field(1, le=64, description="optimizer iterations between generating and training")
    publish_above_kl: PositiveFloat | None = Field(
        None,
        description="publish a new version only when the estimated divergence (k3, nats per token) from the published "
        "one exceeds this, or the bound asks for it; default: every version",
    )

    @model_validator(mode="after")
    def check_publishing(self) -> "BoundedSchedule":
        if self.publish_above_kl is not None and self.max_staleness < 2:
            raise ValueError("schedule.publish_above_kl: has no room with max_staleness = 1; set that to 2 or more")
        return self


ScheduleConfig = Annotated[PeriodicSchedule | SyncSchedule | BoundedSchedule, Field(discriminator="mode")]


class EvaluationSet(Section):
    """One of several held-out sets."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,39}$", description="of its scores, `eval/NAME/reward_mean`"
    )
    data: DataConfig
    num_prompts: PositiveInt | None = Field(
        None, le=10_000, description="the first so many of its data; default: `evaluation.num_prompts`"
    )
    reward: OneOrSeveralRewards | None = Field(
        None, description="of its own, one or several; default: the rewards of the job"
    )
    solved_at: Float | None = Field(None, description="reward of a solved response; default: that of the job")


class EvaluationConfig(Section):
    """A held-out set, or several, generated by the same rollouts on the current version; nothing of it is trained."""

    data: DataConfig | None = Field(None, description="of the only set")
    sets: list[EvaluationSet] = Field(
        default_factory=list, max_length=8, description="several sets, instead of `data`; summaries show the first one"
    )
    every_iterations: PositiveInt = Field(10, description="before the first iteration, then after every so many")
    num_prompts: PositiveInt = Field(
        32, le=10_000, description="the first so many of the data, the same ones every time"
    )
    num_samples_per_prompt: PositiveInt = Field(
        1, le=1_024, description="responses to one prompt; more than one also give pass_at_k"
    )
    temperature: Float = Field(1.0, ge=0.01, le=10, description="of sampling")

    @model_validator(mode="after")
    def check_sets(self) -> "EvaluationConfig":
        if (self.data is None) == (not self.sets):
            raise ValueError("evaluation.data: give the data of one set, or several sets under [[evaluation.sets]]")
        names = [each.name for each in self.sets]
        if twice := sorted({name for name in names if names.count(name) > 1 or name == "reward"}):
            raise ValueError(f"evaluation.sets: {twice[0]} is the name of two sets or of other scores; take another")
        if (total := sum(each.num_prompts or self.num_prompts for each in self.sets)) > MAX_HELD_OUT:
            raise ValueError(f"evaluation.num_prompts: {total} in all sets together; at most {MAX_HELD_OUT}")
        return self


@dataclass(frozen=True)
class HeldOutSet:
    """A held-out set with what it has from the job."""

    name: str  # '' of the only one
    field: str  # of the job, that it is in
    data: DataConfig
    num_prompts: int
    rewards: list[RewardConfig]
    solved_at: float


class CheckpointConfig(Section):
    every_iterations: PositiveInt = Field(50, description="also written at the end of the job")
    keep: Int = Field(2, ge=2, description="newest checkpoints that are kept")


class ForkConfig(Section):
    """Start from a checkpoint of another job: its weights and its optimizer. Iterations are counted on from there."""

    job: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200, description="id of the other job")
    iteration: PositiveInt = Field(description="the checkpoint that it wrote after so many iterations")


class RetentionConfig(Section):
    """What is kept of a job while it is there. Deleting a job removes all but the trainer's checkpoints."""

    rollout_iterations: PositiveInt | None = Field(
        None,
        description="newest iterations contained in a checkpoint whose groups are kept, for samples, replay and audit; "
        "default: 50, or checkpoint.every_iterations if that is more",
    )


class Tracker(Section):
    """A place for the curves besides TensorBoard. Addresses and keys: the trainer's environment, never the job."""

    project: str = Field(
        "onbeat",
        max_length=100,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="W&B or Trackio project, MLflow experiment; the run has the job's id",
    )


class WandbTracker(Tracker):
    """Weights & Biases."""

    type: Literal["wandb"]
    entity: str | None = Field(None, description="user or team; default: that of the trainer's API key")
    tags: list[str] = Field(default_factory=list, max_length=20, description="of the run")


class MlflowTracker(Tracker):
    type: Literal["mlflow"]


class TrackioTracker(Tracker):
    type: Literal["trackio"]


TrackerConfig = Annotated[WandbTracker | MlflowTracker | TrackioTracker, Field(discriminator="type")]


class JobConfig(Section):
    """One training job. `JobConfig.from_file` reads TOML or JSON."""

    name: str = Field(
        "job",
        min_length=1,
        max_length=100,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="for people; need not be unique",
    )
    pool: str = Field(
        "default", pattern=r"^[a-z0-9][a-z0-9-]{0,62}$", description="which trainers and rollouts serve it"
    )
    seed: Int = Field(0, ge=0, lt=2**32, description="of the data's order and of sampling")
    solved_at: Float = Field(
        1.0, description="a response with this reward or more counts as solved, in pass_at_k and in shares of groups"
    )
    model: ModelConfig
    lora: LoraConfig | None = Field(None, description="train adapters; default: all parameters")
    data: DataConfig
    reward: OneOrSeveralRewards | None = Field(None, description="scores responses; needed unless an environment does")
    environment: EnvironmentConfig | None = Field(
        None, description="responses are episodes of several turns; default: one response to the prompt"
    )
    rollout: RolloutConfig
    objective: AnyObjective = Field(default_factory=GrpoObjective)
    optimizer: OptimizerConfig = OptimizerConfig()
    gac: GacConfig = GacConfig()
    training: TrainingConfig = TrainingConfig()
    schedule: ScheduleConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    retention: RetentionConfig = RetentionConfig()
    evaluation: EvaluationConfig | None = None
    fork: ForkConfig | None = Field(None, description="start from a checkpoint of another job; default: from the model")
    tracking: list[TrackerConfig] = Field(
        default_factory=list, description="trackers besides TensorBoard, one of a kind"
    )

    @model_validator(mode="before")
    @classmethod
    def check_depth(cls, job: Any) -> Any:
        """Refuse what could be stored, but not shown again."""
        for name, section in job.items() if isinstance(job, dict) else ():
            if is_nested_deeper(section, MAX_DEPTH):
                field = name if str(name).isidentifier() and len(name) <= 80 else "job"
                raise ValueError(f"{field}: nested more than {MAX_DEPTH} levels deep; make it flatter")
        return job

    @field_validator("tracking")
    @classmethod
    def check_trackers(cls, trackers: list[TrackerConfig]) -> list[TrackerConfig]:
        types = [tracker.type for tracker in trackers]
        if twice := sorted({each for each in types if types.count(each) > 1}):
            raise ValueError(f"two trackers of type {twice[0]}; a job has one run in each")
        return trackers

    @field_validator("schedule", mode="before")
    @classmethod
    def default_schedule(cls, value: Any) -> Any:
        return {"mode": "periodic", **value} if isinstance(value, dict) else value

    def with_dtype(self, dtype: str) -> "JobConfig":
        """Return the job as its trainer and rollouts see it once the dtype is resolved."""
        return self.model_copy(update={"model": self.model.model_copy(update={"dtype": dtype})})

    def extended(self, num_iterations: int) -> "JobConfig":
        """Return the job with more iterations, once it has done those that it has."""
        ends = [*self.schedule.earlier_ends, self.schedule.num_iterations]
        more = {"num_iterations": num_iterations, "earlier_ends": ends}
        return self.model_copy(update={"schedule": self.schedule.model_copy(update=more)})

    @property
    def rewards(self) -> list[RewardConfig]:
        """The rewards whose weighted sum a response gets, of a single one without a part; none with an environment."""
        return rewards_in(self.reward) if self.reward is not None else []

    @property
    def longest_response(self) -> int:
        """The most tokens that one response may sample; those of an episode are sampled in several turns."""
        max_turns = self.environment.max_turns if self.environment is not None else 1
        return max_turns * self.rollout.max_response_tokens

    @property
    def held_out(self) -> list[HeldOutSet]:
        """The held-out sets, in the order of their prompts; none without an evaluation."""
        evaluation = self.evaluation
        if evaluation is None:
            return []
        if evaluation.data is not None:
            own = (evaluation.data, evaluation.num_prompts, self.rewards, self.solved_at)
            return [HeldOutSet("", "evaluation", *own)]
        return [
            HeldOutSet(
                name=each.name,
                field=f"evaluation.sets.{index}",
                data=each.data,
                num_prompts=each.num_prompts or evaluation.num_prompts,
                rewards=self.rewards if each.reward is None else rewards_in(each.reward),
                solved_at=self.solved_at if each.solved_at is None else each.solved_at,
            )
            for index, each in enumerate(evaluation.sets)
        ]

    @property
    def first_iteration(self) -> int:
        """0, unless the job is a fork."""
        return self.fork.iteration if self.fork is not None else 0

    @property
    def decay_ends(self) -> list[int]:
        """Optimizer steps to which the learning rate decays, one after another; the last one ends the job."""
        ends = [*self.schedule.earlier_ends, self.schedule.num_iterations]
        return [end * self.training.num_updates_per_iteration for end in ends]

    @property
    def max_staleness(self) -> int:
        """0 in the strict modes."""
        return self.schedule.max_staleness if isinstance(self.schedule, BoundedSchedule) else 0

    @model_validator(mode="after")
    def check_reward(self) -> "JobConfig":
        if self.reward is None and self.environment is None:
            raise ValueError("reward: missing; name one, or an [environment], which gives the reward itself")
        if self.reward is not None and self.environment is not None:
            raise ValueError("reward: the environment gives the reward; leave out [reward] or [environment]")
        sets = self.evaluation.sets if self.evaluation is not None else []
        if self.environment is not None and any(each.reward is not None for each in sets):
            raise ValueError("evaluation.sets: the environment gives the reward; leave out those of the sets")
        return self

    @model_validator(mode="after")
    def check_group_size(self) -> "JobConfig":
        if self.rollout.num_samples_per_prompt < 2:
            raise ValueError(
                "rollout.num_samples_per_prompt: the group advantage of "
                f"{self.objective.type} needs at least 2 responses per prompt, got "
                f"{self.rollout.num_samples_per_prompt}; set it to 2 or more (8 is usual)"
            )
        return self

    @model_validator(mode="after")
    def check_mode(self) -> "JobConfig":
        objective, allowed = self.objective, self.objective.modes
        if self.schedule.mode not in allowed:
            reason = "needs statistics of the whole iteration and " if objective.needs_whole_iteration else ""
            raise ValueError(
                f"schedule.mode: objective {objective.type} {reason}cannot run in {self.schedule.mode}; "
                f"use {' or '.join(allowed)}, or another objective"
            )
        return self

    @model_validator(mode="after")
    def check_ends(self) -> "JobConfig":
        ends = [*self.schedule.earlier_ends, self.schedule.num_iterations]
        if ends != sorted(set(ends)):
            raise ValueError(
                f"schedule.earlier_ends: {self.schedule.earlier_ends} must ascend and stay below the "
                f"{self.schedule.num_iterations} iterations of the job; leave it out"
            )
        return self

    @model_validator(mode="after")
    def check_fork(self) -> "JobConfig":
        if self.first_iteration >= self.schedule.num_iterations:
            raise ValueError(
                f"schedule.num_iterations: {self.schedule.num_iterations} are done in the checkpoint after "
                f"{self.first_iteration} iterations that the job starts from; raise it"
            )
        return self

    @model_validator(mode="after")
    def check_updates(self) -> "JobConfig":
        num_updates, num_prompts = self.training.num_updates_per_iteration, self.rollout.num_prompts_per_iteration
        if num_updates > num_prompts:
            raise ValueError(
                f"training.num_updates_per_iteration: {num_updates} updates of {num_prompts} prompts leave some "
                f"without any; use at most {num_prompts}"
            )
        return self

    @model_validator(mode="after")
    def check_old_policy(self) -> "JobConfig":
        if self.objective.old_policy == "proximal" and (self.max_staleness == 0 or self.objective.importance is None):
            raise ValueError(
                "objective.old_policy: proximal needs schedule.mode = 'bounded' and objective.importance, which "
                "corrects for the policy that generated; elsewhere use behaviour"
            )
        return self

    @model_validator(mode="after")
    def default_gac(self) -> "JobConfig":
        if self.gac.mode is None:
            mode = "control" if self.max_staleness else "metric"
            object.__setattr__(self, "gac", self.gac.model_copy(update={"mode": mode}))
        return self

    @model_validator(mode="after")
    def default_retention(self) -> "JobConfig":
        """Keep the iterations between two checkpoints, as a replay starts at a checkpoint."""
        if self.retention.rollout_iterations is None:
            kept = RetentionConfig(rollout_iterations=max(50, self.checkpoint.every_iterations))
            object.__setattr__(self, "retention", kept)
        return self

    @classmethod
    def of_job(cls, fields: Mapping[str, str]) -> "JobConfig":
        """Return the job of a ledger's record, with its dtype resolved if a trainer has recorded one.

        Its objective need not be installed here. Raises pydantic's ValidationError for a job of another version of
        Onbeat.
        """
        config = cls.model_validate_json(fields["config"], context=IS_ACCEPTED)
        return config.with_dtype(fields["dtype"]) if "dtype" in fields else config

    @classmethod
    def from_file(cls, path: str | Path, overrides: list[str] | None = None) -> "JobConfig":
        """Read a TOML or JSON job. Raises ValueError (pydantic's included) naming the file and the remedy."""
        return cls.model_validate(read_job_file(Path(path), overrides or []))


def is_nested_deeper(value: Any, depth: int) -> bool:
    """Return whether lists and mappings lie more than `depth` levels within each other, level by level.

    >>> is_nested_deeper([[1]], 2), is_nested_deeper([{"a": [1]}], 2)
    (False, True)
    """
    level = [value]
    for _ in range(depth + 1):
        containers = [each for each in level if isinstance(each, dict | list | tuple)]
        if not containers:
            return False
        level = [item for each in containers for item in (each.values() if isinstance(each, dict) else each)]
    return True


def read_job_file(path: Path, overrides: list[str]) -> dict[str, Any]:
    """Read the raw job with `key.sub=value` overrides applied; values are TOML, bare words are strings.

    >>> apply_override({"schedule": {"mode": "sync"}}, "schedule.mode=periodic")
    {'schedule': {'mode': 'periodic'}}
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such job file; see examples/ for jobs to start from")
    if path.suffix in (".yaml", ".yml"):
        raise ValueError(f"{path}: a job file is TOML or JSON, not YAML; see examples/ for jobs to start from")
    kind = "JSON" if path.suffix == ".json" else "TOML"
    try:
        text = path.read_text("utf-8-sig")  # some editors put a mark before the first character
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not text in UTF-8; save it as UTF-8") from error
    try:
        job: dict[str, Any] = json.loads(text) if kind == "JSON" else tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"{path}: nested too deep for a job; see examples/ for what one looks like") from None
    except ValueError as error:
        raise ValueError(f"{path}: not valid {kind}: {error}") from error
    if not isinstance(job, dict):
        raise ValueError(f'{path}: a job is one JSON object, such as {{"model": ...}}')
    for override in overrides:
        apply_override(job, override)
    return job


def apply_override(job: dict[str, Any], override: str) -> dict[str, Any]:
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise ValueError(f"--set {override}: expected key=value, such as schedule.num_iterations=10")
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, leaf = key.strip().split(".")
    section = job
    for parent in parents:
        section = section.setdefault(parent, {})
        if not isinstance(section, dict):
            raise ValueError(f"--set {override}: {parent} is a value, not a section")
    section[leaf] = value
    return job
