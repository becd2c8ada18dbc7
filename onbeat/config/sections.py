"""The sections of a job."""

from pydantic import Field

from onbeat.config.data import DataConfig, OneOrSeveralSources
from onbeat.config.evaluation import EvaluationConfig
from onbeat.config.model import LoraConfig, ModelConfig
from onbeat.config.rollout import EnvironmentConfig, RolloutConfig
from onbeat.config.schedule import ScheduleConfig
from onbeat.config.storage import CheckpointConfig, ForkConfig, RetentionConfig, TrackerConfig
from onbeat.config.training import GacConfig, OptimizerConfig, TrainingConfig
from onbeat.config.warm_start import EXAMPLES, SFT, WarmStartConfig
from onbeat.contracts.rewards import OneOrSeveralRewards
from onbeat.contracts.section import Float, Int, Section
from onbeat.objectives import AnyObjective
from onbeat.objectives.base.teacher import TeacherConfig
from onbeat.objectives.grpo import GrpoObjective


class JobSections(Section):
    """A job, section by section. `JobConfig` adds what must hold between them."""

    name: str = Field(
        "job",
        min_length=1,
        max_length=100,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="name shown to users; need not be unique",
    )
    pool: str = Field(
        "default", pattern=r"^[a-z0-9][a-z0-9-]{0,62}$", description="pool whose trainers and rollouts serve the job"
    )
    seed: Int = Field(0, ge=0, lt=2**32, description="seed of the order of the data and of sampling")
    solved_at: Float = Field(
        1.0,
        description="reward from which a response counts as solved, for pass_at_k, shares of groups, and "
        "objective.signal",
    )
    model: ModelConfig
    lora: LoraConfig | None = Field(None, description="adapters to train; default: train all parameters")
    data: OneOrSeveralSources = Field(description="one or several sources of prompts")
    reward: OneOrSeveralRewards | None = Field(
        None,
        description="one or several rewards that score responses; needed unless there is an environment, all sources "
        "have their own, or the objective is distill or sft",
    )
    environment: EnvironmentConfig | None = Field(
        None, description="environment that runs episodes of several turns; default: responses of one turn"
    )
    rollout: RolloutConfig
    objective: AnyObjective = Field(default_factory=GrpoObjective)
    teacher: TeacherConfig | None = Field(
        None,
        exclude_if=lambda teacher: teacher is None,
        description="frozen model that the policy learns from: besides its rewards, or alone with the objective "
        "distill",
    )
    warm_start: WarmStartConfig | None = Field(
        None,
        exclude_if=lambda warm_start: warm_start is None,
        description="supervised iterations before the others; with the objective sft all iterations are such",
    )
    optimizer: OptimizerConfig = OptimizerConfig()
    gac: GacConfig = GacConfig()
    training: TrainingConfig = TrainingConfig()
    schedule: ScheduleConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    retention: RetentionConfig = RetentionConfig()
    evaluation: EvaluationConfig | None = None
    fork: ForkConfig | None = Field(
        None, description="checkpoint of another job to start from; default: start from the model"
    )
    tracking: list[TrackerConfig] = Field(
        default_factory=list, max_length=3, description="trackers besides TensorBoard, at most one of each type"
    )

    @property
    def sources(self) -> list[tuple[str, DataConfig]]:
        """The sources of its prompts by their fields: `data`, or of several `data.0`, `data.1` and so on; with the
        objective sft the file of examples, `warm_start.data`."""
        if not isinstance(self.data, list):
            return [(EXAMPLES if self.objective.type == SFT else "data", self.data)]
        return [(f"data.{place}", source) for place, source in enumerate(self.data)]

    @property
    def prompted(self) -> list[tuple[str, DataConfig]]:
        """The sources whose prompts the policy answers: none with the objective sft."""
        return [] if self.objective.type == SFT else self.sources
