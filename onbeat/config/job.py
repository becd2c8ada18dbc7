"""A whole job: what must hold between its sections, and how it is read."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError, ValidationInfo, field_validator, model_validator

from onbeat.config.data import KEYS_OF_SEVERAL, DataConfig
from onbeat.config.evaluation import HeldOutSet
from onbeat.config.explain import describe_wrong_job
from onbeat.config.files import read_job_file
from onbeat.config.rollout import MAX_PROMPTS, OVERLONG, EnvironmentConfig
from onbeat.config.schedule import BoundedSchedule
from onbeat.config.scoring import environment_of, environments_of, problems_of_scoring, rewards_of
from onbeat.config.sections import JobSections
from onbeat.config.storage import RetentionConfig, TrackerConfig
from onbeat.config.teacher import problems_of_teacher
from onbeat.config.templates import moment_of
from onbeat.config.warm_start import SFT, fill_sections_of_sft, problems_of_warm_start
from onbeat.contracts.rewards import RewardConfig, rewards_in
from onbeat.contracts.section import IS_ACCEPTED
from onbeat.contracts.slots import Slots
from onbeat.objectives.base.gdpo import problems_of_parts
from onbeat.objectives.base.objective import PART
from onbeat.objectives.sft import SftObjective

DERIVED = (("gac", "mode"), ("retention", "rollout_iterations"))  # keys that `fill_defaults` fills in
MAX_DEPTH = 32  # lists and mappings within each other; the libraries for JSON fail at about 250


class JobConfig(JobSections):
    """One training job. `JobConfig.from_file` reads TOML or JSON."""

    @model_validator(mode="before")
    @classmethod
    def check_depth(cls, job: Any) -> Any:
        """Refuse a job that is nested so deep that it could be stored, but not read again."""
        for name, section in job.items() if isinstance(job, dict) else ():
            if is_nested_deeper(section, MAX_DEPTH):
                field = name if str(name).isidentifier() and len(name) <= 80 else "job"
                raise ValueError(f"{field}: nested more than {MAX_DEPTH} levels deep; make it flatter")
        return job

    @model_validator(mode="before")
    @classmethod
    def fill_sections(cls, job: Any) -> Any:
        return fill_sections_of_sft(job)

    @field_validator("tracking")
    @classmethod
    def check_trackers(cls, trackers: list[TrackerConfig]) -> list[TrackerConfig]:
        types = [tracker.type for tracker in trackers]
        if twice := sorted({section_type for section_type in types if types.count(section_type) > 1}):
            raise ValueError(f"two trackers of type {twice[0]}; a job has one run in each")
        return trackers

    @field_validator("schedule", mode="before")
    @classmethod
    def default_schedule(cls, value: Any) -> Any:
        return {"mode": "periodic", **value} if isinstance(value, dict) else value

    def with_dtype(self, dtype: str) -> "JobConfig":
        """Return the job as its trainer and rollouts see it once the dtype is resolved."""
        return self.model_copy(update={"model": self.model.model_copy(update={"dtype": dtype})})

    def with_row_tokens(self, num_tokens: int) -> "JobConfig":
        """Return the job with a number in place of training.max_tokens_per_micro_batch = "auto"."""
        training = self.training.model_copy(update={"max_tokens_per_micro_batch": num_tokens})
        return self.model_copy(update={"training": training})

    def extended(self, num_iterations: int) -> "JobConfig":
        """Return the finished job with a new total of iterations; the previous total joins `earlier_ends`."""
        return self.with_ends([*self.schedule.ends, num_iterations])

    def with_ends(self, ends: Sequence[int]) -> "JobConfig":
        more = {"num_iterations": ends[-1], "earlier_ends": list(ends[:-1])}
        return self.model_copy(update={"schedule": self.schedule.model_copy(update=more)})

    def continues(self, other: "JobConfig") -> bool:
        """Return whether this is the other job, perhaps extended since."""
        if other.rendering.now is None and self.rendering.now is not None:
            other = other.dated(self.rendering.now)
        if other.num_supervised != self.num_supervised and other.warm_start is not None:
            other = other.with_warm_start(self.num_supervised)
        ends = other.schedule.ends
        return self.schedule.ends[: len(ends)] == ends and self.with_ends(ends) == other

    def dated(self, now: str) -> "JobConfig":
        """Return the job with the moment that its chat template takes for now, unless it has one."""
        if self.rendering.now is not None:
            return self
        first: DataConfig = self.rendering.model_copy(update={"now": now})
        return self.model_copy(update={"data": [first, *self.data[1:]] if isinstance(self.data, list) else first})

    def with_warm_start(self, num_iterations: int) -> "JobConfig":
        """Return the job with a number in place of the epochs of its warm start, if it has given these."""
        if self.warm_start is None or self.warm_start.epochs is None:
            return self
        counted = self.warm_start.model_copy(update={"num_iterations": num_iterations, "epochs": None})
        return self.model_copy(update={"warm_start": counted})

    @property
    def rendering(self) -> DataConfig:
        """The data whose template arguments and form (`as_chat`) are those of all prompts: the first source."""
        return self.sources[0][1]

    @property
    def rendering_field(self) -> str:
        """The field of these data."""
        return self.sources[0][0]

    @property
    def has_system_prompt(self) -> bool:
        """True if any of the sources whose prompts are answered in one turn has one."""
        return any(source.system_prompt and environment_of(self, source) is None for _, source in self.sources)

    @property
    def chooses_prompts(self) -> bool:
        """True if the outcomes of earlier iterations decide on the prompts of one of its sources."""
        return any(source.chooses is not None for _, source in self.sources)

    @property
    def slots(self) -> Slots:
        """The turns that several sources take at the prompts."""
        return Slots.by_weights([source.weight for _, source in self.sources])

    @property
    def rewards(self) -> list[RewardConfig]:
        """The rewards, whose weighted sum a response gets. A single one has no `part`. Empty with an environment."""
        return rewards_in(self.reward) if self.reward is not None else []

    @property
    def rewards_by_source(self) -> dict[str, list[RewardConfig]]:
        """The rewards of each source by its name, none where an environment plays; a single source has the name ''."""
        return {source.name or "": rewards_of(self, source) for _, source in self.sources}

    @property
    def environments(self) -> list[tuple[str, EnvironmentConfig]]:
        """Its environments by their fields, such as `environment` and `data.1.environment`."""
        return environments_of(self)

    @property
    def environments_by_source(self) -> dict[str, EnvironmentConfig | None]:
        """The environment of each source by its name; None where prompts are answered in one turn."""
        return {source.name or "": environment_of(self, source) for _, source in self.sources}

    @property
    def solved_at_by_source(self) -> dict[str, float]:
        """The reward from which a response counts as solved, by its source; a single source has the name ''."""
        return {
            source.name or "": self.solved_at if source.solved_at is None else source.solved_at
            for _, source in self.sources
        }

    @property
    def longest_response(self) -> int:
        """The most tokens that one response of any source may sample; an episode samples them in several turns."""
        environments = self.environments_by_source.values()
        max_turns = max(1 if environment is None else environment.max_turns for environment in environments)
        return max_turns * self.rollout.max_response_tokens

    @property
    def held_out(self) -> list[HeldOutSet]:
        """The held-out sets, in the order of their prompts; none without an evaluation."""
        evaluation = self.evaluation
        if evaluation is None:
            return []
        if evaluation.data is not None:
            inherited = (evaluation.data, evaluation.num_prompts, self.rewards, self.environment, self.solved_at)
            return [HeldOutSet("", "evaluation", *inherited)]
        return [
            HeldOutSet(
                name=section.name,
                field=f"evaluation.sets.{index}",
                data=section.data,
                num_prompts=section.num_prompts or evaluation.num_prompts,
                rewards=rewards_of(self, section),
                environment=environment_of(self, section),
                solved_at=self.solved_at if section.solved_at is None else section.solved_at,
            )
            for index, section in enumerate(evaluation.sets)
        ]

    @property
    def first_iteration(self) -> int:
        """0, unless the job is a fork."""
        return self.fork.iteration if self.fork is not None else 0

    @property
    def num_supervised(self) -> int:
        """The number of supervised iterations, which are the first of the job."""
        if self.objective.type == SFT:
            return self.schedule.num_iterations
        return (self.warm_start.num_iterations or 0) if self.warm_start is not None else 0

    def is_supervised(self, iteration: int) -> bool:
        return iteration < self.num_supervised

    @property
    def has_started_reference(self) -> bool:
        """True if the reference policy is the one at the end of the warm start."""
        kl = self.objective.kl
        return 0 < self.num_supervised < self.schedule.num_iterations and kl.coef > 0 and kl.reference is None

    @property
    def has_rollouts(self) -> bool:
        """False if the job generates nothing."""
        return self.objective.type != SFT or self.evaluation is not None

    def at(self, iteration: int) -> "JobConfig":
        """Return the job as this iteration is trained: of a supervised one, without what is about responses."""
        if not self.is_supervised(iteration):
            return self
        assert self.warm_start is not None
        rollout: dict[str, Any] = {"num_prompts_per_iteration": self.warm_start.num_rows_per_iteration}
        rollout |= {"num_samples_per_prompt": 1, "max_prompts_per_iteration": None, "temperature": 1.0}
        rollout |= {"truncated": "score", "overlong_cache": None}
        rollout |= {"on_group_failure": "skip"}  # `on_too_long` decides on rows, which fail for no other reason
        objective = self.objective if self.objective.type == SFT else SftObjective(type=SFT)
        sections = {
            "objective": objective,
            "teacher": None,
            "rollout": self.rollout.model_copy(update=rollout),
            "training": self.training.model_copy(update={"num_updates_per_iteration": 1}),
        }
        return self.model_copy(update=sections)

    def is_evaluated(self, version: int) -> bool:
        """Return whether an evaluation of this version is due: of the first one, every few, the one at the end of a
        warm start, and the last."""
        if self.evaluation is None:
            return False
        edges = (self.first_iteration, self.num_supervised, self.schedule.num_iterations)
        return version in edges or version % self.evaluation.every_iterations == 0

    @property
    def first_generated(self) -> int:
        """The first iteration of this job that rollouts generate."""
        return max(self.first_iteration, self.num_supervised)

    @property
    def decay_ends(self) -> list[int]:
        """Optimizer steps to which the learning rate decays, one after another; the last one ends the job. Those of
        supervised iterations do not count."""
        ends = [max(0, end - self.num_supervised) for end in self.schedule.ends]
        return [end * self.training.num_updates_per_iteration for end in ends]

    @property
    def max_staleness(self) -> int:
        """0 in the strict modes."""
        return self.schedule.max_staleness if isinstance(self.schedule, BoundedSchedule) else 0

    @model_validator(mode="after")
    def check(self, info: ValidationInfo) -> "JobConfig":
        """Refuse what does not go together. A stored job passed the checks of the build that accepted it."""
        if info.context == IS_ACCEPTED:
            return self
        if problems := list(dict.fromkeys(problems_of(self))):
            raise ValueError("\n".join(problems))
        return self

    @model_validator(mode="after")
    def fill_defaults(self) -> "JobConfig":
        """Fill in what follows from other sections. A replay starts at a checkpoint: iterations since then are kept."""
        if self.gac.mode is None:
            mode = "control" if self.max_staleness else "metric"
            object.__setattr__(self, "gac", self.gac.model_copy(update={"mode": mode}))
        if self.retention.rollout_iterations is None:
            kept = RetentionConfig(rollout_iterations=max(50, self.checkpoint.every_iterations))
            object.__setattr__(self, "retention", kept)
        return self

    @classmethod
    def without_derived(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Return a job's fields without the values that `fill_defaults` derives: a change may lead to others."""
        for section, name in DERIVED:
            shorter = fields | {section: {**fields.get(section, {}), name: None}}
            with suppress(ValidationError):  # it is of another version of Onbeat
                derived = cls.model_validate(shorter, context=IS_ACCEPTED).model_dump(mode="json")
                if derived[section][name] == fields.get(section, {}).get(name):
                    fields = shorter
        return fields

    @classmethod
    def of_job(cls, fields: Mapping[str, str]) -> "JobConfig":
        """Return the job of a ledger's record, with the dtype and the tokens of a row that its trainer has recorded.

        Its objective need not be installed here. Raises pydantic's ValidationError for a job of another version of
        Onbeat.
        """
        config = cls.model_validate_json(fields["config"], context=IS_ACCEPTED)
        if "created_at" in fields:  # the job is of a version that recorded no date of its prompts
            config = config.dated(moment_of(float(fields["created_at"])))
        if (num_tokens := fields.get("max_tokens_per_micro_batch")) is not None:
            config = config.with_row_tokens(int(num_tokens))
        return config.with_dtype(fields["dtype"]) if "dtype" in fields else config

    @classmethod
    def from_file(cls, path: str | Path, overrides: list[str] | None = None) -> "JobConfig":
        """Read a TOML or JSON job. Raises ValueError naming the file, each wrong field and the remedy."""
        job = read_job_file(Path(path), overrides or [])
        try:
            return cls.model_validate(job)
        except ValidationError as error:
            raise ValueError(describe_wrong_job(error, job, path)) from error


