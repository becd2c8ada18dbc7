"""Answers as texts: what Math-Verify does not read, or forgets, is compared here. docs/rewards.md has the rules."""

import re

MINUS = "\u2212"
MATHEMATICS = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$((?:\\\$|[^$\n])+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
TOO_LARGE = re.compile(r"\\[dt]?binom\s*\{[^{}]*(?:\d{5}|\^)")  # computed while it is read
UPRIGHT = re.compile(r"\\(?:mathrm|text|textrm)\s*\{\s*([ie])\s*\}")
DOTS = re.compile(r"\\[lc]?dots\w*|\.\.\.+|…|⋯")
OTHER_MEANINGS = (re.compile(r"\\(?:to|mapsto|not|equiv|pmod|bmod)\b"), re.compile(r"\d'|(?<!_)\d\s+\d{1,2}(?!\d)"))
ONLY_AS_TEXT = re.compile(r"\d{4}-\d\d-\d\d|\d{1,2}/\d{1,2}/\d{2,4}|\d\s*:\s*\d+\s*:\s*\d")  # dates, ratios of three
VARIABLE = re.compile(r"[I-Zi-z]")  # a single letter up to H is a choice
LIST_DOTS = re.compile(rf"[,+]\s*({DOTS.pattern})[^\n]*$")
BETWEEN_ITEMS = re.compile(r"[,;]|\b(?:and|or)\b")
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))|\{,\}")
BRACKETS = re.compile(r"[\[({][^\[({})\]]*[\])}]")
TIME = re.compile(r"(\d{1,2}):([0-5]\d)(?::([0-5]\d))?\s*([ap]\.?\s*m\.?)?", re.IGNORECASE)
TEXT_MARKS = re.compile(r"\\(?:text|textrm|textbf|mathrm|mbox|operatorname)\s*\{([^{}]*)\}")
SPACES = re.compile(r"\\[,;:! ]|\\q?quad\b|~|\s")
BASE = re.compile(r"([0-9A-Za-z]+)_\{?(\d+)\}?")
WORD = re.compile(r"[A-Za-z]{3,}")
PARTS = re.compile(r"(\d[\d.,]*)\s*(?:\\(?:text|mathrm|mbox)\s*\{\s*)?([A-Za-z]{2,})")
UNIT = re.compile(r"(?:[\d.}\s]|\\,)(\\\$|[A-Za-z]+|°[CF]|\^\{?\\circ\}?\s*[CF])[.\s]*(\^\{?\d\}?)?[.\s]*$")
CURRENCY = re.compile(r"^\s*(\\\$|\$(?=\s*\d)|[€£¥₹₩])")
UNITS = {  # name in the answer -> the unit
    other: name
    for name, others in {
        "mm": "mm millimeter millimetre", "cm": "cm centimeter centimetre", "m": "m meter metre",
        "km": "km kilometer kilometre", "in": "in inch inches", "ft": "ft foot feet", "yd": "yd yard", "mi": "mi mile",
        "mg": "mg milligram", "g": "g gram", "kg": "kg kilogram", "lb": "lb lbs pound", "oz": "oz ounce",
        "ml": "ml milliliter millilitre", "l": "l liter litre", "s": "s sec second", "min": "min minute",
        "h": "h hr hour", "day": "day", "week": "week", "month": "month", "year": "year",
        "dollar": r"dollar \$ $ usd", "cent": "cent", "euro": "euro eur €", "pound sterling": "£ gbp",
        "yuan": "yuan rmb cny", "yen": "yen jpy", "rupee": "rupee ₹ inr", "degree": "degree", "radian": "radian rad",
        "°C": "°C", "°F": "°F",
    }.items()
    for other in others.split()
}  # fmt: skip


def prepare(text: str) -> str:
    """Return the text with signs that Math-Verify reads. It drops an upright i, which looks like a unit."""
    return UPRIGHT.sub(r"\1", text.replace(MINUS, "-"))


def last_answer(text: str) -> str:
    r"""Return the part of a text that Math-Verify reads first: the last \boxed, else the last mathematics, else all.

    >>> last_answer(r"We get $x$, so \boxed{\frac{1}{2}}."), last_answer("so $x = 5$.")
    ('\\frac{1}{2}', 'x = 5')
    """
    _, is_boxed, behind = text.rpartition("\\boxed{")
    if is_boxed:
        depth = 1
        for place, character in enumerate(behind):
            depth += (character == "{") - (character == "}")
            if depth == 0:
                return behind[:place]
    parts = MATHEMATICS.findall(text)
    return next(filter(None, parts[-1])) if parts else text


