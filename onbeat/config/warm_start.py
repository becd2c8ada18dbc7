"""Supervised iterations: those of a warm start before RL (`[warm_start]`), or all of a job with the objective sft."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from onbeat.config.data import FileData
from onbeat.config.rollout import MAX_PROMPTS, RolloutConfig
from onbeat.config.templates import TemplateArguments, repeated_arguments
from onbeat.config.training import OptimizerConfig
from onbeat.contracts.examples import Learn
from onbeat.contracts.section import Float, PositiveFloat, PositiveInt, Section

SFT = "sft"
ROLLOUT_OF_SFT = {"num_prompts_per_iteration": 1, "num_samples_per_prompt": 1, "max_response_tokens": 1}
EXAMPLES = "warm_start.data"  # the field of the file with examples


class ExampleData(TemplateArguments):
    """A file of examples. A row is a prompt with its response, or a whole conversation."""

    type: Literal["jsonl", "parquet"]
    path: str = Field(
        description="path of the file in the data folder of the broker, or `bundled:NAME` of one that comes with Onbeat"
    )
    prompt_field: str = Field(
        "prompt", description="field with the prompt: a string, or a list of {role, content} messages"
    )
    response_field: str = Field("response", description="field with the response, a string")
    messages_field: str | None = Field(
        None,
        min_length=1,
        description="field with a whole conversation, a list of {role, content} messages that ends with an answer; in "
        "place of prompt_field and response_field",
    )
    as_chat: bool = Field(
        True, description="show rows with the chat template; false: a prompt and its response are plain text"
    )
    system_prompt: str | None = Field(None, description="system message before every conversation")
    metadata_only: list[str] = Field(
        [], max_length=100, description="columns that look like inputs of the model and are none, as in `data`"
    )
    order: Literal["shuffled", "in_order"] = Field(
        "shuffled",
        description="order of the rows. shuffled: a new seeded order in every epoch; in_order: as in the file",
    )

    @property
    def rows(self) -> FileData:
        """The file as the broker's data process reads it; without an answer's field its rows are conversations."""
        return FileData(
            type=self.type,
            path=self.path,
            prompt_field=self.messages_field or self.prompt_field,
            answer_field="" if self.messages_field else self.response_field,
            system_prompt=self.system_prompt,
            metadata_only=self.metadata_only,
            order=self.order,
        )


RENDERING = (*TemplateArguments.model_fields, "as_chat")  # keys that are the same for all prompts and rows of a job


class HeldOutExamples(Section):
    """Rows that are not trained, on which the loss is measured."""

    data: ExampleData
    num_rows: PositiveInt = Field(64, le=MAX_PROMPTS, description="number of rows, from the first one on")
    every_iterations: PositiveInt = Field(
        10, description="supervised iterations between two measurements; the last one is measured, too"
    )


class WarmStartConfig(Section):
    """Supervised iterations, the first ones of the job: cross-entropy on the answers of examples."""

    data: ExampleData
    num_rows_per_iteration: PositiveInt = Field(le=MAX_PROMPTS, description="rows in a supervised iteration: one step")
    num_iterations: PositiveInt | None = Field(
        None,
        description="supervised iterations, the first of `schedule.num_iterations`; default: those of `epochs`",
    )
    epochs: PositiveFloat | None = Field(
        None, le=10_000, description="passes over the rows, in place of `num_iterations`"
    )
    learning_rate: Float = Field(
        1e-5,
        gt=0,
        lt=1,
        description="learning rate of AdamW in supervised iterations; the schedule of `[optimizer]` begins after them",
    )
    learn: Learn = Field(
        "answers",
        description="tokens that are learned. answers: the assistant's messages, each with the token that ends it; "
        "last_answer: the last of them alone; all: every token",
    )
    on_too_long: Literal["refuse", "drop"] = Field(
        "refuse",
        description="what happens to rows that are longer than the context: fail the job, or leave them out",
    )

    held_out: HeldOutExamples | None = Field(
        None, description="rows on which loss and perplexity are measured in supervised iterations; default: none"
    )
    min_pass_at_k: Float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of the held-out prompts of `[evaluation]`, of the first of its sets if there are several, "
        "that the model has to solve (pass@k) when RL begins; else the job fails, and its checkpoint is kept; default: "
        "no limit",
    )

    @model_validator(mode="after")
    def check_length(self) -> "WarmStartConfig":
        if self.num_iterations is not None and self.epochs is not None:
            raise ValueError("warm_start.epochs: num_iterations is there, too; leave out one of them")
        return self


def fill_sections_of_sft(job: Any) -> Any:
    """Fill in the sections that only rollouts need, in a job that is supervised from its first iteration to its last.

    `data` becomes the file of examples, whose arguments of the chat template are the job's.
    """
    if not isinstance(job, dict) or not isinstance(job.get("objective"), dict) or job["objective"].get("type") != SFT:
        return job
    warm_start = job.get("warm_start")
    examples = warm_start.get("data") if isinstance(warm_start, dict) else None
    if not isinstance(warm_start, dict) or not isinstance(examples, dict):
        raise ValueError("warm_start.data: missing; the objective sft learns from examples, so name their file there")
    rollout = dict(ROLLOUT_OF_SFT)
    if job.get("evaluation") is not None:  # then the user says how long the held-out responses may be
        del rollout["max_response_tokens"]
    if isinstance(given := job.get("rollout", {}), dict):
        rollout |= given
    try:
        ExampleData.model_validate(examples)
    except ValidationError:  # an error of warm_start.data, which is reported there, and only once
        examples = {"type": "jsonl", "path": ""}
    return {"data": data_of(examples), **job, "rollout": rollout}


def data_of(examples: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section `data` of a job that has examples and no prompts."""
    rendering = {name: examples[name] for name in (*RENDERING, "system_prompt") if name in examples}  # chats have them
    prompt_field = examples.get("messages_field") or examples.get("prompt_field", "prompt")
    return {"type": examples.get("type"), "path": examples.get("path"), "prompt_field": prompt_field, **rendering}


