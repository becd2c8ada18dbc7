"""The installed environments by name, and what becomes of each kind of class that a user may write."""

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from onbeat.environments.messages import MessageEnvironment
from onbeat.environments.tools import NO_REWARD, ToolsEnvironment, ToolsOptions
from onbeat.environments.types import Environment
from onbeat.installed import ENVIRONMENTS, REWARDS, load_installed


def load_environment(name: str, options: Mapping[str, Any]) -> Environment:
    """Import and build an environment. Raises ValueError if it is unknown, and what it raises itself."""
    return build_environment(load_installed(ENVIRONMENTS, name), options)


def build_environment(target: Any, options: Mapping[str, Any]) -> Environment:
    """Build an environment of what a package installed: a class, a function that returns an environment, or one itself.

    A class with a method `run` is an environment; one with `init` and `step` is a game; any other has tools.
    """
    if not inspect.isclass(target) or hasattr(target, "run"):
        built: Any = target(**options) if callable(target) else target
        if not callable(getattr(built, "run", None)):
            raise ValueError(f"{target!r} gave a {type(built).__name__}, which has no method `run`")
        environment: Environment = built
        return environment
    if hasattr(target, "init") and hasattr(target, "step"):
        return MessageEnvironment(maker(target, options))
    adapter, own = ToolsOptions.split(options)
    if adapter.reward is None and not hasattr(target, "get_reward"):
        raise ValueError(NO_REWARD)
    if adapter.reward is not None:
        load_installed(REWARDS, adapter.reward)  # before episodes are played in vain
    return ToolsEnvironment(maker(target, own), adapter)


def maker(target: Callable[..., Any], options: Mapping[str, Any]) -> Callable[[], Any]:
    """Return a function that makes an object for one episode, with options of its own: it may change them."""
    return lambda: target(**copy.deepcopy(dict(options)))
