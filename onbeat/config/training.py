"""Training: how groups become optimizer steps."""

from typing import Literal

from pydantic import Field, model_validator

from onbeat.contracts.section import Float, Fraction, Int, PositiveInt, Section


class OptimizerConfig(Section):
    learning_rate: Float = Field(1e-6, gt=0, lt=1, description="learning rate of AdamW after the warm-up")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.95), description="decay rates of the two moments")
    eps: Float = Field(1e-8, gt=0, description="term added to the root of the second moment")
    weight_decay: Float = Field(0.0, ge=0, description="weight decay, decoupled from the gradient")
    max_grad_norm: Float = Field(1.0, gt=0, description="norm to which a longer gradient is scaled down")
    num_warmup_iterations: Int = Field(0, ge=0, description="iterations of linear learning-rate warm-up")
    decay: Literal["none", "linear", "cosine"] = Field(
        "none",
        description="decay of the learning rate, from the end of the warm-up to 0 after the last step of the job",
    )


class GacConfig(Section):
    """Gradient alignment control (arXiv 2603.01501). The default thresholds are Onbeat's own choice."""

    mode: Literal["off", "metric", "control"] | None = Field(
        None,
        description="metric: only report the cosine of consecutive gradients; control: also project or skip; "
        "default: control in `bounded`, metric elsewhere",
    )
    c_low: Float = Field(0.3, ge=0, lt=1, description="a gradient with a larger cosine is projected to this cosine")
    c_high: Float = Field(0.95, gt=0, le=1, description="cosine above which the step is skipped")
    is_full_removal: bool = Field(False, description="project to cosine 0 instead of c_low")
    history: Literal["raw", "projected"] = Field("raw", description="gradient with which the next one is compared")

    @model_validator(mode="after")
    def check_thresholds(self) -> "GacConfig":
        if self.c_low >= self.c_high:
            raise ValueError(f"gac.c_low: {self.c_low} must lie below c_high, {self.c_high}")
        return self


class TrainingConfig(Section):
    max_tokens_per_micro_batch: PositiveInt = Field(
        4096,
        le=2**31 - 1,
        description="tokens packed into one forward and backward pass; a larger group is split, its prompt repeated",
    )
    num_updates_per_iteration: PositiveInt = Field(
        1, description="optimizer steps in an iteration, each on its own share of the prompts, in their order"
    )
    has_gradient_checkpointing: bool = Field(
        False,
        description="recompute activations in the backward pass: less memory, about a third more time",
    )
