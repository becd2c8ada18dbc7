"""The settings of a service from its environment: a wrong one ends the service in one sentence, and a misspelt one is
named. What they are is in each service's `settings.py`."""

import logging
import os
import sys
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, SettingsError

from onbeat.contracts.suggestions import close_names, suggest

logger = logging.getLogger(__name__)

PREFIX = "ONBEAT_"
LIKENESS = 0.9  # settings of different services are less alike than this

SettingsT = TypeVar("SettingsT", bound=BaseSettings)


def read_settings(kind: type[SettingsT], service: str) -> SettingsT:
    """Read a service's settings. Exits with code 2, naming the variables, when they are wrong."""
    try:
        return kind()
    except ValidationError as error:
        reason = "; ".join(map(describe, error.errors()))
    except SettingsError as error:
        reason = f"{error}; it is to be JSON"
    sys.stderr.write(f"the {service}'s settings are wrong: {reason}\n")
    raise SystemExit(2)


def describe(problem: ErrorDetails) -> str:
    message = problem["msg"].removeprefix("Value error, ")
    return f"{PREFIX}{str(problem['loc'][0]).upper()}: {message}" if problem["loc"] else message


def warn_of_misspelt(settings: BaseSettings, service: str) -> None:
    """Log variables that are no settings of the service but nearly have the name of one."""
    known = [PREFIX + name.upper() for name in type(settings).model_fields]
    for name in sorted(os.environ):
        close = close_names(name, known, most=1, likeness=LIKENESS)
        if name.startswith(PREFIX) and name not in known and close:
            logger.warning("%s is no setting of the %s and changes nothing; %s", name, service, suggest(close, known))