def problems_of_warm_start(job: Any) -> Iterator[str]:
    """Yield what does not go together with supervised iterations: the field, what is wrong with it, and a remedy."""
    start = job.warm_start
    if start is None:
        return
    if job.schedule.mode == "bounded":
        yield (
            "schedule.mode: rollouts of bounded generate ahead, and supervised iterations generate nothing; use "
            "periodic or sync"
        )
    yield from problems_of_rendering(job)
    if job.objective.type == SFT:
        yield from problems_of_sft(job)
        return
    if start.min_pass_at_k is not None and (job.evaluation is None or job.evaluation.num_samples_per_prompt < 2):
        yield (
            "warm_start.min_pass_at_k: pass@k is that of [evaluation] with several responses to a prompt; add that "
            "section with num_samples_per_prompt = 2 or more"
        )
    if start.num_iterations is None and start.epochs is None:
        yield "warm_start.num_iterations: missing; say how many iterations are supervised, or how many epochs"
    if job.num_supervised >= job.schedule.num_iterations:
        yield (
            f"schedule.num_iterations: of {job.schedule.num_iterations} iterations {job.num_supervised} are supervised "
            "(warm_start), and none is left for RL; raise it, or use objective.type = 'sft'"
        )


def problems_of_rendering(job: Any) -> Iterator[str]:
    """Yield the keys of examples that are given in another place, and what rows of plain text cannot have."""
    start, home = job.warm_start, job.rendering_field
    sections = {"warm_start.data": start.data}
    if start.held_out is not None:
        sections["warm_start.held_out.data"] = start.held_out.data
    for field, data in sections.items():
        for name, message in repeated_arguments(data, home, RENDERING) if field != home else ():
            yield f"{field}.{name}: {message}"
        if data.system_prompt is not None and not getattr(job.rendering, "as_chat", True):
            yield f"{field}.system_prompt: needs {home}.as_chat = true; a plain prompt has no messages"


def problems_of_sft(job: Any) -> Iterator[str]:
    """Yield what a job has that only iterations with rollouts could use."""
    if job.warm_start.num_iterations is not None or job.warm_start.epochs is not None:
        yield "warm_start.num_iterations: with sft all iterations are supervised; leave it and epochs out"
    if job.warm_start.min_pass_at_k is not None:
        yield "warm_start.min_pass_at_k: is a limit before RL, and with sft there is none; leave it out"
    if job.teacher is not None:
        yield "teacher: has no effect with the objective sft, which learns from examples alone; leave it out"
    for name in sections_of_responses(job) if job.evaluation is None else ():
        yield (
            f"{name}: has no effect with the objective sft, which generates responses for an [evaluation] only; add "
            "that section, or leave it out"
        )
    for name in ("learning_rate", "num_warmup_iterations", "decay"):
        if getattr(job.optimizer, name) != OptimizerConfig.model_fields[name].default:
            yield (
                f"optimizer.{name}: has no effect with the objective sft, whose learning rate is constant; set "
                "warm_start.learning_rate, and leave this out"
            )
    data = FileData.model_validate(data_of(job.warm_start.data.model_dump()))
    if not isinstance(job.data, list) and data.now is None:  # the broker has dated a job that is stored
        data = data.model_copy(update={"now": job.data.now})
    if job.data != data:
        yield "data: the objective sft has no prompts but those of warm_start.data, where their keys are; leave it out"
    if job.training.num_updates_per_iteration > 1:
        yield "training.num_updates_per_iteration: a supervised iteration is one step; leave it out"


def sections_of_responses(job: Any) -> Iterator[str]:
    """Yield the sections and keys of a job that are about responses, where the user gave them."""
    yield from (name for name in ("reward", "environment") if getattr(job, name) is not None)
    for name, field in RolloutConfig.model_fields.items():
        default = ROLLOUT_OF_SFT.get(name, field.get_default(call_default_factory=True))
        if getattr(job.rollout, name) != default:
            yield f"rollout.{name}"
