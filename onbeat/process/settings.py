"""The settings of a service from its environment: a wrong one ends the service in one sentence, and a misspelt one is
named. What they are is in each service's `settings.py`."""

import difflib
import logging
import os
import sys
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, SettingsError

logger = logging.getLogger(__name__)

PREFIX = "ONBEAT_"
CLOSE = 0.9  # settings of different services are less alike than this

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
        close = difflib.get_close_matches(name, known, n=1, cutoff=CLOSE)
        if name.startswith(PREFIX) and name not in known and close:
            logger.warning("%s is no setting of the %s and changes nothing; did you mean %s?", name, service, close[0])
