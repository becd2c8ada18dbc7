"""Objectives by name: the files of this folder.

A file is an objective: one class with its configuration, its advantages and its loss, named as the file is. The broker
checks a job with the class that computes it, so nothing here needs PyTorch to be imported.
"""

import importlib
import pkgutil
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field

from onbeat.objectives.base import Objective


def read_folder() -> dict[str, type[Objective]]:
    """Each file's class by the file's name."""
    found: dict[str, type[Objective]] = {}
    for file in pkgutil.iter_modules(__path__):
        if not file.ispkg:
            names = vars(importlib.import_module(f"{__name__}.{file.name}")).values()
            (found[file.name],) = (each for each in names if is_of(each, f"{__name__}.{file.name}"))
    return found


def is_of(value: Any, module: str) -> bool:
    return isinstance(value, type) and issubclass(value, Objective) and value.__module__ == module


BUILT_IN = read_folder()


def default_type(value: Any) -> Any:
    return {"type": "grpo", **value} if isinstance(value, dict) else value


if TYPE_CHECKING:
    AnyObjective = Objective
else:
    AnyObjective = Annotated[reduce(or_, BUILT_IN.values()), Field(discriminator="type"), BeforeValidator(default_type)]
