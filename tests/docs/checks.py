"""Whether a command of a page could work: programs, options, services, routes and files that it names are there."""

import ast
import importlib.util
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
OUR_FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}


class Wrong(Exception):
    """The page says something that is not so."""


def check(command: Command) -> None:
    """Raises Wrong."""
    checker = CHECKERS.get(command.program)
    if checker is not None:
        checker(command)
    elif "/" in command.program:
        if not (ROOT / command.program).is_file():
            raise Wrong(f"there is no {command.program}")
    elif command.program not in FOREIGN_PROGRAMS:
        raise Wrong(f"no test knows the program {command.program!r}")
    for word in command.words:
        check_path(command.page, word)


def check_path(page: str, word: str) -> None:
    """A word that begins with a folder of the repository is a path in it."""
    path = word.split("=", 1)[-1].split(":", 1)[0]
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)+/?", path) or path.split("/")[0] not in OUR_FOLDERS:
        return
    if any(page == owner and path.startswith(made) for owner, made in MADE_PATHS):
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
    """`onbeat jobs list`, and the values of its parameters. Raises Wrong for what the command line refuses."""
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
    words = list(command.words[1:])
    if words[:1] == ["-c"]:
        ast.parse(words[1])
    elif words[:1] == ["-m"]:
        check_module(words[1], words[2:])
    elif words and not (ROOT / words[0]).is_file() and words[0] not in shown_files(command.page):
        raise Wrong(f"there is no {words[0]}, and the page does not show it")


def check_module(name: str, options: list[str]) -> None:
    """Of ours: it is there, and knows the options. Of others: their package is there."""
    top = name.split(".")[0]
    found = importlib.util.find_spec(top)
    if found is None:
        raise Wrong(f"there is no module {top}")
    folder = Path(next(iter(found.submodule_search_locations or [""])))
    path = folder.joinpath(*name.split(".")[1:])
    source = next((each for each in (path.with_suffix(".py"), path / "__main__.py") if each.is_file()), None)
    if source is None:
        raise Wrong(f"there is no module {name}")
    for option in options:
        if top in OUR_FOLDERS and option.startswith("--") and f'"{option.split("=")[0]}"' not in source.read_text():
            raise Wrong(f"{name} has no option {option}")


def check_torchrun(command: Command) -> None:
    check_module(command.words[command.words.index("-m") + 1], [])


def check_uvicorn(command: Command) -> None:
    module = command.words[1].split(":")[0]
    if f"{module}.py" not in shown_files(command.page):
        raise Wrong(f"the page does not show {module}.py")


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
    found = [(method.upper(), path) for path, methods in document()["paths"].items() for method in methods]
    return (*found, ("GET", "/openapi.json"), ("GET", "/"))


def check_call(method: str, path: str) -> None:
    """`path` may have any word for a parameter, and may end with `...` or a choice `a|b` in its last part."""
    path = re.sub(r"\?.*|`.*", "", path).replace("...", "")
    *start, last = path.split("/")
    for part in last.split("|"):
        wanted = "/".join([*start, part])
        if not any(known == method and fits(wanted, route) for known, route in routes()):
            raise Wrong(f"the broker has no {method} {wanted}")


def fits(path: str, route: str) -> bool:
    """Whole; or, where the path ends with a slash, its beginning."""
    pattern = re.sub(r"\\\{\w+\\\}", "[^/:]+", re.escape(route))
    if path.endswith("/") and path != "/":
        return any(re.fullmatch(part, path[:-1]) for part in beginnings(pattern))
    return re.fullmatch(pattern, path) is not None


def beginnings(pattern: str) -> list[str]:
    parts = pattern.replace("[^/:]+", "PARAMETER").split("/")
    return ["/".join(parts[:end]).replace("PARAMETER", "[^/:]+") for end in range(1, len(parts))]


# ---- containers --------------------------------------------------------------------------------------------------


def check_docker(command: Command) -> None:
    words = list(command.words[1:])
    if words[:1] == ["build"]:
        return None  # its file is a path, which is looked at as every word is
    if words[:1] != ["compose"]:
        raise Wrong(f"no test knows docker {words[0]}")
    return check_compose(command, words[1:])


@cache
def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "compose.yaml").read_text())["services"])


