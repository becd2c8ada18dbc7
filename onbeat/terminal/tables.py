"""Tables of text in plain columns, for people as well as for `grep` and `awk`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from onbeat.terminal.formatting import printable, shortened


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


def aligned(text: str, width: int, is_number: bool) -> str:
    text = shortened(text, width)
    padding = " " * (width - cell_len(text))
    return padding + text if is_number else text + padding
