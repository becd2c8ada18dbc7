"""The rewards by name, installed by the operator under the entry-point group `onbeat.rewards`. No request brings code.

A reward is a function `(response, context, **options)` that returns a finite number, or a mapping with the number under
"reward" and its parts under other names. `context` is the prompt's: {"question", "answer", "metadata", ...}.
"""

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

GROUP = "onbeat.rewards"

RewardFunction = Callable[..., float | Mapping[str, float]]


def load_reward(name: str) -> RewardFunction:
    """Import the reward. Raises ValueError, naming the installed ones, if it is unknown, or what the import raises."""
    installed = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in installed:
        raise ValueError(f"no reward {name!r} is installed here; there are: {', '.join(sorted(installed))}")
    reward: Any = installed[name].load()
    return reward
