"""Tables and text of Markdown pages."""

import re
from collections.abc import Iterable, Sequence


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns that are empty in every row are left out. Without rows: nothing."""
    cells = [[cell(text) for text in row] for row in rows]
    if not cells:
        return ""
    used = [index for index in range(len(heads)) if any(row[index] for row in cells)]
    lines = [[heads[index] for index in used], ["---"] * len(used), *([row[index] for index in used] for row in cells)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(text: str) -> str:
    """Join a text into one line. Raises ValueError for a bar in code, which renderers understand differently."""
    flat = re.sub(r"\s+", " ", text).strip()
    if "|" in flat and "`" in flat:
        raise ValueError(f"a bar in the code of a table: {flat}")
    return flat.replace("|", "&#124;")


def code(text: str) -> str:
    return f"`{text}`"


def sentence(text: str) -> str:
    """Begin a text with a capital and end it with a full stop."""
    text = re.sub(r"\s+", " ", text).strip()
    if not text:
        return ""
    is_word = re.match(r"[a-z][a-z']*[ ,.]", text) is not None  # and not a name, a value or `code`
    return (text[0].upper() + text[1:] if is_word else text) + ("" if text.endswith((".", "?", "!")) else ".")


def generated_note(source: str) -> str:
    return f"<!-- Written by `python -m docs.generate` from {source}: change that, not this page. -->"


def join(*parts: str) -> str:
    return "\n\n".join(part.strip("\n") for part in parts if part.strip()) + "\n"