def texts_differ(answer: str, given: str, is_prose: bool) -> bool:
    """Return whether two texts differ in what Math-Verify does not read: dots, dates, words, brackets, bases, units.

    `is_prose`: the given text is a whole response, without marks of mathematics.
    """
    if DOTS.search(answer) or LIST_DOTS.search(given):
        return True
    if not is_prose and any(bool(mark.search(answer)) != bool(mark.search(given)) for mark in OTHER_MEANINGS):
        return True
    if ONLY_AS_TEXT.search(answer) or (not is_prose and ONLY_AS_TEXT.search(given)):
        return True
    counts = [num_items(text) for text in (answer, given)]
    if min(counts) > 1 and counts[0] != counts[1]:
        return True
    words = [without_text_marks(text).strip(" .()") for text in (answer, given)]
    if all(map(WORD.fullmatch, words)):
        return words[0].casefold() != words[1].casefold()
    if all(map(VARIABLE.fullmatch, words)):
        return words[0] != words[1]
    brackets = [outer_brackets(text) for text in (answer, given)]
    if all(brackets) and brackets[0] != brackets[1]:
        return True
    bases = [dict(BASE.findall(text)) for text in (answer, given)]
    if all(bases) and bases[0] != bases[1]:
        return True
    return units_differ(answer, given, is_prose)


def compare_times(answer: str, given: str) -> bool | None:
    """Return whether two times of day are the same; None where the answer is no time. `3:4` is a ratio, `3:04` a time.

    >>> compare_times("9:05", "at 09:05"), compare_times("10:20", "1:2"), compare_times("3:4", "3:4")
    (True, False, None)
    """
    if not (expected := time_of(answer)):
        return None if not time_of(given) or ":" not in answer else False
    return expected == time_of(given)


def time_of(text: str) -> tuple[int, int, int, str] | None:
    plain = without_text_marks(SPACES.sub(" ", text))
    times = list(TIME.finditer(plain))
    if len(times) != 1 or int(times[0][1]) > 24 or re.search(r"\d", TIME.sub("", plain)):
        return None
    hours, minutes, seconds, half = times[0].groups(default="")
    return int(hours), int(minutes), int(seconds or 0), half[:1].lower()


def compact(text: str) -> str:
    text = re.sub(r"(?<=\d)\s+(?=\d)", "|", without_text_marks(text))  # 1 2 is not 12
    text = DOTS.sub("…", SPACES.sub("", text))
    return text.replace("\\left", "").replace("\\right", "").replace(MINUS, "-").strip("$.")


def without_text_marks(text: str) -> str:
    return TEXT_MARKS.sub(r"\1", text)


def outer_brackets(text: str) -> str:
    r"""Return the brackets around a list; '' where there are none.

    >>> outer_brackets(r"\left[1, 2\right)"), outer_brackets("(1,2),(3,4)"), outer_brackets("(x)")
    ('[)', '', '')
    """
    plain = compact(text).replace("\\{", "{").replace("\\}", "}")
    depth = 0
    for place, character in enumerate(plain, start=1):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return plain[0] + plain[-1] if place == len(plain) > 1 and "," in plain else ""
    return ""


def num_items(text: str) -> int:
    r"""Return how many items a list or a set has in its text. Items of `x = \pm 2` count as two; prose is one item.

    >>> num_items("1, 1, 2"), num_items(r"\{(1,2), (3,4)\}"), num_items(r"\pm 2"), num_items("1,234")
    (3, 2, 2, 1)
    """
    plain = compact(text) if outer_brackets(text) == "{}" else without_text_marks(text)
    plain = THOUSANDS.sub("", plain.replace("\\{", "").replace("\\}", ""))
    while BRACKETS.search(plain):
        plain = BRACKETS.sub("", plain)
    if "\n" in text or WORD.search(TEXT_MARKS.sub("", re.sub(r"\\[a-z]+|and|or", "", plain))):
        return 1
    return sum(1 + (("\\pm" in item) or ("\\mp" in item)) for item in BETWEEN_ITEMS.split(plain))


def units_differ(answer: str, given: str, is_prose: bool) -> bool:
    """Return whether known units differ, or the numbers of a quantity in several units: 5 hours 30 minutes."""
    parts = [[(number, unit_called(name)) for number, name in PARTS.findall(text)] for text in (answer, given)]
    if len(parts[0]) > 1 or (len(parts[1]) > 1 and not is_prose):
        return parts[0] != parts[1][-len(parts[0]) :]
    units = [unit_of(text) for text in (answer, given)]
    return all(units) and units[0] != units[1]


def unit_called(name: str) -> str | None:
    return UNITS.get(name) or UNITS.get(name.lower()) or UNITS.get(name.lower().removesuffix("s"))


def unit_of(text: str) -> tuple[str, str] | None:
    r"""Return the unit of a quantity and its power; None for one that is not known.

    >>> unit_of(r"5 \text{ cm}^2"), unit_of(r"\$5"), unit_of("5 apples")
    (('cm', '2'), ('dollar', ''), None)
    """
    if sign := CURRENCY.search(text):
        return UNITS.get(sign[1], sign[1]), ""
    match = UNIT.search(without_text_marks(text))
    if match is None or not re.search(r"\d", text):
        return None
    name = match[1].replace("^", "").replace("{", "").replace("}", "").replace("\\circ", "°").replace(" ", "")
    unit = unit_called(name)
    return (unit, (match[2] or "").strip("^{}")) if unit else None
