"""Checks of commands on pages: the programs, options, services, routes and files that a command names exist."""

import ast
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

import typer
import yaml

from docs.generate.rest import document
from onbeat.cli import app
from onbeat.config import JobConfig, apply_override, read_job_file
from tests.docs.exceptions import FOREIGN_PROGRAMS, MADE_PATHS
from tests.docs.pages import ROOT, blocks_of, text_of
from tests.docs.shell import Command

METHOD = re.compile(r"-X|--request")
VALUED_OPTIONS = ("--profile", "--scale", "--entrypoint", "-e", "--env", "-u", "--user")  # options of docker compose
OUR_FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}


class Wrong(Exception):
    """The page says something that is not so."""


def is_made(page: str, path: str) -> bool:
    """Return whether a command of the page makes this path."""
    return any(page == owner and path.startswith(made) for owner, made in MADE_PATHS)


def check(command: Command) -> None:
    """Check a command; raise Wrong if it cannot work."""
    checker = CHECKERS.get(command.program)
    if checker is not None:
        checker(command)
    elif "/" in command.program:
        if not (ROOT / command.program).is_file() and not is_made(command.page, command.program):
            raise Wrong(f"there is no {command.program}")
    elif command.program not in FOREIGN_PROGRAMS:
        raise Wrong(f"no test knows the program {command.program!r}")
    for word in command.words:
        check_path(command.page, word)


def check_path(page: str, word: str) -> None:
    """Check that a word which begins with a folder of the repository is a path in it."""
    path = word.split("=", 1)[-1].split(":", 1)[0]
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)+/?", path) or path.split("/")[0] not in OUR_FOLDERS:
        return
    if is_made(page, path):
        return
    if any(part.split(".")[0].isupper() for part in path.split("/") if part != "README.md"):
        return  # `requirements/PLATFORM.lock`
    if not (ROOT / path).exists():
        raise Wrong(f"there is no {path}")


def shown_files(page: str) -> dict[str, str]:
    """Name and text of the files that the page shows."""
    return {block.title: block.text for block in blocks_of(page) if block.title}


# ---- onbeat ------------------------------------------------------------------------------------------------------


def check_onbeat(command: Command) -> None:
    with patch.dict(os.environ, dict.fromkeys(command.sets, "set")):
        path, parameters = parse_onbeat(command.words[1:])
    if path in ("onbeat run", "onbeat jobs create"):
        check_job_file(command.page, Path(parameters["job"]), parameters["overrides"] or [])


