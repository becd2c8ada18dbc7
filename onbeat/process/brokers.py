"""The one rule for which broker a command or a client asks (docs/which-stack.md).

    NAMED    an address that was named: --url, else ONBEAT_URL; --data-dir on the command line outranks the variable
    STACK    the running stack of the data folder: --data-dir, else ONBEAT_DATA_DIR, else ./.onbeat
    RECORDS  what earlier stacks recorded in that folder, to be read only
    DEFAULT  whatever answers at DEFAULT_URL, to be read only, unless --data-dir names a folder

It neither starts a process nor sends a request of a command.
"""

import os
import shlex
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from onbeat.contracts.data_folder import REDIS_FOLDER
from onbeat.contracts.errors import OnbeatError, UnnamedBroker
from onbeat.process.stacks import has_processes, resolve_data_dir, running_stack, wait_until, why_ended

DEFAULT_PORT = 8800
DEFAULT_URL = f"http://127.0.0.1:{DEFAULT_PORT}"
NAMING = f"export ONBEAT_URL={DEFAULT_URL}"  # the line to copy
STARTING_S = 15.0  # a stack that is starting or ending is waited for
IDENTITY_S = 2.0


class Source(StrEnum):
    NAMED = "named"
    STACK = "stack"
    RECORDS = "records"
    DEFAULT = "default"


@dataclass(frozen=True)
class BrokerPlace:
    """The place of a broker."""

    source: Source
    url: str = ""  # RECORDS have none: a process has to open them
    is_read_only: bool = False
    folder: Path = Path()  # the data folder that was looked at, unless an address was named
    option: str = ""  # leads another command to that folder, such as " --data-dir /data"

    @property
    def is_recorded(self) -> bool:
        """Tell whether nothing goes on there: neither trainer nor rollout runs."""
        return self.is_read_only and self.source is not Source.DEFAULT


def find_broker(url: str | None = None, data_dir: Path | None = None) -> BrokerPlace:
    """Return the place of the broker to ask. `url`, `data_dir`: what the caller names, before the environment does.

    Raise OnbeatError for a given data folder without a stack and without records, and for one whose stack is just
    starting or ending.
    """
    named = url or (os.environ.get("ONBEAT_URL") if data_dir is None else None)
    if named:
        return BrokerPlace(Source.NAMED, named)
    folder = resolve_data_dir(data_dir)
    option = f" --data-dir {shlex.quote(str(data_dir))}" if data_dir is not None else ""
    wait_until(lambda: running_stack(folder) is not None or not has_processes(folder), STARTING_S)
    stack = running_stack(folder)
    if stack is not None:
        return BrokerPlace(Source.STACK, stack.url, stack.is_read_only, folder, option)
    if has_processes(folder):
        raise OnbeatError(f"a stack in {folder} is just starting or ending; try again in a few seconds")
    if (folder / REDIS_FOLDER).is_dir():
        return BrokerPlace(Source.RECORDS, is_read_only=True, folder=folder, option=option)
    if option:
        remedy = f"start one with `onbeat up{option}`, or name a broker with --url"
        raise OnbeatError(why_ended(folder) or f"no stack runs in {folder}; {remedy}")
    return BrokerPlace(Source.DEFAULT, DEFAULT_URL, is_read_only=True, folder=folder)


def describe_reading(place: BrokerPlace) -> str:
    """Return whose records are read, for people; '' for a broker that was named, and for a folder's running stack."""
    if place.source is Source.RECORDS:
        cause = why_ended(place.folder) or f"no stack runs in {place.folder}"
        return f"{cause}; reading its records, which takes some seconds"
    owner = whose_broker(DEFAULT_URL) if place.source is Source.DEFAULT else ""
    return f"no stack runs in {place.folder}; reading from {DEFAULT_URL}, {owner}" if owner else ""


def refuse_change(place: BrokerPlace) -> None:
    """Raise UnnamedBroker, with what to do, where jobs and files can only be read."""
    if not place.is_read_only:
        return
    start = f"start one with `onbeat up{place.option}`"
    if place.source is Source.STACK:
        view = f"the records in {place.folder} are open to be read only, by `onbeat view` or another command"
        raise UnnamedBroker(f"{view}: end it (`onbeat down{place.option}`), then {start}")
    owner = whose_broker(DEFAULT_URL)
    if not owner:
        raise UnnamedBroker(f"no stack runs in {place.folder}: {start}, or name a broker with --url or ONBEAT_URL")
    raise UnnamedBroker(
        f"no stack runs in {place.folder}: {start}. {DEFAULT_URL} is {owner}; if you mean that one, name it:\n"
        f"  {NAMING}"
    )


def whose_broker(url: str) -> str:
    """Return whose stack answers at an address of this machine, for people; '' if nothing answers."""
    import httpx  # `onbeat --help` does without

    try:
        answer = httpx.get(f"{url}/readyz", timeout=IDENTITY_S, trust_env=False)
    except httpx.HTTPError:
        return ""
    try:
        identity = answer.json()
        return f"the stack of {identity['folder']}, run by user {identity['user']}"
    except (ValueError, LookupError, TypeError):  # it has another namespace, or is no broker
        return "which does not say whose stack it is"
