"""The two kinds of functions that score: of one response, and of all responses to a prompt.

def brevity(response, context, **options)     called for each response; returns its reward
def best(responses, context, **options)       called once for the group; returns a list of rewards, in order
"""

import inspect
from collections.abc import Callable
from typing import Any

GROUP = "responses"  # first parameter of a function that scores a group


def takes_group(function: Callable[..., Any]) -> bool:
    """Return whether the function scores a whole group at once. Raises ValueError if its signature could mean both.

    >>> takes_group(lambda responses, context: []), takes_group(lambda response, context: 0.0)
    (True, False)
    """
    try:
        names = list(inspect.signature(function).parameters)
    except ValueError:  # some functions written in C have no signature
        return False
    if GROUP in names[1:]:
        raise ValueError(f"its parameter `{GROUP}` has to be the first one, before `context`; call an option otherwise")
    return names[:1] == [GROUP]
