"""Names of modules that have moved. They work until 0.2, with a DeprecationWarning that gives the new name."""

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any


def names_from(old: str, *new: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of the module `old`, whose names are now in the modules `new`."""

    def get(name: str) -> Any:
        for module in map(import_module, new):
            if not name.startswith("__") and hasattr(module, name):
                warnings.warn(f"{old}.{name} is now {module.__name__}.{name}", DeprecationWarning, stacklevel=2)
                return getattr(module, name)
        raise AttributeError(f"module {old!r} has no attribute {name!r}")

    return get