def problems_of(job: JobConfig) -> Iterator[str]:
    """Yield what does not hold between the sections: the field, what is wrong with it, and a remedy."""
    yield from problems_of_scoring(job)
    if job.model.adapter is not None and job.lora is None:
        yield "model.adapter: adapters are trained with [lora]; add that section with the adapter's rank and alpha"
    longest, min_tokens = job.rollout.max_response_tokens, job.evaluation.min_tokens if job.evaluation else 0
    if min_tokens > longest:
        yield (
            f"evaluation.min_tokens: {min_tokens} are more than a response may have; lower it to "
            f"rollout.max_response_tokens, which is {longest}, or less"
        )
    yield from problems_of_sources(job)
    yield from problems_of_signal(job)
    yield from problems_of_long_responses(job)
    yield from problems_of_teacher(job)
    yield from problems_of_warm_start(job)
    objective, schedule, num_prompts = job.objective, job.schedule, job.rollout.num_prompts_per_iteration
    if job.rollout.num_samples_per_prompt < 2 and objective.needs_reward:
        yield (
            f"rollout.num_samples_per_prompt: the group advantage of {objective.type} needs at least 2 responses per "
            f"prompt, got {job.rollout.num_samples_per_prompt}; set it to 2 or more (8 is usual)"
        )
    if schedule.mode not in objective.modes:
        reason = "needs statistics of the whole iteration and " if objective.needs_whole_iteration else ""
        yield (
            f"schedule.mode: objective {objective.type} {reason}cannot run in {schedule.mode}; "
            f"use {' or '.join(objective.modes)}, or another objective"
        )
    advantages_from = getattr(objective, "advantages_from", "reward")
    num_rewards = min(map(len, job.rewards_by_source.values()))
    has_penalty = job.rollout.overlong_cache is not None
    yield from problems_of_parts(advantages_from, num_rewards, schedule.mode, job.rollout.truncated, has_penalty)
    if schedule.ends != sorted(set(schedule.ends)):
        yield (
            f"schedule.earlier_ends: {schedule.earlier_ends} must ascend and stay below the "
            f"{schedule.num_iterations} iterations of the job; leave it out"
        )
    if (num_updates := job.training.num_updates_per_iteration) > num_prompts:
        yield (
            f"training.num_updates_per_iteration: {num_updates} updates share {num_prompts} prompts, so that some "
            f"would have none; use at most {num_prompts}"
        )
    yield from problems_of_replacements(job)
    if objective.old_policy == "proximal" and (job.max_staleness == 0 or objective.importance is None):
        yield (
            "objective.old_policy: proximal needs schedule.mode = 'bounded' and objective.importance, which corrects "
            "for the policy that generated; elsewhere use behaviour"
        )


