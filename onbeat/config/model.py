"""The model of a job, and the adapters that may be trained in its place."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationInfo

from onbeat.contracts.section import IS_ACCEPTED, Float, Int, PositiveInt, Section

RENDERING_RULES = 1  # number of the rules in docs/data.md, by which prompts are rendered; jobs record it


def check_rendering_rules(rules: int, info: ValidationInfo) -> int:
    """Refuse a job whose prompts other rules rendered; records of such jobs can be read."""
    if rules != RENDERING_RULES and info.context != IS_ACCEPTED:
        remedy = "leave rendering_rules out to render by these; prompts of before may differ"
        raise ValueError(f"prompts are rendered by rules {RENDERING_RULES} here, not by rules {rules}; {remedy}")
    return rules


class ModelConfig(Section):
    path: str = Field(
        min_length=1,
        description="`bundled:NAME`, a folder in Hugging Face layout on the trainer's machine (`/...`, `~/...`, or "
        "`./...` beside the job file), or a hub id `org/name`",
    )
    chat_template: str | None = Field(
        None,
        min_length=1,
        max_length=200_000,
        description="chat template in place of the model's own, as text in Jinja, for all prompts and for the "
        "checkpoints; in a job file, `chat_template_file` names the file beside it that has the text",
    )
    adapter: str | None = Field(
        None,
        min_length=1,
        description="folder of a LoRA adapter in PEFT's format, on the trainer's machine, that `[lora]` starts from, "
        "with the rank, alpha and layers of `[lora]`; the reference policy is the model without it",
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto",
        description="dtype of computation and of published weights; auto: bfloat16 if the trainer and all "
        "rollouts have instructions for it, else float32. Master weights are always float32",
    )
    max_context_tokens: PositiveInt | None = Field(
        None, le=16_777_216, description="longest prompt and response together; default: as many as the model supports"
    )
    rendering_rules: Annotated[Int, AfterValidator(check_rendering_rules)] = Field(
        RENDERING_RULES,
        description="number of the rules by which conversations become tokens, recorded with the job; leave it out",
    )


class LoraConfig(Section):
    """Low-rank adapters (arXiv 2106.09685) instead of full fine-tuning; the reference policy is then the base model."""

    rank: PositiveInt = Field(16, le=65_536, description="rank of the two factors of an update")
    alpha: Float = Field(32.0, gt=0, description="scale of the update: it is multiplied by alpha / rank")
    use_rslora: bool = Field(
        False, description="multiply by alpha / sqrt(rank) instead (rsLoRA, arXiv 2312.03732), for large ranks"
    )
    target_modules: list[str] | Literal["all-linear"] = Field(
        "all-linear",
        description="names of the linear layers, such as q_proj, and of the parameters of experts, such as "
        "gate_up_proj, that get an adapter; default: all but the output head",
    )

    @property
    def scale(self) -> float:
        """The number that B A is multiplied by."""
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)
