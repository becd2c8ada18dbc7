"""Lint of the Lua scripts: each key and argument has a name from the first lines on, and no number below them."""

import re
from pathlib import Path

import pytest

import onbeat.streams


def numbered_below_the_names(script: str) -> list[str]:
    """Return the lines with KEYS or ARGV that do not stand in the script's first block of `local` lines."""
    lines = script.splitlines()
    after_header = next(number for number, line in enumerate(lines) if not line.startswith("--"))
    is_name = [line.startswith("local ") for line in lines]
    first_below = is_name.index(False, after_header)
    return [line for line in lines[first_below:] if re.search(r"\b(KEYS|ARGV)\b", line)]


@pytest.mark.parametrize(
    "path", sorted((Path(onbeat.streams.__file__).parent / "scripts").glob("*.lua")), ids=lambda path: path.stem
)
def test_keys_and_arguments_are_named_at_the_top(path: Path) -> None:
    lines = numbered_below_the_names(path.read_text())
    assert lines == [], "name them in the first lines: `local epoch = ARGV[1]`, `local tasks = slice(ARGV, 2)`"


def test_a_number_below_the_names_is_seen() -> None:
    script = "-- ARGV: epoch, path.\nlocal epoch = ARGV[1]\nif epoch then return 1 end\nlocal path = ARGV[2]\n"
    assert numbered_below_the_names(script) == ["local path = ARGV[2]"]