def problems_of_sources(job: JobConfig) -> Iterator[str]:
    """Yield what is wrong with keys that only several sources have."""
    for held_out in job.held_out:
        if held_out.data.chooses is not None:
            yield f"{held_out.field}.data.order: difficulty is for training; held-out prompts are the same each time"
        if held_out.data.is_one_of_several:
            keys = ", ".join(KEYS_OF_SEVERAL)
            yield f"{held_out.field}.data: {keys} are keys of several training sources; leave them out"
    for field, source in job.sources:
        if (tokens := source.max_response_tokens or 0) > job.rollout.max_response_tokens:
            yield (
                f"{field}.max_response_tokens: {tokens} are more than rollout.max_response_tokens, which is the most "
                f"of all sources; raise that to {tokens}, or lower this"
            )


def problems_of_replacements(job: JobConfig) -> Iterator[str]:
    """Yield what does not go together with dynamic sampling."""
    num_prompts, num_updates = job.rollout.num_prompts_per_iteration, job.training.num_updates_per_iteration
    most = job.rollout.max_prompts_per_iteration
    if most is not None and most <= num_prompts:
        example = min(3 * num_prompts, MAX_PROMPTS)
        remedy = f"use more, {example} say" if example > num_prompts else "lower rollout.num_prompts_per_iteration"
        yield (
            f"rollout.max_prompts_per_iteration: {most} leaves nothing to replace groups of the first {num_prompts} "
            f"prompts with; {remedy}, or leave it out"
        )
    if most is not None and job.schedule.mode == "bounded":
        yield (
            "rollout.max_prompts_per_iteration: rollouts of a bounded schedule would have to return to older weights "
            "for it; use schedule.mode = 'periodic', or leave it out"
        )
    if most is not None and num_updates > 1:
        yield (
            f"training.num_updates_per_iteration: {num_updates} updates cannot share an iteration whose groups are "
            "known at its end only; use 1, or leave out rollout.max_prompts_per_iteration"
        )


