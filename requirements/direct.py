"""Print the direct dependencies of Onbeat with some of its extras: `python requirements/direct.py EXTRA...`.

They stand in pyproject.toml. Where no lock fits, pip installs from this list. It needs only the standard library.
"""

import re
import sys
import tomllib
from pathlib import Path


def direct_dependencies(project: Path, extras: list[str]) -> list[str]:
    """Return the requirements of a pyproject.toml and of these extras, those that extras take from others included."""
    table = tomllib.loads(project.read_text())["project"]
    requirements = set(table["dependencies"])
    waiting = list(extras)
    while waiting:
        for requirement in table["optional-dependencies"][waiting.pop()]:
            if inner := re.fullmatch(rf"{table['name']}\[(.+)\]", requirement):
                waiting += inner[1].split(",")
            else:
                requirements.add(requirement)
    return sorted(requirements)


if __name__ == "__main__":
    sys.stdout.write("\n".join(direct_dependencies(Path("pyproject.toml"), sys.argv[1:])) + "\n")
