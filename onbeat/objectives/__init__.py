"""Objectives by name: the files of this folder, and classes of installed packages (entry points `onbeat.objectives`).

A file is an objective: one class with its configuration, its advantages and its loss, named as the file is. The broker
checks a job with the class that computes it, so nothing here needs PyTorch to be imported.
"""

import importlib
import pkgutil
from functools import reduce
from importlib.metadata import entry_points
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import (
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from onbeat.contracts.section import IS_ACCEPTED
from onbeat.contracts.suggestions import close_names
from onbeat.objectives.base import Objective

GROUP = "onbeat.objectives"


def read_folder() -> dict[str, type[Objective]]:
    """Return each file's class by the file's name."""
    objectives: dict[str, type[Objective]] = {}
    for file in pkgutil.iter_modules(__path__):
        if not file.ispkg:
            module = importlib.import_module(f"{__name__}.{file.name}")
            classes = (
                value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Objective)
            )
            (objectives[file.name],) = (objective for objective in classes if objective.__module__ == module.__name__)
    return objectives


BUILT_IN = read_folder()
INSTALLED: dict[str, type[Objective]] = {}  # as far as jobs have named them


def find_objective(name: str) -> type[Objective]:
    """Import it, if a package has it. Raises ValueError, in one sentence, where it is not or cannot be used."""
    if objective := BUILT_IN.get(name) or INSTALLED.get(name):
        return objective
    entries = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in entries:
        known = sorted({*BUILT_IN, *entries})
        close = close_names(name, known, likeness=0.6)
        hint = f"did you mean {' or '.join(close)}? There" if close else "there"
        raise ValueError(
            f"no objective {name!r} is installed here; {hint} are: {', '.join(known)}; "
            "for your own, install its package where the broker runs and where each trainer runs"
        )
    try:
        loaded = entries[name].load()
    except Exception as error:  # foreign code may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"objective {name!r} ({entries[name].value}) cannot be imported here: {reason}") from error
    if not (isinstance(loaded, type) and issubclass(loaded, Objective)):
        raise ValueError(f"objective {name!r} ({entries[name].value}) is no class derived from Objective")
    if missing := ", ".join(sorted(loaded.__abstractmethods__)):
        raise ValueError(f"objective {name!r} ({entries[name].value}) does not define {missing}")
    if has_other_signal(loaded):
        raise ValueError(
            f"objective {name!r} ({entries[name].value}) defines signal, which is a key of every objective; give it "
            "another name there"
        )
    INSTALLED[name] = loaded
    return loaded


def has_other_signal(objective: type[Objective]) -> bool:
    """Return whether the class, or one between it and Objective, gives the key `signal` another meaning."""
    classes = objective.__mro__[: objective.__mro__.index(Objective)]
    return any("signal" in {*vars(kind), *vars(kind).get("__annotations__", ())} for kind in classes)


class ForeignObjective(Objective):
    """An accepted job's objective that is not installed here, or has other keys by now. Processes without a loss
    (rollouts, dashboards) go on."""

    model_config = ConfigDict(extra="allow")

    signal: Any = "reward"  # older releases left the name to the objective

    def compute(self, *_: Any) -> Any:
        raise AssertionError(f"objective {self.type} is not installed here")

    has_signal = loss = denominator = compute  # type: ignore[assignment,pydantic-field]


def read_objective(value: Any, read_built_in: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
    """Return the class's instance for a section of a job; without a `type` it is GRPO's."""
    if isinstance(value, Objective):
        return value
    name = value.get("type", "grpo") if isinstance(value, dict) else None
    if not isinstance(name, str):
        return read_built_in(value)
    if name in BUILT_IN:
        return read_built_in({**value, "type": name})
    try:
        installed = find_objective(name)
    except ValueError as error:
        if info.context == IS_ACCEPTED:
            return ForeignObjective.model_validate(value)
        raise ValueError(f"objective.type: {error}") from error
    try:
        return installed.model_validate(value)
    except ValidationError:
        if info.context == IS_ACCEPTED:  # the objective's keys have changed since
            return ForeignObjective.model_validate(value)
        raise


def check_installed(objective: Objective) -> None:
    """Raise ValueError if the objective is not installed here, or does not have the keys of the job (any more)."""
    try:
        find_objective(objective.type).model_validate(objective.model_dump(), context=IS_ACCEPTED)
    except ValidationError as error:
        first = error.errors()[0]
        wrong = ".".join(["objective", *map(str, first["loc"])])
        raise ValueError(
            f"{wrong}: {first['msg']}; the installed {objective.type} has other keys than the job: install the version "
            "that the job was made with"
        ) from error


if TYPE_CHECKING:
    AnyObjective = Objective
else:
    AnyObjective = Annotated[
        reduce(or_, BUILT_IN.values()), Field(discriminator="type"), WrapValidator(read_objective), SerializeAsAny()
    ]
