"""The share of the tests' lines that stands inside test functions: `python -m tests.share_of_bodies`.

A line counts from the first decorator of a function named `test_*` to the function's end. Everything else (imports,
fixtures, helpers, blank lines between functions) is what a reader passes on the way to a promise.
"""

import ast
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent
NUM_SHOWN = 25


class Share(NamedTuple):
    """The lines of one file or of all."""

    path: str
    num_tests: int
    num_inside: int
    num_lines: int

    def __str__(self) -> str:
        share = self.num_inside / max(self.num_lines, 1)
        num_outside = self.num_lines - self.num_inside
        return f"{num_outside:6} {self.num_lines:6} {share:5.0%} {self.num_tests:6}  {self.path}"


def share_of(path: Path) -> Share:
    """Count the lines of one file."""
    text = path.read_text()
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    tests = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, functions) and node.name.startswith("test_")
    ]
    starts = [min(line.lineno for line in (test, *test.decorator_list)) for test in tests]
    num_inside = sum((test.end_lineno or start) - start + 1 for test, start in zip(tests, starts, strict=True))
    return Share(str(path.relative_to(TESTS.parent)), len(tests), num_inside, len(text.splitlines()))


def main() -> None:
    """Print the share of all files, and the files with the most lines outside of tests."""
    shares = [share_of(path) for path in sorted(TESTS.rglob("*.py"))]
    counts = [(share.num_tests, share.num_inside, share.num_lines) for share in shares]
    num_tests, num_inside, num_lines = map(sum, zip(*counts, strict=True))
    worst = sorted(shares, key=lambda share: share.num_inside - share.num_lines)[:NUM_SHOWN]
    print("outside  lines share  tests  file")  # noqa: T201
    for share in (Share("all of tests/", num_tests, num_inside, num_lines), *worst):
        print(share)  # noqa: T201


if __name__ == "__main__":
    main()
