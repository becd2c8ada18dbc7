"""The table of docs/operating.md with the durations that several parts share: the constants `NAME_S` of the modules
`deadlines.py`, each with the comment on its line."""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

from docs.generate.markdown import code, sentence, table

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "operating.md"
MODULES = {
    "all": "onbeat.contracts.deadlines",
    "broker": "services.broker.deadlines",
    "rollout": "services.rollout.deadlines",
    "trainer": "services.trainer.deadlines",
}
BEGIN = "<!-- Written by `python -m docs.generate` from the modules deadlines.py: change those, not this table. -->"
END = "<!-- The end of the table from the modules deadlines.py. -->"
CONSTANT = re.compile(r"^([A-Z][A-Z0-9_]*_S)\b[^=\n]*=[^#\n]*(?:# (.+))?$", re.MULTILINE)


def page() -> str:
    """Return the page with the table as the modules are now. Raises ValueError where the page has no place for it."""
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE} has no place for the table of durations: put it between {BEGIN} and {END}")
    rows = [row for part, name in MODULES.items() for row in rows_of(part, name)]
    return f"{before}{BEGIN}\n\n{table(['part', 'duration', 'meaning', 'constant'], rows)}\n\n{END}{after}"


def rows_of(part: str, name: str) -> Iterator[tuple[str, ...]]:
    """Yield a row for each duration of a module; none for a part without one. Raises ValueError for one without a
    comment."""
    path = (ROOT / name.replace(".", "/")).with_suffix(".py")
    if not path.exists():
        return
    module = importlib.import_module(name)
    for constant, text in CONSTANT.findall(path.read_text()):
        if not text:
            raise ValueError(f"{path}: {constant} needs a comment on its line, which the table of durations shows")
        yield part, f"{getattr(module, constant):g} s", sentence(text), code(constant)
