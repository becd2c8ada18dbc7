"""Pydantic's errors in the words of a job: the field as users write it, what is wrong with it, and a remedy."""

import re
from collections.abc import Iterable, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from onbeat.config.sections import JobSections
from onbeat.contracts.rewards import LIST, TABLE
from onbeat.contracts.section import AUTO, NUMBER
from onbeat.contracts.suggestions import close_names, suggest
from onbeat.objectives import INSTALLED

PREFIXED = re.compile(r"(?:Value error, )?([a-z_]+(?:\.(?:[a-z_]+|\d+))*): (.+)")
PLAIN_KEY = re.compile(r"\w{1,80}")
TAG_NAMES = ("type", "mode")  # keys that name the section of a union
MAX_SHOWN = 80  # characters of a wrong value
NOT_A_TABLE = ("model_type", "model_attributes_type", "dict_type")  # types of errors
FOREIGN_KEYS = {  # keys of TRL, verl and prime-rl (docs/coming-from.md), where similar letters do not lead to ours
    **dict.fromkeys(("num_generations", "group_size", "n"), "rollout.num_samples_per_prompt"),
    **dict.fromkeys(("max_completion_length", "max_completion_tokens"), "rollout.max_response_tokens"),
    **dict.fromkeys(("batch_size", "train_batch_size"), "rollout.num_prompts_per_iteration"),
    **dict.fromkeys(("max_steps", "total_training_steps"), "schedule.num_iterations"),
    **dict.fromkeys(("kl_coef", "kl_loss_coef"), "objective.kl.coef"),
    **dict.fromkeys(("epsilon", "clip_ratio_low"), "objective.clip_low"),
    **dict.fromkeys(("epsilon_high", "clip_ratio_high"), "objective.clip_high"),
    **dict.fromkeys(("save_steps", "save_freq"), "checkpoint.every_iterations"),
    **dict.fromkeys(("eval_steps", "test_freq"), "evaluation.every_iterations"),
    **dict.fromkeys(("max_model_len", "seq_len"), "model.max_context_tokens"),
    "optimizer.epsilon": "optimizer.eps",
    "lr": "optimizer.learning_rate",
    "lr_scheduler_type": "optimizer.decay",
    "r": "lora.rank",
}
MAX_EXPLAINED = 20  # errors; a body can have thousands, and each explanation takes time and memory


def describe_wrong_job(error: ValidationError, job: Any, name: object) -> str:
    """Return a line with the name of the job file, and below it one line for each wrong field."""
    errors = [{**details, "loc": ("body", *details["loc"])} for details in error.errors()]
    lines = [f"  {'job' if field == 'body' else field}: {message}" for field, message in explain_errors(errors, job)]
    return "\n".join([f"{name} is no valid job:", *lines])


def first_wrong(error: ValidationError) -> str:
    """Return the first of the errors in words: `objective.floor: Field required`."""
    first = error.errors()[0]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))


def explain_errors(errors: Sequence[Any], body: Any) -> list[tuple[str, str]]:
    """Return (field, message) of the first entries of `ValidationError.errors()`; the last one counts the rest."""
    explained = [explanation for error in errors[:MAX_EXPLAINED] for explanation in explain_error(error, body)]
    if num_more := len(errors[MAX_EXPLAINED:]):
        explained.append(("body", f"has {num_more} more errors; correct these first"))
    return explained


def explain_error(error: Any, body: Any) -> list[tuple[str, str]]:
    """Return (field, message) of one entry of `ValidationError.errors()`; `body` is the JSON that was sent.

    A check of the job or of a section names its fields itself, in a line for each.
    """
    source, *location = error["loc"]
    if source != "body":
        return [(".".join(map(str, location or [source])), f"{error['msg']}, got {show(error.get('input'))}")]
    named = [PREFIXED.fullmatch(line) for line in error["msg"].split("\n")]
    if all(named):
        return [(match[1], match[2]) for match in named if match]
    if not location:
        types = "Content-Type: application/json, or application/toml for TOML"
        return [("body", f"must be one JSON object, the job, with {types}")]
    path = without_tags(location, body)
    return [(dotted(path), explain_value(error, path))]


def dotted(path: Iterable[str]) -> str:
    """Join the path with dots. Unknown keys are quoted and cut: they may be empty, or as long as the body."""
    return ".".join(key if PLAIN_KEY.fullmatch(key) else show(key) for key in path)


def without_tags(location: list[Any], body: Any) -> list[str]:
    """Remove the tags of unions (`type`, `mode`, forms), which Pydantic puts into the location and users did not write.

    >>> without_tags(["data", "jsonl", "path"], {"data": {"type": "jsonl"}})
    ['data', 'path']
    """
    path: list[str] = []
    here = body
    for step in location:
        if step in (TABLE, LIST, AUTO, NUMBER):
            continue
        is_mapping = isinstance(here, dict)
        if is_mapping and step not in here and step in tags_at(path):
            continue
        path.append(str(step))
        is_item = isinstance(here, list) and isinstance(step, int) and step < len(here)  # a missing item is named, too
        here = here.get(step) if is_mapping else here[step] if is_item else None
    return path