def parse_onbeat(words: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    """Return the command, such as `onbeat jobs list`, and its parameters' values. Raises Wrong for a refused one."""
    command: Any = typer.main.get_command(app)
    path, left, context = "onbeat", list(words), None
    while True:
        try:
            context = command.make_context(path, left, parent=context)
            if not hasattr(command, "commands"):
                return path, context.params
            name, command, left = command.resolve_command(context, [*context._protected_args, *context.args])
        except typer.Exit:  # --version, --help
            return path, {}
        except Exception as error:  # Typer does not export the class of its usage errors
            raise Wrong(f"{type(error).__name__}: {getattr(error, 'message', error)}") from error
        path += f" {name}"


def check_job_file(page: str, job: Path, overrides: list[str]) -> None:
    """It is there, or the page shows it, and is a job with these overrides."""
    shown = shown_files(page).get(str(job))
    if shown is None and not (ROOT / job).is_file():
        raise Wrong(f"there is no {job}, and the page does not show it")
    try:
        JobConfig.model_validate(merged(shown, overrides) if shown else read_job_file(ROOT / job, overrides))
    except ValueError as error:
        raise Wrong(f"{job} {overrides}: {error}") from error


def merged(text: str, overrides: list[str]) -> dict[str, Any]:
    job = tomllib.loads(text)
    for override in overrides:
        apply_override(job, override)
    return job


# ---- make, python, curl ------------------------------------------------------------------------------------------


def check_make(command: Command) -> None:
    text = (ROOT / "Makefile").read_text()
    targets, variables = set(re.findall(r"^([\w-]+):", text, re.M)), set(re.findall(r"^(\w+) [?:]?=", text, re.M))
    variables |= set(re.findall(r"\$\{(\w+)", (ROOT / "deploy/docker/build-images.sh").read_text()))
    for word in command.words[1:]:
        name, _, value = word.partition("=")
        if value and name not in variables:
            raise Wrong(f"the Makefile has no variable {name}")
        if not value and word not in targets:
            raise Wrong(f"the Makefile has no target {word}")


def check_python(command: Command) -> None:
    """Check that a module of ours exists, and that a script exists or is shown on the page."""
    words = command.words[1:]
    if "-m" in words:
        module = words[words.index("-m") + 1]
        path = ROOT / module.replace(".", "/")
        is_ours = module.split(".")[0] in OUR_FOLDERS
        if is_ours and not (path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()):
            raise Wrong(f"there is no module {module}")
    elif words[:1] == ("-c",):
        ast.parse(words[1])
    elif words and not (ROOT / words[0]).is_file() and words[0] not in shown_files(command.page):
        raise Wrong(f"there is no {words[0]}, and the page does not show it")


def check_curl(command: Command) -> None:
    words = list(command.words[1:])
    method, urls = "GET", []
    for before, word in zip(["", *words], words, strict=False):
        if METHOD.fullmatch(before):
            method = word
        elif word in ("-d", "--data", "--data-binary", "--json", "-F") and method == "GET":
            method = "POST"
        if re.match(r"https?://|\$\w+/", word) and before not in ("-H", "-d", "--data"):
            urls.append(word)
    if not urls:
        raise Wrong("curl without an address")
    for url in urls:
        check_call(method, re.sub(r"^\$\w+", "", urlsplit(url).path or "/"))


@cache
def routes() -> tuple[tuple[str, str], ...]:
    calls = [(method.upper(), path) for path, methods in document()["paths"].items() for method in methods]
    return (*calls, ("GET", "/openapi.json"), ("GET", "/docs"), ("GET", "/"))


def check_call(method: str, path: str) -> None:
    """Check a call of the API. `path` may have any word for a parameter, and may end with `...` or a choice `a|b`."""
    path = re.sub(r"\?.*|`.*", "", path).replace("...", "")
    *start, last = path.split("/")
    for part in last.split("|"):
        wanted = "/".join([*start, part])
        if not any(known == method and fits(wanted, route) for known, route in routes()):
            raise Wrong(f"the broker has no {method} {wanted}")


def fits(path: str, route: str) -> bool:
    """Whole; or, where the path ends with a slash, its beginning."""
    ours, theirs = path.split("/"), route.split("/")
    if path.endswith("/") and path != "/":
        ours, theirs = ours[:-1], theirs[: len(ours) - 1]
    patterns = [re.sub(r"\\\{\w+\\\}", "[^/:]+", re.escape(part)) for part in theirs]
    return len(ours) == len(theirs) and all(map(re.fullmatch, patterns, ours))


# ---- containers --------------------------------------------------------------------------------------------------


def check_docker(command: Command) -> None:
    """Check a command of `docker compose`: its profile, its services and the command of ours in one of them exist."""
    if command.words[1] != "compose":
        return
    options, plain, words = {}, [], list(command.words[2:])
    while words and not (len(plain) == 2 and plain[0] in ("run", "exec")):  # the words after it run inside
        word = words.pop(0)
        if word in VALUED_OPTIONS:
            options[word] = words.pop(0)
        elif not word.startswith("-"):
            plain.append(word)
    services = [word.partition(":")[0] for word in plain[1:] if plain[0] != "cp" or ":" in word]
    services += [options[name].partition("=")[0] for name in options if name == "--scale"]
    services_there = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    profiles = {"*", *(name for service in services_there.values() for name in service.get("profiles", []))}
    if options.get("--profile", "*") not in profiles or not set(services) <= services_there.keys():
        raise Wrong(f"compose.yaml has not all of {services}, or no such profile")
    inner = [options["--entrypoint"], *words] if "--entrypoint" in options else words
    if inner[:1] == ["onbeat"]:
        check_onbeat(Command(command.page, command.line, tuple(inner)))


CHECKERS: dict[str, Callable[[Command], None]] = {
    "onbeat": check_onbeat,
    "make": check_make,
    "python": check_python,
    "torchrun": check_python,
    "curl": check_curl,
    "docker": check_docker,
}
PROGRAMS = set(CHECKERS) | set(FOREIGN_PROGRAMS)


# ---- variables ---------------------------------------------------------------------------------------------------

VARIABLE = re.compile(r"ONBEAT_[A-Z0-9_]+")


@cache
def known_variables() -> frozenset[str]:
    """Return the variables of the services' settings, and those of the command line, compose.yaml and scripts."""
    from docs.generate.settings import SERVICES

    variables = {f"ONBEAT_{name}".upper() for settings in SERVICES.values() for name in settings.model_fields}
    patterns = (
        "compose.yaml",
        "Makefile",
        "deploy/**/*.sh",
        "deploy/**/*.Dockerfile",
        "onbeat/**/*.py",
        "services/**/*.py",
    )
    for path in (path for pattern in patterns for path in ROOT.glob(pattern)):
        variables |= set(VARIABLE.findall(path.read_text()))
    return frozenset(variables)


def unknown_variables(page: str) -> Iterator[str]:
    """Yield unknown variables of a page. A name that ends with `_` begins several: `ONBEAT_WEIGHTS_TLS_{CERT,KEY}`."""
    for name in sorted(set(VARIABLE.findall(text_of(page)))):
        if name not in known_variables() and not (
            name.endswith("_") and any(known.startswith(name) for known in known_variables())
        ):
            yield name


def command_in_code(page: str, line: int, text: str) -> Command | None:
    """Return a command inside a sentence, such as `onbeat jobs list`; one with a placeholder (`...`) is left out."""
    try:
        words = [word for word in shlex.split(text) if word != "..."]
    except ValueError:
        return None
    if len(words) < 2 or words[0] not in ("onbeat", "make", "docker", "curl"):
        return None
    return Command(page, line, tuple(words))