def problems_of_signal(job: JobConfig) -> Iterator[str]:
    """Yield what is wrong with `objective.signal`, or a source's own, for the rewards that it compares."""
    kl = job.objective.kl
    for field, source in job.sources:
        if source.signal not in (None, "reward") and kl.coef > 0 and kl.placement == "reward":
            yield (
                f"{field}.signal: a KL term in the reward gives advantages to groups without signal; use "
                "objective.kl.placement = 'loss', or signal = 'reward'"
            )
        key = "objective.signal" if source.signal is None else f"{field}.signal"
        signal = source.signal or job.objective.signal
        if signal == "solved" and source.solved_at is None and "solved_at" not in job.model_fields_set:
            yield (
                f"{key}: solved compares rewards with solved_at, which is not given; set solved_at to the reward from "
                "which a response is solved"
            )
        if isinstance(signal, str) and signal.startswith(PART):
            where = f" of source {source.name}" if source.name else ""
            parts = [reward.part for reward in job.rewards_by_source[source.name or ""] if reward.part is not None]
            if not parts and source.environment is not None:
                yield (
                    f"{key}: {signal} is a part of several rewards, and the environment{where} gives one; set "
                    f"{field}.signal to solved or reward"
                )
            elif not parts:
                yield (
                    f"{key}: {signal} is a part of several rewards, and the job has none under [[reward]]{where}; use "
                    "solved or reward, or write the rewards under [[reward]]"
                )
            elif signal.removeprefix(PART) not in parts:
                yield (
                    f"{key}: no reward{where} is called {signal.removeprefix(PART)}; use part:NAME with one of "
                    f"{', '.join(parts)}"
                )