def check_compose(command: Command, words: list[str]) -> None:
    if words[:1] == ["--profile"]:
        profiles = {"*", *(name for service in compose().values() for name in service.get("profiles", []))}
        if words[1] not in profiles:
            raise Wrong(f"compose.yaml has no profile {words[1]}")
        words = words[2:]
    verb, *rest = words
    services, inner = services_of(verb, rest)
    if verb not in ("up", "down", "run", "exec", "cp", "ps", "logs", "restart", "stop", "pull"):
        raise Wrong(f"no test knows docker compose {verb}")
    for service in services:
        if service not in compose():
            raise Wrong(f"compose.yaml has no service {service}")
    if inner and inner[0] == "onbeat":
        check_onbeat(Command(command.page, command.line, tuple(inner)))


def services_of(verb: str, words: list[str]) -> tuple[list[str], list[str]]:
    """The services that are named, and the command that runs in one."""
    services: list[str] = []
    entrypoint: list[str] = []
    while words:
        word = words.pop(0)
        if word == "--scale":
            services.append(words.pop(0).partition("=")[0])
        elif word == "--entrypoint":
            entrypoint = [words.pop(0)]
        elif word in ("-e", "--env", "-u", "--user"):
            words.pop(0)
        elif verb == "cp":
            services += [word.partition(":")[0]] if ":" in word else []
        elif not word.startswith("-"):
            services.append(word)
            if verb in ("run", "exec"):
                return services, [*entrypoint, *words]
    return services, []


@cache
def kubernetes_objects() -> set[str]:
    """`deployment/onbeat-broker`, ... of all manifests."""
    found = set()
    for path in (ROOT / "deploy/kubernetes").rglob("*.yaml"):
        for item in yaml.safe_load_all(path.read_text()):
            if isinstance(item, dict) and "kind" in item and "name" in item.get("metadata", {}):
                found.add(f"{item['kind'].lower()}/{item['metadata']['name']}")
                if item["kind"] == "StatefulSet":
                    found.add(f"pod/{item['metadata']['name']}-0")
    return found


def check_kubectl(command: Command) -> None:
    for word in command.words:
        if re.fullmatch(r"(deployment|statefulset|service|pod|configmap|secret)/[\w-]+", word):
            if word not in kubernetes_objects():
                raise Wrong(f"no manifest has {word}")
        elif re.fullmatch(r"onbeat-[\w-]+", word) and f"pod/{word}" not in kubernetes_objects():
            raise Wrong(f"no manifest has a pod {word}")


CHECKERS: dict[str, Callable[[Command], None]] = {
    "onbeat": check_onbeat,
    "make": check_make,
    "python": check_python,
    "torchrun": check_torchrun,
    "uvicorn": check_uvicorn,
    "curl": check_curl,
    "docker": check_docker,
    "kubectl": check_kubectl,
}
PROGRAMS = set(CHECKERS) | set(FOREIGN_PROGRAMS)


# ---- variables ---------------------------------------------------------------------------------------------------

VARIABLE = re.compile(r"ONBEAT_[A-Z0-9_]+")


@cache
def known_variables() -> frozenset[str]:
    """Of the services' settings, and those that the command line, compose.yaml and scripts read."""
    from docs.generate.settings import SERVICES

    found = {f"ONBEAT_{name}".upper() for settings in SERVICES.values() for name in settings.model_fields}
    files = [
        ROOT / "compose.yaml",
        ROOT / "Makefile",
        *(ROOT / "deploy").rglob("*.sh"),
        *(ROOT / "onbeat").rglob("*.py"),
    ]
    files += [*(ROOT / "deploy").rglob("*.Dockerfile"), *(ROOT / "services").rglob("*.py")]
    for path in files:
        found |= set(VARIABLE.findall(path.read_text()))
    return frozenset(found)


def unknown_variables(page: str) -> Iterator[str]:
    """One that ends with `_` is the beginning of several: `ONBEAT_WEIGHTS_TLS_{CERT,KEY}`."""
    for name in sorted(set(VARIABLE.findall(text_of(page)))):
        if name not in known_variables() and not (
            name.endswith("_") and any(known.startswith(name) for known in known_variables())
        ):
            yield name


def command_in_code(page: str, line: int, text: str) -> Command | None:
    """`onbeat jobs list` or `make test` inside a sentence; what stands for more (`...`) is left out."""
    try:
        words = [word for word in shlex.split(text) if word != "..."]
    except ValueError:
        return None
    if len(words) < 2 or words[0] not in ("onbeat", "make", "docker", "kubectl", "curl"):
        return None
    return Command(page, line, tuple(words))
