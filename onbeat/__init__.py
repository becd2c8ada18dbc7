"""Onbeat: reinforcement learning for language models as microservices.

This package is the client side and the contracts that services share. Importing it never imports torch, vllm or a web
framework.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onbeat.client import AsyncClient, Client
    from onbeat.config import JobConfig

__all__ = ["AsyncClient", "Client", "JobConfig"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import the public names on first use, so that `onbeat --help` stays instant."""
    if name not in __all__:
        raise AttributeError(f"module 'onbeat' has no attribute {name!r}")
    return getattr(import_module("onbeat.config" if name == "JobConfig" else "onbeat.client"), name)