def tag_name(path: list[str]) -> str | None:
    """Return the key that names the section of the union at this place, or None: `schedule` -> `mode`."""
    sections = sections_at(path)
    return next(
        (name for name in TAG_NAMES if sections and all(name in section.model_fields for section in sections)), None
    )


def tags_at(path: list[str]) -> set[str]:
    """Return the values that this key may have."""
    name = tag_name(path)
    return {tag for section in sections_at(path) if name for tag in get_args(section.model_fields[name].annotation)}


def explain_value(error: Any, path: list[str]) -> str:
    if error["type"] == "extra_forbidden":
        return explain_unknown(path, error["loc"])
    field = named_by(path[:-1], error["loc"]).get(path[-1])
    meaning = f" ({field.description})" if field and field.description else ""
    if error["type"] == "missing":
        return f"is required{meaning}"
    if error["type"] in ("union_tag_not_found", "union_tag_invalid"):
        name, is_missing = tag_name(path), error["type"] == "union_tag_not_found"
        problem = "is not complete" if is_missing else f"has no {name} {show(error['ctx']['tag'])}"
        close = [] if is_missing else close_names(str(error["ctx"]["tag"]), tags_at(path), likeness=0.6)
        question = f"; did you mean {' or '.join(close)}?" if close else ""
        return f"{problem}{question or ';'} set {dotted(path)}.{name} to one of: {', '.join(sorted(tags_at(path)))}"
    if error["type"] in NOT_A_TABLE and isinstance(error.get("input"), list):
        return explain_list(dotted(path))
    return f"{error['msg'].removeprefix('Value error, ')}, got {show(error.get('input'))}{meaning}"


def explain_list(section: str) -> str:
    """Say that a section is one table, where TOML's `[[section]]` or a JSON array made a list of it."""
    several = "; several held-out sets go under [[evaluation.sets]]" if section == "evaluation" else ""
    return f"is one section, and not a list: write [{section}] with single brackets{several}"


def explain_unknown(path: list[str], location: Sequence[Any]) -> str:
    """Say where the key belongs: to another type of its section, to another section, or under another name."""
    *above, key = path
    if owners := [section.model_fields for section in sections_at(above) if key in section.model_fields]:
        tag = str(tag_name(above))
        types = dict.fromkeys(repr(value) for fields in owners for value in get_args(fields[tag].annotation))
        return f"belongs to {dotted(above)}.{tag} = {' or '.join(types)}; leave it out, or change the {tag}"
    known_keys = named_by(above, location)
    homes = homes_of(dotted(path)) or homes_of(key)
    here = (
        name for name in known_keys if name.startswith(f"{key}_") or any(home.endswith(f".{name}") for home in homes)
    )
    close = [dotted([*above, name]) for name in here] or homes or close_names(key, known_keys, most=1, likeness=0.6)
    return f"unknown key; {suggest(close, known_keys)}"


def homes_of(key: str) -> list[str]:
    """Return where a job has this key, with its section, or what another framework's key is called here.

    >>> homes_of("num_iterations"), homes_of("lr")
    (['schedule.num_iterations'], ['optimizer.learning_rate'])
    """
    if key in FOREIGN_KEYS:
        return [FOREIGN_KEYS[key]]
    sections = (name for name in JobSections.model_fields if name != "warm_start")  # it repeats keys of others
    homes = [f"{name}.{key}" for name in sections if key in named_by([name], [])]
    return homes + [f"{key} at the top level"] * (key in JobSections.model_fields)


def show(value: Any) -> str:
    try:
        text = repr(value)
    except RecursionError:
        text = "something nested very deep"
    except ValueError:
        text = "a number with thousands of digits"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def named_by(path: list[str], location: Sequence[Any]) -> dict[str, FieldInfo]:
    """Return the fields at a path. In a union they are those of the section whose tag is in the error's location."""
    name, sections = tag_name(path), sections_at(path)
    chosen = [
        section for section in sections if name and {*get_args(section.model_fields[name].annotation)} & {*location}
    ]
    return {field: info for section in chosen or sections for field, info in section.model_fields.items()}


def sections_at(path: Iterable[str]) -> list[type[BaseModel]]:
    """Return the section of the job at a path, or several sections if the path leads to a tagged union."""
    sections: list[type[BaseModel]] = [JobSections]
    for step in path:
        if step.isdigit():  # the index of an item of a list
            continue
        fields = (section.model_fields.get(step) for section in sections)
        sections = [model for field in fields if field for model in models_of(field.annotation)]
        if step == "objective":
            sections += INSTALLED.values()
    return sections


def models_of(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_of(part)]
