"""Examples in docstrings (`>>>`) are what the code gives."""

import doctest
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "name",
    [
        ".".join(path.with_suffix("").parts)
        for path in [
            path.relative_to(ROOT)
            for folder in ("onbeat", "services")
            for path in sorted((ROOT / folder).rglob("*.py"))
        ]
        if ">>> " in (ROOT / path).read_text()
    ],
)
def test_examples_of_docstrings_are_right(name: str) -> None:
    module = pytest.importorskip(name.removesuffix(".__init__"), exc_type=ImportError)  # a tracker need not be there
    assert doctest.testmod(module).failed == 0
