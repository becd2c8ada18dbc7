"""docs/reference/settings.md from the services' settings: what the environment may say."""

import inspect
import json
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from pydantic_settings import BaseSettings

from docs.generate.markdown import code, generated_note, join, sentence, table
from services.broker.settings import Settings as BrokerSettings
from services.rollout.settings import Settings as RolloutSettings
from services.trainer.settings import Settings as TrainerSettings

SERVICES: dict[str, type[BaseSettings]] = {
    "Broker": BrokerSettings,
    "Trainer": TrainerSettings,
    "Rollout": RolloutSettings,
}
COMMANDS = {
    "Broker": "python -m services.broker",
    "Trainer": "python -m services.trainer",
    "Rollout": "python -m services.rollout",
}

INTRODUCTION = """# Settings

Environment variables say where a service runs; the [job](job.md) says what is trained. If a variable has a wrong
value, the service ends at its start and names it. If a variable looks like a misspelt one, the service logs that.
`onbeat run` and `onbeat up` set the variables that their services need. The [client](../sdk.md#a-client) explains those
of the command line and of Python: `ONBEAT_URL`, `ONBEAT_API_KEY` and `ONBEAT_CA_FILE`."""


def page() -> str:
    shared = shared_names()
    parts = [
        generated_note("the services' settings"),
        INTRODUCTION,
        "## All services",
        rows_of(BrokerSettings, shared),
        "## Trainer and rollouts",
        rows_of(TrainerSettings, wire_names() - shared),
    ]
    for title, settings in SERVICES.items():
        names = names_of(settings) - shared - wire_names()
        parts += [f"## {title}", f"`{COMMANDS[title]}`.", rows_of(settings, names)]
    return join(*parts)


def names_of(settings: type[BaseSettings]) -> set[str]:
    return set(settings.model_fields)


def shared_names() -> set[str]:
    """Return the settings that mean the same in all three services: they come from one class."""
    services = (BrokerSettings, TrainerSettings, RolloutSettings)
    common = set.intersection(*(names_of(service) for service in services))
    return {name for name in common if len({repr(service.model_fields[name]) for service in services}) == 1}


def wire_names() -> set[str]:
    common = names_of(TrainerSettings) & names_of(RolloutSettings)
    fields = TrainerSettings.model_fields, RolloutSettings.model_fields
    return {name for name in common if repr(fields[0][name]) == repr(fields[1][name])}


def rows_of(settings: type[BaseSettings], names: set[str]) -> str:
    prefix = settings.model_config.get("env_prefix", "")
    rows = [
        (code((prefix + name).upper()), default_of(field), limits_of(field), sentence(field.description or ""))
        for name, field in settings.model_fields.items()
        if name in names
    ]
    return table(["variable", "default", "values", "meaning"], rows)


def default_of(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "made at the start" if field.default_factory else ""
    value = field.get_default()
    if isinstance(value, Path):  # a home folder is another one everywhere
        return code(str(value).replace(str(Path.home()), "~"))
    if value is None or value == "" or value == {} or type(value).__name__ == "SecretStr":
        return "none" if value is None else "empty"
    return code(value if isinstance(value, str) else json.dumps(value))


def limits_of(field: FieldInfo) -> str:
    words: list[str] = []
    if get_origin(field.annotation) is Literal:
        words.append(" or ".join(code(str(value)) for value in get_args(field.annotation)))
    words += ["true or false"] if field.annotation is bool else []
    for limit in field.metadata:
        words += [text.format(getattr(limit, key)) for key, text in LIMITS.items() if has_limit(limit, key)]
    return ", ".join(words)


LIMITS = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}"}


def has_limit(limit: Any, key: str) -> bool:
    return not inspect.isclass(limit) and getattr(limit, key, None) is not None
