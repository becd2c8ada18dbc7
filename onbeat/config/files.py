"""Job files: TOML or JSON, with overrides of single keys."""

import json
import tomllib
from pathlib import Path
from typing import Any


def read_job_file(path: Path, overrides: list[str]) -> dict[str, Any]:
    """Read the raw job with `key.sub=value` overrides applied; values are TOML, bare words are strings.

    >>> apply_override({"schedule": {"mode": "sync"}}, "schedule.mode=periodic")
    {'schedule': {'mode': 'periodic'}}
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such job file; see examples/ for jobs to start from")
    if path.suffix in (".yaml", ".yml"):
        raise ValueError(f"{path}: a job file is TOML or JSON, not YAML; see examples/ for jobs to start from")
    kind = "JSON" if path.suffix == ".json" else "TOML"
    try:
        text = path.read_text("utf-8-sig")  # some editors write a byte order mark first
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not text in UTF-8; save it as UTF-8") from error
    try:
        job: dict[str, Any] = json.loads(text, object_pairs_hook=unique) if kind == "JSON" else read_toml(text)
    except RecursionError:
        raise ValueError(f"{path}: nested too deep for a job; see examples/ for what one looks like") from None
    except ValueError as error:
        raise ValueError(f"{path}: not valid {kind}: {error}") from error
    if not isinstance(job, dict):
        raise ValueError(f'{path}: a job is one JSON object, such as {{"model": ...}}')
    for override in overrides:
        apply_override(job, override)
    resolve_models(job, path.parent)
    resolve_adapter(job, path.parent)
    read_template(job, path.parent)
    return job


def resolve_models(job: dict[str, Any], folder: Path) -> None:
    """Make relative paths of the job's model and of its teacher such beside the job file, as `data.path` is. Raises
    ValueError for a hub id that may be meant as a folder."""
    for section in ("model", "teacher"):
        model = job.get(section)
        if not isinstance(model, dict) or not isinstance(name := model.get("path"), str) or "\0" in name:
            continue
        if name.startswith(("./", "../")):
            model["path"] = str((folder / name).resolve())
        elif not name.startswith(("/", "~/", "bundled:")) and (folder / name).is_dir():
            raise ValueError(
                f"{section}.path = {name!r} is the id of a model on a hub, and there is a folder of this name beside "
                f"the job file; write './{name}' for the folder, or start the job from elsewhere for the hub's model"
            )


def resolve_adapter(job: dict[str, Any], folder: Path) -> None:
    """Make a relative path of the job's adapter one beside the job file. An adapter is a folder, never a hub id."""
    model = job.get("model")
    if isinstance(model, dict) and isinstance(name := model.get("adapter"), str) and name and "\0" not in name:
        model["adapter"] = name if name.startswith("~/") else str((folder / name).resolve())


def read_template(job: dict[str, Any], folder: Path) -> None:
    """Put the text of the chat template's file, a path beside the job file, in place of its name. Raises ValueError."""
    model = job.get("model")
    if not isinstance(model, dict) or not isinstance(name := model.get("chat_template_file"), str):
        return
    if model.get("chat_template") is not None:
        raise ValueError("model.chat_template_file: model.chat_template is there, too; leave out one of them")
    try:
        model["chat_template"] = (folder / Path(name).expanduser()).read_text("utf-8")
    except (OSError, ValueError, RuntimeError) as error:
        reason = "not text in UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        remedy = "give the path of a template in Jinja, beside the job file"
        raise ValueError(f"model.chat_template_file: {name!r} cannot be read: {reason}; {remedy}") from error
    del model["chat_template_file"]


def read_toml(text: str) -> dict[str, Any]:
    """Parse TOML. Dates and times become strings: a job is JSON, which has none.

    >>> read_toml("revision = 2026-01-31")
    {'revision': '2026-01-31'}
    """
    table: dict[str, Any] = json.loads(json.dumps(tomllib.loads(text), default=lambda moment: moment.isoformat()))
    return table


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a mapping. Raise ValueError for a key that is there twice, as TOML does."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} is there twice")
    return mapping


def apply_override(job: dict[str, Any], override: str) -> dict[str, Any]:
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise ValueError(f"--set {override}: expected key=value, such as schedule.num_iterations=10")
    try:
        value: Any = read_toml(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, leaf = key.strip().split(".")
    section = job
    for parent in parents:
        if section.get(parent) is None:  # a job that the broker gives has null for a section that is left out
            section[parent] = {}
        section = section[parent]
        if not isinstance(section, dict):
            raise ValueError(f"--set {override}: {parent} is a value, not a section")
    section[leaf] = value
    return job
