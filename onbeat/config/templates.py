"""The arguments of a chat template that a job sets: options, and the date that its prompts show."""

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from onbeat.contracts.section import Section

# Names that the renderer gives to templates, and arguments of `apply_chat_template` itself.
GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "strftime_now"}
GIVEN |= {"raise_exception", "conversation", "chat_template", "tokenize", "tokenizer_kwargs", "padding", "truncation"}
GIVEN |= {"max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"}
GIVEN |= {f"{name}_token" for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask")}


def check_names(options: dict[str, Any]) -> dict[str, Any]:
    """Refuse names that mean something else to the renderer."""
    if given := sorted(GIVEN.intersection(options)):
        raise ValueError(f"{given[0]} is set by the renderer, and no option of a template; leave it out")
    return options


def option_problem(options: dict[str, Any], names: set[str], section: str) -> str:
    """Return why options, which are those of a section, do not fit a template with these undeclared names; '' if they
    do."""
    known = sorted(names - GIVEN)
    unknown = sorted(set(options).difference(known))
    has = f"it has {', '.join(known)}" if known else "it has none"
    return f"{section}.template_options: the chat template has no option {unknown[0]!r}; {has}" if unknown else ""


def read_moment(text: str) -> str:
    """Return a moment of ISO 8601 in UTC, to the second. A moment without a time zone is in UTC.

    >>> read_moment("2026-01-31"), read_moment("2026-01-31T01:00:00+02:00")
    ('2026-01-31T00:00:00Z', '2026-01-30T23:00:00Z')
    """
    try:
        moment = datetime.fromisoformat(text)
        moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):
        raise ValueError(f"{text[:80]!r} is no moment of ISO 8601; write one such as 2026-01-31T12:00:00Z") from None
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ").zfill(20)


def moment_of(seconds: float) -> str:
    """Return a Unix time as `data.now` has it.

    >>> moment_of(0.9)
    '1970-01-01T00:00:00Z'
    """
    return read_moment(datetime.fromtimestamp(seconds, UTC).isoformat())


class TemplateArguments(Section):
    """The part of a data set that says how its prompts are rendered; one for all sets of a job."""

    template_options: Annotated[dict[str, Any], AfterValidator(check_names)] = Field(
        default_factory=dict,
        max_length=100,
        description="options of the model's chat template, such as `{ enable_thinking = false }`, in every prompt of "
        "the job; one that the template does not have is refused",
    )
    now: Annotated[str, AfterValidator(read_moment)] | None = Field(
        None,
        description="the moment that a chat template takes for now, in ISO 8601 (UTC), in every prompt of the job; "
        "default: when the job was created",
    )

    control_tokens: Literal["tokens", "text"] = Field(
        "tokens",
        description="texts of control tokens, such as `</s>`, in prompts without a chat template (`as_chat = false`). "
        "tokens: they become control tokens, for prompts that were rendered before; text: plain text, which they "
        "always are in messages",
    )

    def template_arguments(self) -> dict[str, Any]:
        """Return these fields alone, as JSON."""
        return self.model_dump(mode="json", include=set(TemplateArguments.model_fields))


def repeated_arguments(
    section: TemplateArguments, home: str, names: Iterable[str] = tuple(TemplateArguments.model_fields)
) -> Iterator[tuple[str, str]]:
    """Yield the keys of a section that are given at its `home` for all prompts of the job, and why they are refused."""
    for name in names:
        if getattr(section, name) != type(section).model_fields[name].get_default(call_default_factory=True):
            yield name, f"{home}.{name} is for all prompts of the job; leave this out"
