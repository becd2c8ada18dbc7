"""Names of everything that tests and benchmarks make on a container engine, so that later ones remove the leftovers.

A project is named KIND-HOST-PROCESS-TOKEN, and all of it has the label that compose gives. Only things of a project
whose process has ended on this machine are removed. Images stay, except a tag that is named like a project.
"""

import hashlib
import os
import re
import secrets
import socket
import subprocess

LABEL = "com.docker.compose.project"
KINDS = ("onbeat-test", "onbeat-bench")
PROJECT = re.compile(rf"(?:{'|'.join(KINDS)})-(?P<host>[0-9a-f]{{6}})-(?P<pid>[0-9]+)-[0-9a-f]{{6}}")
UPGRADED = "onbeat/broker"  # tagged with the name of a project, as another release of its broker
TIMEOUT_S = 120.0


def new_project(kind: str) -> str:
    assert kind in KINDS, kind
    return f"{kind}-{host_token()}-{os.getpid()}-{secrets.token_hex(3)}"


def host_token() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:6]


def is_dead(project: str) -> bool:
    """False for any name that is not one of ours, or is another machine's."""
    match = PROJECT.fullmatch(project)
    if match is None or match["host"] != host_token():
        return False
    try:
        os.kill(int(match["pid"]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # another user's
        pass
    return False


def remove_dead() -> list[str]:
    """Remove leftovers and return their names. Whatever cannot be removed stays for the next time."""
    removed = []
    for kind, all_of_them, remove in (
        ("container", ["--all"], ["rm", "--force", "--volumes"]),
        ("network", [], ["rm"]),
        ("volume", [], ["rm"]),
    ):
        name_field = "{{.Names}}" if kind == "container" else "{{.Name}}"
        row = f'{name_field} {{{{.Label "{LABEL}"}}}}'
        listed = docker(kind, "ls", *all_of_them, "--filter", f"label={LABEL}", "--format", row)
        rows = [row.split(" ", 1) for row in listed.splitlines()]
        names = [name for name, project in rows if is_dead(project)]
        removed += [name for name in names if docker(kind, *remove, name)]
    tags = docker("image", "ls", "--format", "{{.Tag}}", UPGRADED).split()
    return removed + [tag for tag in tags if is_dead(tag) and docker("image", "rm", f"{UPGRADED}:{tag}")]


def docker(*arguments: str) -> str:
    """Return the output of docker, or '' when it fails: leftovers cost disk space, but fail no test."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    return done.stdout if done.returncode == 0 else ""
