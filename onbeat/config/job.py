"""A whole job: how it is read, and the jobs that follow from it.

`derived` has what follows from its sections, `problems` what must hold between them.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError, ValidationInfo, field_validator, model_validator

from onbeat.config.data import DataConfig
from onbeat.config.derived import DerivedConfig
from onbeat.config.explain import describe_wrong_job
from onbeat.config.files import read_job_file
from onbeat.config.problems import problems_of
from onbeat.config.storage import RetentionConfig, TrackerConfig
from onbeat.config.templates import moment_of
from onbeat.config.warm_start import SFT, fill_sections_of_sft
from onbeat.contracts.section import IS_ACCEPTED
from onbeat.objectives.sft import SftObjective

DERIVED = (("gac", "mode"), ("retention", "rollout_iterations"))  # keys that `fill_defaults` fills in
MAX_DEPTH = 32  # lists and mappings within each other; the libraries for JSON fail at about 250


class JobConfig(DerivedConfig):
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
