"""The values of a job that are not the defaults, as dotted keys and values for people to read."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from onbeat.config.job import JobConfig
from onbeat.contracts.section import IS_ACCEPTED

TAGS = ("type", "mode")  # keys that choose the kind of a section; their own defaults are those of that kind
USUAL = {"schedule.mode": "periodic"}  # kinds of sections that a job must have, unless it says otherwise


def differences(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a recorded job that are not the defaults, by dotted key. Values without a default are there.

    A job of another version of Onbeat is returned whole.

    >>> job = {"name": "small", "model": {"path": "a/b"}, "data": {"type": "jsonl", "path": "c.jsonl"}}
    >>> job |= {"reward": {"name": "exact"}, "optimizer": {"learning_rate": 1e-6}, "seed": 0}
    >>> job |= {"rollout": {"num_prompts_per_iteration": 2, "max_response_tokens": 8}}
    >>> job |= {"schedule": {"num_iterations": 3}}
    >>> sorted(differences(job))[:4]
    ['data.path', 'data.type', 'model.path', 'name']
    """
    fields = JobConfig.without_derived(dict(config))
    try:
        job = JobConfig.model_validate(fields, context=IS_ACCEPTED)
    except ValidationError:
        return flatten(config)
    whole, short = flatten(job.model_dump(mode="json")), flatten(job.model_dump(mode="json", exclude_defaults=True))
    defaults = USUAL | flatten(default_sections())
    derived = {key for key in short if value_at(fields, key) is None}
    return {
        key: value
        for key, value in whole.items()
        if key not in derived and (key in short or (key.rpartition(".")[2] in TAGS and defaults.get(key) != value))
    }


def default_sections() -> dict[str, Any]:
    """Return the sections that a job has if it leaves them out."""
    sections = {
        name: field.get_default(call_default_factory=True)
        for name, field in JobConfig.model_fields.items()
        if not field.is_required()
    }
    return {
        name: section.model_dump(mode="json") if hasattr(section, "model_dump") else section
        for name, section in sections.items()
    }


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values by dotted key; tables in lists by their place. None and empty tables have no key.

    >>> flatten({"a": {"b": 1, "c": None}, "d": [{"e": 2}], "f": [3]})
    {'a.b': 1, 'd.0.e': 2, 'f': [3]}
    """
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            value = {str(place): item for place, item in enumerate(value)}
        if isinstance(value, Mapping):
            flat |= {f"{name}.{key}": deeper for key, deeper in flatten(value).items()}
        elif value is not None:
            flat[name] = value
    return flat


def value_at(fields: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key; None where there is none."""
    value: Any = fields
    for name in key.split("."):
        if isinstance(value, list):
            value = value[int(name)] if int(name) < len(value) else None
        elif isinstance(value, Mapping):
            value = value.get(name)
        else:
            return None
    return value


def as_lines(values: Mapping[str, Any]) -> list[str]:
    """Return the values as lines of TOML."""
    return [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
