"""The installed environments by name, and what becomes of each kind of class that a user may write."""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from onbeat.contracts.installed import ENVIRONMENTS, load_installed
from onbeat.environments.final_reward import check_reward
from onbeat.environments.messages import MessageEnvironment
from onbeat.environments.tools import NO_REWARD, ToolsEnvironment, ToolsOptions
from onbeat.environments.types import Environment


def load_environment(name: str, options: Mapping[str, Any]) -> Environment:
    """Import and build an environment. Raises ValueError if it is unknown, and what it raises itself."""
    return build_environment(load_installed(ENVIRONMENTS, name), options)


def build_environment(target: Any, options: Mapping[str, Any]) -> Environment:
    """Build an environment of what a package installed: a class, a function that returns an environment, or one itself.

    A class with a method `run` is an environment; one with `init` and `step` is a game; any other has tools.
    """
    if not callable(target) and options:
        message = f"environment.options: {target!r:.200} is an object, which takes none, not even {', '.join(options)}"
        raise ValueError(f"{message}; install its class, or a function that returns it")
    if not inspect.isclass(target) or hasattr(target, "run"):
        built: Any = target(**options) if callable(target) else target
        if not callable(getattr(built, "run", None)):
            raise ValueError(f"{target!r} gave a {type(built).__name__}, which has no method `run`")
        check_run(built)
        environment: Environment = built
        return environment
    if hasattr(target, "init") and hasattr(target, "step"):
        check_options(target, options)
        return MessageEnvironment(maker(target, options))
    adapter, tool_options = ToolsOptions.split(options)
    if adapter.reward is None and not hasattr(target, "get_reward"):
        raise ValueError(NO_REWARD)
    if adapter.reward is not None:
        if hasattr(target, "get_reward"):
            raise ValueError(f"{target.__name__} has get_reward: leave out options.reward, which would not be asked")
        check_reward(adapter.reward)
    check_options(target, tool_options, [option.name for option in fields(ToolsOptions)])
    return ToolsEnvironment(target, maker(target, tool_options), adapter)


def check_run(environment: Any) -> None:
    """Raise ValueError for a method `run` that does not take a task and a session."""
    try:
        inspect.signature(environment.run).bind(None, None)
    except TypeError as error:
        name = type(environment).__name__
        raise ValueError(f"{name}.run has to be run(task, policy): {error}; a tool needs another name") from error


def check_options(target: Callable[..., Any], options: Mapping[str, Any], others: Sequence[str] = ()) -> None:
    """Raise ValueError for options that the class does not take. `others`: those that are known besides."""
    try:
        signature = inspect.signature(target)
    except ValueError:  # a class in C has no signature
        return
    try:
        signature.bind(**options)
    except TypeError as error:
        known = ", ".join([*signature.parameters, *others])
        raise ValueError(f"environment.options: {target.__name__}: {error}; there are: {known or 'none'}") from error


def maker(target: Callable[..., Any], options: Mapping[str, Any]) -> Callable[[], Any]:
    """Return a function that makes an object for one episode, with options of its own: it may change them."""
    return lambda: target(**copy.deepcopy(dict(options)))
