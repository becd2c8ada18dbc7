"""Answers that rewards compare with responses: as text, or as numbers."""

import re
from decimal import Decimal
from typing import Any

ANSWER_RULES = 1  # number of the rules in docs/rewards.md, by which rewards compare answers; jobs record it
IS_NUMBER = "answer_is_number"  # key in the context of a prompt whose answer is a JSON number
PROMPT_SUFFIX = "prompt_suffix"  # key in the context of a conversation: the end of its prompt, behind the messages
MAX_EXPONENT = 9_999

MINUS = "\N{MINUS SIGN}"
GAPS = "\N{NO-BREAK SPACE}\N{THIN SPACE}\N{NARROW NO-BREAK SPACE} "  # spaces between groups of three digits
NUMBER = re.compile(
    rf"(?P<digits>[+-]?(?:\d{{1,3}}(?:,\d{{2,3}})*,\d{{3}}|\d{{1,3}}(?:[{GAPS}]\d{{3}})+|\d+)?(?:\.\d*)?)"
    r"(?:[eE](?P<exponent>[+-]?\d{1,5}))?(?P<percent>\s*%)?",
    re.ASCII,
)


def read_number(text: str) -> Decimal | None:
    """Return the number that the whole text is; None for any other text. Separators are commas or gaps between groups.

    >>> [str(read_number(text)) for text in ("1,234.50", "1 234", "50 %", "1e21", "-7.0", "1,2", "seven")]
    ['1234.50', '1234', '0.50', '1E+21', '-7.0', 'None', 'None']
    """
    match = NUMBER.fullmatch(text.strip().replace(MINUS, "-"))
    if match is None or not re.search(r"\d", match["digits"]):
        return None
    exponent = int(match["exponent"] or 0) - 2 * bool(match["percent"])
    if abs(exponent) > MAX_EXPONENT:
        return None
    return Decimal(f"{re.sub(f'[,{GAPS}]', '', match['digits'])}e{exponent}")


def is_number(answer: Any) -> bool:
    """Return whether a value of JSON or Parquet is a number, which true and false are not."""
    return isinstance(answer, int | float | Decimal) and not isinstance(answer, bool)


def number_text(number: int | float | Decimal) -> str:
    """Return a number as text, without an exponent: mathematics reads 1e21 as a product with e.

    >>> number_text(42.0), number_text(1e21), number_text(1e-9)
    ('42.0', '1000000000000000000000', '0.000000001')
    """
    return str(number) if isinstance(number, int) else format(Decimal(str(number)), "f")
