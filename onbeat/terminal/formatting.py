"""Numbers, durations, curves and tables as text, for people as well as for `grep` and `awk`."""

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich.cells import cell_len, set_cell_size

BLOCKS = "▁▂▃▄▅▆▇█"
PIPE_WIDTH = 120  # characters of a line that is not for a terminal; only a longer word makes it longer
INDENT = "    "  # before the rest of a line that is broken
EMOJI = r"[\u2190-\u21ff\u2600-\u27bf\u2b00-\u2bff\U0001f300-\U0001faff]"
EMOJI_JOINER = re.compile(rf"(?:(?<={EMOJI})|(?<={EMOJI}\ufe0f))\u200d(?={EMOJI})")


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Return one block per value (means of neighbours when there are too many), from the lowest to the highest value.

    >>> sparkline([0.0, 0.5, 1.0]), sparkline([3.0, 3.0]), sparkline([0.0, 0.0, 1.0, 1.0, 2.0, 4.0], width=3)
    ('▁▅█', '▁▁', '▁▃█')
    """
    if len(values) > width:
        edges = [round(index * len(values) / width) for index in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[int((value - low) * scale + 0.5)] for value in values)


def duration(seconds: float) -> str:
    """Format seconds.

    >>> [duration(seconds) for seconds in (7.4, 59.6, 125, 12_000)]
    ['7 s', '1 min 00 s', '2 min 05 s', '3 h 20 min']
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def size(num_bytes: float) -> str:
    """Format a size.

    >>> [size(num_bytes) for num_bytes in (0, 999, 12_300, 4_560_000, 2_400_000_000)]
    ['0 B', '999 B', '12.3 kB', '4.6 MB', '2.4 GB']
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def number(value: float | None, spec: str) -> str:
    return format(value, spec) if value is not None else "-"


def printable(value: Any) -> str:
    """Escape control characters visibly, so that text from a model or a server cannot move the cursor.

    A joiner stays between two emoji, where it can only make one picture of them. Elsewhere it would hide in a word.
    """
    text = str(value)
    kept = {match.start() for match in EMOJI_JOINER.finditer(text)}
    return "".join(
        c if c.isprintable() or index in kept else c.encode("unicode_escape").decode("ascii")
        for index, c in enumerate(text)
    )


def clip(text: str, max_characters: int = 400) -> str:
    """Make a text printable, with its line breaks, and cut its end if it is long."""
    lines = "\n".join(printable(line) for line in text.strip().splitlines())
    return lines if len(lines) <= max_characters else lines[:max_characters] + " ..."


def shortened(text: str, width: int) -> str:
    """Return the text in at most `width` cells of a terminal; its end is cut if it is longer.

    >>> shortened("abc", 3), shortened("abcd", 3), shortened("日本語", 4)
    ('abc', 'ab…', '日 …')
    """
    return text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"


def wrapped(text: str, width: int) -> list[str]:
    """Break a line that is longer than `width`, between its parts (two spaces) where it has some; words stay whole.

    >>> wrapped("reward 0.5  12 tokens/s  3 s", 20), wrapped("a sentence that is long", 20), wrapped("short", 20)
    (['reward 0.5', '    12 tokens/s  3 s'], ['a sentence that is', '    long'], ['short'])
    """
    if len(text) <= width:
        return [text]
    lines = [""]
    for part in text.split("  "):
        longer = f"{lines[-1]}  {part}" if lines[-1].strip() else f"{lines[-1]}{part}"
        if len(longer) > width and lines[-1].strip():
            lines.append(f"{INDENT}{part}")
        else:
            lines[-1] = longer
    options = {"subsequent_indent": INDENT, "break_long_words": False, "break_on_hyphens": False}
    return [piece for line in lines for piece in textwrap.wrap(line, width, **options)]  # type: ignore[arg-type]


def hanging(line: str, width: int, indent: int | None = None) -> list[str]:
    """Break a line for a terminal, between words; the rest is below the text that follows a label and two spaces.

    >>> hanging("ok       a sentence that is long", 24), hanging("  key: a sentence", 12), hanging("short", 12)
    (['ok       a sentence that', '         is long'], ['  key: a', '  sentence'], ['short'])
    """
    if cell_len(line) <= width:
        return [line]
    if indent is None:
        label = re.match(r"\s*(?:\S+(?: \S+)? {2,})?", line)
        indent = len(label[0]) if label else 0
    return textwrap.wrap(
        line,
        width,
        subsequent_indent=" " * (indent if indent <= width // 2 else len(INDENT)),
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )


@dataclass(frozen=True)
class Column:
    title: str
    rank: int = 0  # the highest rank is dropped first where the width is short; 0: never
    is_number: bool = False


def table_lines(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None = None) -> Iterator[str]:
    """Yield the title line and one line per row; columns are left out and texts cut until they fit."""
    cells = [[column.title.upper() for column in columns], *([printable(text) for text in row] for row in rows)]
    widths = [max(cell_len(row[index]) for row in cells) for index in range(len(columns))]
    shown = list(range(len(columns)))
    while width is not None and sum(widths[index] + 2 for index in shown) - 2 > width:
        droppable = [index for index in shown if columns[index].rank]
        if droppable:
            shown.remove(max(droppable, key=lambda index: columns[index].rank))
            continue
        widest = max(shown, key=lambda index: widths[index])
        if widths[widest] <= 4:
            break
        widths[widest] -= 1
    for row in cells:
        yield "  ".join(aligned(row[index], widths[index], columns[index].is_number) for index in shown).rstrip()


def fitted_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return the lines of a table for a terminal: columns with a rank are left out until it fits, else the last column
    is wrapped.

    >>> fitted_table([Column("kind"), Column("pool", 1), Column("text")], [("a", "default", "one two three")], 13)
    ['KIND  TEXT', 'a     one two', '      three']
    """
    while True:
        lines = list(table_lines(columns, rows))
        first = max(range(len(columns)), key=lambda index: columns[index].rank)
        if not columns[first].rank or max(map(cell_len, lines)) <= width:
            break
        columns, *rows = ([*row[:first], *row[first + 1 :]] for row in (columns, *rows))  # type: ignore[assignment]
    last = cell_len(lines[0]) - cell_len(columns[-1].title)
    return [part for line in lines for part in hanging(line, width, last)]


def aligned(text: str, width: int, is_number: bool) -> str:
    text = shortened(text, width)
    padding = " " * (width - cell_len(text))
    return padding + text if is_number else text + padding
