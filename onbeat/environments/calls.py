"""Calls of methods that a user wrote: with what they take of a data row, in a thread unless they are asynchronous."""

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from onbeat.environments.types import Task


def row_of(task: Task) -> dict[str, Any]:
    """Return the data row of a task by the names of its fields, and `prompt`, `question`, `answer` and `seed`."""
    given = {"prompt": task.messages, "question": task.question, "answer": task.answer}
    return {"seed": task.seed} | task.metadata | given


async def call_with_row(method: Callable[..., Any], row: Mapping[str, Any]) -> Any:
    """Call a method with the fields that it has parameters for, or with all if it has `**row`."""
    parameters = inspect.signature(method).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return await call(method, **{name: value for name, value in row.items() if takes_all or name in parameters})


async def call(method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a method: an asynchronous one here, any other in a thread, so that it holds up no other episode. A decorator
    may hide that a method is asynchronous."""
    if inspect.iscoroutinefunction(method):
        return await method(*args, **kwargs)
    result = await asyncio.to_thread(call_here, method, *args, **kwargs)
    return await result if inspect.isawaitable(result) else result


def call_here(method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    try:
        return method(*args, **kwargs)
    except StopIteration as error:  # a future cannot hold it: its waiter would wait for ever
        ended = RuntimeError("StopIteration was raised; give `next` a default value")
        raise ended.with_traceback(error.__traceback__) from None
