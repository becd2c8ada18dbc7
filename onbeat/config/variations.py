"""The jobs of a sweep: one job, with each combination of some values and each seed."""

import copy
import hashlib
import itertools
import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from onbeat.config.files import apply_override, read_toml

MAX_JOBS = 200  # largest sweep; more are a mistake, such as a range of values times a range of seeds
MAX_NAME = 100  # limit for the name of a job, in characters
NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")
SEED = "seed"


@dataclass(frozen=True)
class Variation:
    """A job of a sweep, and the keys in which it differs from the others."""

    job: dict[str, Any]
    varied: dict[str, str]  # text of the value by key; of the seed, too, if there are several

    @property
    def idempotency_key(self) -> str:
        """The same for the same job: a sweep that is repeated gets the jobs that it has created."""
        return "sweep-" + hashlib.sha256(json.dumps(self.job, sort_keys=True).encode()).hexdigest()


def vary(job: dict[str, Any], varied: Sequence[str], num_seeds: int) -> list[Variation]:
    """Return the jobs of a sweep, seed after seed of each combination. `varied`: `key=value,value` each.

    Raise ValueError for what is no such text, for a key that is varied twice, and for too many jobs.

    >>> base = {"name": "words", "optimizer": {"decay": "none"}}
    >>> [job.job["name"] for job in vary(base, ["optimizer.learning_rate=1e-5,3e-5"], num_seeds=2)]
    ['words-learning_rate-1e-5-seed-0', 'words-learning_rate-1e-5-seed-1', 'words-learning_rate-3e-5-seed-0', \
'words-learning_rate-3e-5-seed-1']
    """
    values = dict(parse(text) for text in varied)
    if len(values) < len(varied):
        raise ValueError("a key is varied twice; give all of its values in one --vary")
    if num_seeds > 1:
        if SEED in values:
            raise ValueError("--vary seed=... and --seeds both set the seed; leave out one of them")
        first = job.get(SEED, 0)
        if not isinstance(first, int):
            raise ValueError(f"seed is {first!r}; --seeds counts on from a whole number")
        values[SEED] = [str(first + number) for number in range(num_seeds)]
    if (num_jobs := len(list(itertools.product(*values.values())))) > MAX_JOBS:
        raise ValueError(f"{num_jobs} jobs are more than a sweep may have ({MAX_JOBS}); vary less at a time")
    return [build(job, dict(zip(values, chosen, strict=True))) for chosen in itertools.product(*values.values())]


def parse(text: str) -> tuple[str, list[str]]:
    """Return the key and the texts of its values; values with commas of their own are lists of TOML or quoted.

    >>> parse("optimizer.betas=[0.9, 0.95],[0.9, 0.99]"), parse("objective.type=grpo,cispo")
    (('optimizer.betas', ['[0.9, 0.95]', '[0.9, 0.99]']), ('objective.type', ['grpo', 'cispo']))
    """
    key, separator, listed = text.partition("=")
    texts = list(split(listed))
    if not separator or not key.strip() or not all(texts):
        raise ValueError(f"--vary {text}: expected key=value,value, such as optimizer.learning_rate=1e-5,3e-5")
    if len(set(texts)) < len(texts):
        raise ValueError(f"--vary {text}: a value is there twice")
    return key.strip(), texts


def split(listed: str) -> Iterator[str]:
    """Yield the values between commas; a comma inside a value of TOML, such as a list, does not end it."""
    pieces = listed.split(",")
    while pieces:
        for number in range(1, len(pieces) + 1):
            value = ",".join(pieces[:number]).strip()
            if is_toml(value) or not value.startswith(("[", "{", '"', "'")):
                yield value
                pieces = pieces[number:]
                break
        else:  # nothing closes it
            raise ValueError(f"{listed}: {','.join(pieces)!r} is no value of TOML")


def is_toml(text: str) -> bool:
    try:
        read_toml(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return False
    return True


def build(job: dict[str, Any], chosen: dict[str, str]) -> Variation:
    """Return the job with the chosen values, and a name made of them."""
    varied = copy.deepcopy(job)
    for key, value in chosen.items():
        apply_override(varied, f"{key}={value}")
    leaves = [key.rpartition(".")[2] for key in chosen]
    labels = [leaf if leaves.count(leaf) == 1 else key for leaf, key in zip(leaves, chosen, strict=True)]
    parts = [str(job.get("name", "job")), *itertools.chain(*zip(labels, chosen.values(), strict=True))]
    name = "-".join(NOT_IN_A_NAME.sub("_", part).strip("_") for part in parts)
    if len(name) > MAX_NAME:  # the end of a digest keeps long ones apart
        name = f"{name[: MAX_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    varied["name"] = name
    return Variation(varied, chosen)
