"""Engines by name: entry points of the group `onbeat.engines`."""

import inspect
from importlib.metadata import entry_points
from typing import Any

from services.rollout.engine import Engine

GROUP = "onbeat.engines"


class EngineBroken(Exception):
    """The engine cannot go on; the process has to be replaced."""


def create_engine(name: str, **options: Any) -> Engine:
    """Build the engine with those options that its constructor knows. Raises ValueError for an unknown name."""
    installed = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in installed:
        raise ValueError(
            f"no engine {name!r} is installed here; ONBEAT_ENGINE is one of: {', '.join(sorted(installed))}"
        )
    factory = installed[name].load()
    known = inspect.signature(factory).parameters
    engine: Engine = factory(**{option: value for option, value in options.items() if option in known})
    return engine
