"""The rewards by name, installed by the operator under the entry-point group `onbeat.rewards`. No request brings code.

A reward is a function `(response, context, **options)` that returns a finite number, or a mapping with the number under
"reward" and its parts under other names. `context` is the prompt's: {"question", "answer", "metadata", ...}.
"""

from collections.abc import Callable, Mapping

from onbeat.installed import load_installed

RewardFunction = Callable[..., float | Mapping[str, float]]


def load_reward(name: str) -> RewardFunction:
    """Import the reward. Raises ValueError, naming the installed ones, if it is unknown, or what the import raises."""
    reward: RewardFunction = load_installed("onbeat.rewards", name)
    return reward
