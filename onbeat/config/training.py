"""Training: how groups become optimizer steps."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from onbeat.contracts.section import AUTO, NUMBER, Float, Fraction, Int, PositiveInt, Section, refuse_boolean


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


def form_of_number(value: Any) -> str:
    return AUTO if value == "auto" else NUMBER


class TrainingConfig(Section):
    max_tokens_per_micro_batch: Annotated[
        Annotated[int, Field(ge=1, le=2**31 - 1), BeforeValidator(refuse_boolean), Tag(NUMBER)]
        | Annotated[Literal["auto"], Tag(AUTO)],
        Discriminator(form_of_number),
    ] = Field(
        4096,
        description="tokens packed into one forward and backward pass; a larger group is split, its prompt repeated; "
        "auto: as many as the trainer has memory for, chosen before its first pass",
    )
    num_updates_per_iteration: PositiveInt = Field(
        1, description="optimizer steps in an iteration, each on its own share of the prompts, in their order"
    )
    has_gradient_checkpointing: bool = Field(
        False,
        description="recompute activations in the backward pass: less memory, about a third more time",
    )

    @property
    def row_tokens(self) -> int:
        """The number, which a trainer has chosen if the job says "auto"."""
        assert self.max_tokens_per_micro_batch != "auto", "the trainer chooses it before its first pass"
        return self.max_tokens_per_micro_batch
