"""docs/protocol.md names every script and every window that a test opens, and none that is not there."""

import re
from importlib import resources
from pathlib import Path

ROOT = Path(__file__).parents[2]


def first_cells(heading: str) -> set[str]:
    """Return the names in the first column of the table below a heading."""
    text = (ROOT / "docs" / "protocol.md").read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| `([^`]+)` \|", text.partition("\n### ")[0], re.MULTILINE))


def test_every_script_is_described() -> None:
    scripts = {file.name for file in (resources.files("onbeat.streams") / "scripts").iterdir()}
    assert first_cells("The scripts") == {name.removesuffix(".lua") for name in scripts} - {"prelude"}


def test_every_window_has_a_test() -> None:
    windows = first_cells("Who dies when")
    tests = (ROOT / "tests" / "chaos" / "test_windows.py").read_text()
    missing = {name for name in windows if name not in tests and f"test_{re.sub('[:-]', '_', name)}" not in tests}
    assert len(windows) > 20
    assert not missing
