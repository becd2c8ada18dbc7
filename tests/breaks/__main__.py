"""A proof that tests catch what they promise: each break beside this file spoils one promise of the product, in a copy.

`python -m tests.breaks [NAME...]`, from the repository's root, ends with 1 if a break is not caught.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def main(names: list[str]) -> int:
    known = {path.stem: path for path in sorted(HERE.glob("*.toml"))}
    parser = argparse.ArgumentParser("tests.breaks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(known)}; all by default")
    given = parser.parse_args(names).names
    if unknown := set(given) - known.keys():
        parser.error(f"no break is called {', '.join(sorted(unknown))}; there is: {', '.join(known)}")
    paths = [known[name] for name in given or known]
    with tempfile.TemporaryDirectory(prefix="onbeat-breaks-") as folder:
        copy = Path(folder)
        copy_tree(copy)
        verdicts = [try_break(copy, path) for path in paths]
    return int(any(verdict != "caught" for verdict in verdicts))


def copy_tree(copy: Path) -> None:
    """Copy the files that git knows."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listing.stdout.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)


def try_break(copy: Path, path: Path) -> str:
    """Run the test without and with the break, and print and return the verdict."""
    entry = tomllib.loads(path.read_text())
    source, test = copy / entry["file"], entry["caught_by"]
    text = source.read_text()
    if text.count(entry["before"]) != 1:
        verdict = f"does not apply: {entry['file']} is to contain {entry['before']!r} once"
    elif run_test(copy, test) != 0:
        verdict = "the test fails without the break"
    else:
        source.write_text(text.replace(entry["before"], entry["after"]))
        code = run_test(copy, test)
        source.write_text(text)
        verdict = {0: "not caught", 1: "caught"}.get(code, f"the test could not run: pytest ended with {code}")
    sys.stdout.write(f"{path.stem}: {verdict} (make {entry['command']}, {test})\n")
    sys.stdout.flush()
    return verdict


def run_test(copy: Path, test: str) -> int:
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test]
    return subprocess.run(command, cwd=copy, env=environment, stdout=subprocess.DEVNULL).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
