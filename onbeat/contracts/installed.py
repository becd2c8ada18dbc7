"""The entry points that packages installed in groups of Onbeat. No request brings code: it brings names."""

from importlib.metadata import entry_points
from typing import Any

REWARDS, ENVIRONMENTS, ENGINES = "onbeat.rewards", "onbeat.environments", "onbeat.engines"  # the groups


def load_installed(group: str, name: str) -> Any:
    """Import what is installed under a name. Raises ValueError, with the installed names, if it is unknown, or what the
    import raises."""
    installed = {entry.name: entry for entry in entry_points(group=group)}
    if name not in installed:
        kind = group.removeprefix("onbeat.").removesuffix("s")
        raise ValueError(f"no {kind} {name!r} is installed here; there are: {', '.join(sorted(installed))}")
    return installed[name].load()