def problems_of_long_responses(job: JobConfig) -> Iterator[str]:
    """Yield what is wrong with the job's rules for responses that were cut, or nearly were."""
    rollout, objective = job.rollout, job.objective
    rewards = [reward for rewards in job.rewards_by_source.values() for reward in rewards]
    negative = [reward.part for reward in rewards if reward.weight < 0]
    if rollout.truncated == "zero" and negative and rollout.truncated_reward >= 0:
        yield (
            "rollout.truncated: zero pays a response that was cut more than a wrong one where rewards are negative, "
            f"and the weight of reward {negative[0]} is; set rollout.truncated_reward to the worst reward there is, "
            "make that weight positive, or use truncated = 'score'"
        )
    if rollout.truncated != "zero" and rollout.truncated_reward != 0:
        yield (
            f"rollout.truncated_reward: {rollout.truncated_reward:g} has no effect with truncated = "
            f"'{rollout.truncated}'; use truncated = 'zero', or leave it out"
        )
    if rollout.truncated == "mask" and objective.needs_whole_group:
        reason = "a KL term in the reward" if objective.has_advantages else f"objective {objective.type}"
        yield (
            f"rollout.truncated: mask takes responses out of their group, which {reason} needs as a whole; use zero or "
            "score"
        )
    cache = rollout.overlong_cache
    if cache is not None and None not in job.environments_by_source.values():
        yield (
            "rollout.overlong_cache: an episode has the limit of tokens in each turn, so there is no one length to "
            "punish; leave it out, and let the environment's reward punish long episodes"
        )
    limits = [(field, source.max_response_tokens) for field, source in job.sources]
    for field, limit in [("rollout", rollout.max_response_tokens), *limits]:
        if cache is not None and limit is not None and cache > limit:
            yield (
                f"rollout.overlong_cache: {cache} tokens are more than a response may have; lower it to "
                f"{field}.max_response_tokens, which is {limit}, or less"
            )
    if cache is None and rollout.overlong_penalty != 1:
        yield (
            f"rollout.overlong_penalty: {rollout.overlong_penalty:g} has no effect without overlong_cache; set "
            "overlong_cache, or leave it out"
        )
    if cache is not None and OVERLONG in [reward.part for reward in rewards]:
        yield (
            f"reward.part: {OVERLONG} is the part of the penalty of rollout.overlong_cache; give the reward another "
            "part, or leave overlong_cache out"
        )


def is_nested_deeper(value: Any, depth: int) -> bool:
    """Return whether lists and mappings lie more than `depth` levels within each other, level by level.

    >>> is_nested_deeper([[1]], 2), is_nested_deeper([{"a": [1]}], 2)
    (False, True)
    """
    level = [value]
    for _ in range(depth + 1):
        containers = [item for item in level if isinstance(item, dict | list | tuple)]
        if not containers:
            return False
        level = [
            item
            for container in containers
            for item in (container.values() if isinstance(container, dict) else container)
        ]
    return True
