"""The values that follow from the sections of a job."""

from onbeat.config.data import DataConfig
from onbeat.config.evaluation import HeldOutSet
from onbeat.config.rollout import EnvironmentConfig
from onbeat.config.schedule import BoundedSchedule
from onbeat.config.scoring import environment_of, environments_of, rewards_of
from onbeat.config.sections import JobSections
from onbeat.config.warm_start import SFT
from onbeat.contracts.rewards import RewardConfig, rewards_in
from onbeat.contracts.slots import Slots


class DerivedConfig(JobSections):
    """A job's sections, and the values that several of them decide together."""

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
