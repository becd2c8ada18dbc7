"""The installed engines by name, from the entry points of the group `onbeat.engines`, and their deadlines."""

import asyncio
import inspect
import logging
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from types import TracebackType
from typing import Any

from onbeat.contracts.installed import ENGINES, load_installed
from onbeat.engines import Engine, EngineBroken
from onbeat.machine.processor import Hardware, read_processor
from onbeat.moved import names_from
from services.rollout.deadlines import CANCEL_DEADLINE_S

__getattr__ = names_from("services.rollout.engines.registry", "onbeat.engines")  # the old name of EngineDied

logger = logging.getLogger(__name__)

STOP_DEADLINE_S = 150.0  # vLLM's start runs in a thread that cannot be stopped, and may need this long


def check_engine(name: str, device: str, tensor_parallel_size: int = 1) -> str:
    """Return the device that the engine will run on: auto, cpu, cuda, npu -> cpu, cuda, npu. An engine without devices
    leaves `device` as it is.

    Raises ValueError, with the remedy, where the engine, the device or its driver is missing.
    """
    factory = load_engine(name)
    if "device" not in inspect.signature(factory).parameters:
        return device
    try:
        chosen = find_device(device)
    except ImportError as error:
        raise ValueError(f"engine {name!r} gets no device: {error}; docs/platforms.md says what each needs") from error
    if (check_device := getattr(factory, "check_device", None)) is not None:
        check_device(chosen, tensor_parallel_size)
    return chosen


def find_device(device: str) -> str:
    """Resolve auto, cpu, cuda, npu -> cpu, cuda, npu. Raises ValueError if the device cannot be used, ImportError if
    torch cannot be imported."""
    if device in ("auto", "cpu") and not knows_accelerators():
        return "cpu"  # torch is not imported: that takes more than a second
    from services.device import choose_device

    return choose_device(device).type


def find_hardware(device: str) -> Hardware:
    """Return what the rollout computes on. `device` as `check_engine` returns it."""
    if device in ("auto", "cpu"):
        return read_processor()
    import torch

    from services.device import describe_device

    return describe_device(torch.device(device))


def knows_accelerators() -> bool:
    """Return whether the installed PyTorch is built for more than the CPU, judged by its packages alone."""
    return not version("torch").endswith("+cpu") or find_spec("torch_npu") is not None


def prepare_engine(name: str, **options: Any) -> None:
    """Let the engine begin the work that needs no model, by its static method `prepare`, if it has one."""
    if (prepare := getattr(load_engine(name), "prepare", None)) is not None:
        prepare(**known_options(prepare, options))


def create_engine(name: str, **options: Any) -> Engine:
    """Build the engine with the options that its constructor knows. Raises ValueError for an unknown name."""
    factory = load_engine(name)
    return factory(**known_options(factory, options))


def load_engine(name: str) -> Callable[..., Engine]:
    try:
        factory: Callable[..., Engine] = load_installed(ENGINES, name)
    except ValueError as error:
        raise ValueError(f"ONBEAT_ENGINE: {error}") from None
    except (ImportError, RuntimeError) as error:  # torch raises RuntimeError for a back end without its driver
        reason = f"{error} ({error.__cause__})" if error.__cause__ else str(error)
        raise ValueError(
            f"engine {name!r} cannot be imported: {reason}; docs/platforms.md says what each device needs"
        ) from error
    return factory


def known_options(function: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options for which the function has parameters."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in known}


async def wait_for_engine(work: asyncio.Task[None], deadline_s: float, work_name: str, setting: str) -> None:
    """Wait until it is done, successful or not. Raises EngineBroken, naming the setting, after the deadline."""
    try:
        await asyncio.wait({work}, timeout=deadline_s)
        if not work.done():
            raise EngineBroken(f"{work_name} did not end within {deadline_s:.0f} s ({setting})")
    finally:
        await give_up(work)


async def give_up(work: asyncio.Task[None]) -> None:
    """Cancel the work unless it is done. An engine that ignores the cancellation is left behind."""
    if not work.done():
        work.cancel()
        await asyncio.wait({work}, timeout=CANCEL_DEADLINE_S)


async def stop_engine(
    engine: Engine, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
) -> None:
    """Stop the engine; the last arguments are those of `__aexit__`. Raises EngineBroken, unless there is an error
    already, when it does not end: what it still holds is unknown."""
    try:
        async with asyncio.timeout(STOP_DEADLINE_S):
            await engine.stop()
    except TimeoutError:
        message = f"the engine did not stop within {STOP_DEADLINE_S:.0f} s"
        if error is None:
            raise EngineBroken(message) from None
        logger.error("%s", message)
