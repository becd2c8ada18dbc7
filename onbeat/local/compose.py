"""`onbeat backup --compose` and `onbeat restore --compose`: the stack that `docker compose` finds in this folder.

Its service `storage` has all volumes; its program, `onbeat.local.volumes`, writes and reads the archive, which travels
over its standard output and input.
"""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from onbeat.contracts.errors import OnbeatError
from onbeat.local.archive import check_archive, new_file, open_backup
from onbeat.process.children import last_words

STEP_S = 300.0  # limit of a step that copies nothing
PASSWORD = "REDISCLI_AUTH"
MONITORING = {"prometheus", "grafana"}  # services that may run during a restore
ONCE = ("run", "--rm", "-T")


def write_compose_backup(file: Path) -> list[dict[str, Any]]:
    """Write the backup of the running stack, and return id, name and state of its jobs. Raise OnbeatError.

    Nothing appears under the file's name before all of it is on disk, and has been read again.
    """
    with new_file(file) as output:
        if "redis" not in running_services():
            raise OnbeatError("the stack's Redis does not run; start it (`docker compose up -d --wait redis`)")
        compose(*ONCE, "--no-deps", "-e", PASSWORD, "storage", "backup", stdout=output, more=admin(), limit_s=None)
        return list(check_archive(Path(output.name))["jobs"])


def restore_compose_backup(file: Path, is_replacing: bool) -> list[dict[str, Any]]:
    """Put the backup into the volumes of the stopped stack, and return its jobs, as above. Raise OnbeatError."""
    if running := sorted(running_services() - MONITORING):
        stop = "stop it first (`docker compose --profile '*' down`)"
        raise OnbeatError(f"the stack runs ({', '.join(running)}); {stop}")
    jobs: list[dict[str, Any]] = check_archive(file)["jobs"]
    release = compose(*ONCE, "--no-deps", "--entrypoint", "redis-server", "redis", "--version")
    compose(*ONCE, "init")  # after the image of Redis, which gives an empty volume its own user
    arguments = [str(file.stat().st_size), release.strip(), *(["--replace"] if is_replacing else [])]
    with open_backup(file) as source:
        compose(*ONCE, "--no-deps", "storage", "restore", *arguments, stdin=source, limit_s=None)
    try:
        compose("up", "--detach", "--wait", "redis")
        compose(*ONCE, "--no-deps", "-e", PASSWORD, "storage", "settle", str(len(jobs)), more=admin())
    finally:
        compose("stop", "redis")
    return jobs


def running_services() -> set[str]:
    states = ("--status", "running", "--status", "restarting", "--status", "paused")
    return set(compose("ps", "--services", *states, more={"COMPOSE_PROFILES": "*"}).split())


def admin() -> dict[str, str]:
    return {PASSWORD: compose(*ONCE, "--no-deps", "init", "show", "redis-admin-password").strip()}


def compose(
    *arguments: str,
    stdin: IO[bytes] | None = None,
    stdout: IO[bytes] | None = None,
    more: Mapping[str, str] | None = None,
    limit_s: float | None = STEP_S,
) -> str:
    """Run `docker compose`, with `more` in its environment. Return what it prints, '' if `stdout` gets that.

    Raise OnbeatError, with the sentence of the service `storage` if that has failed.
    """
    try:
        done = subprocess.run(
            ["docker", "compose", *arguments],
            stdin=stdin or subprocess.DEVNULL,
            stdout=stdout or subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **(more or {})},
            timeout=limit_s,
            check=False,
        )
    except OSError as error:
        raise OnbeatError(f"`docker`, which has the stack of compose, cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        text = f"`docker compose {arguments[0]}` took longer than {limit_s:.0f} s; does `docker info` answer?"
        raise OnbeatError(text) from error
    if done.returncode == 0:
        return (done.stdout or b"").decode()
    said = done.stderr.decode(errors="replace")
    sentences = [line.removeprefix("error: ") for line in said.splitlines() if line.startswith("error: ")]
    raise OnbeatError(sentences[-1] if sentences else f"`docker compose {arguments[0]}` failed: {last_words(said)}")
