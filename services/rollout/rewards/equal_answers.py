"""A check in front of Math-Verify: it finds answers that differ although Math-Verify calls them equal.

Math-Verify rounds numbers to six digits behind the point, reads a fragment where it cannot read the whole, and forgets
units, bases and dots. docs/rewards.md has the table of what counts as equal; a change of it raises ANSWER_RULES.
"""

import math
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from itertools import zip_longest
from typing import Any

import sympy
from math_verify.errors import TimeoutException
from math_verify.utils import timeout
from sympy.core.relational import Relational

MAX_DIGITS = 20_000  # of a number that is computed
MAX_TERMS = 10_000  # of a sum or product
MIN_SIGNIFICANT = 6  # digits of a decimal number that stands for the number which it is rounded from
TOLERANCE = sympy.Float("1e-12")  # relative, of exact numbers and of expressions at a point
NUM_POINTS = 3
CHECK_S = 5

MINUS = "\u2212"
MATHEMATICS = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$((?:\\\$|[^$\n])+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
TOO_LARGE = re.compile(r"\\[dt]?binom\s*\{[^{}]*(?:\d{5}|\^)")  # computed while it is read
UPRIGHT = re.compile(r"\\(?:mathrm|text|textrm)\s*\{\s*([ie])\s*\}")
DOTS = re.compile(r"\\[lc]?dots\w*|\.\.\.+|…|⋯")
OTHER_MEANING = re.compile(r"\\(?:to|mapsto|not|equiv|pmod|bmod)\b")
LIST_DOTS = re.compile(rf"[,+]\s*({DOTS.pattern})[^\n]*$")
BETWEEN_ITEMS = re.compile(r"[,;]|\b(?:and|or)\b")
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))|\{,\}")
BRACKETS = re.compile(r"[\[({][^\[({})\]]*[\])}]")
TIME = re.compile(r"(\d{1,2}):([0-5]\d)(?::([0-5]\d))?\s*([ap]\.?\s*m\.?)?", re.IGNORECASE)
TEXT_MARKS = re.compile(r"\\(?:text|textrm|textbf|mathrm|mbox|operatorname)\s*\{([^{}]*)\}")
SPACES = re.compile(r"\\[,;:! ]|\\q?quad\b|~|\s")
BASE = re.compile(r"([0-9A-Za-z]+)_\{?(\d+)\}?")
WORD = re.compile(r"[A-Za-z]{3,}")
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


def is_equal(
    answer: str, expected: list[Any], response: str, parse: Callable[[str], list[Any]], verify: Callable[..., bool]
) -> bool:
    """Return whether the response has the answer.

    `expected`: what Math-Verify reads in the answer, an expression and its text. `parse` and `verify`: its own, which
    come last: large powers must not be computed.
    """
    own, shown = last_answer(answer), last_answer(response)
    if compact(own) == compact(shown):
        return True
    if (is_same_time := compare_times(own, shown)) is not None:
        return is_same_time
    if texts_differ(own, shown) or TOO_LARGE.search(shown) or TOO_LARGE.search(own):
        return False
    given = parse(response)
    if any(is_too_large(value) for value in (*expected, *given) if isinstance(value, sympy.Basic)):
        return False
    if not given or not verify(expected, given):
        return False
    if isinstance(expected[0], str) or isinstance(given[0], str):  # as texts, which are equal
        return True
    try:
        return not timeout(timeout_seconds=CHECK_S)(values_differ)(expected[0], given[0])
    except TimeoutException:
        return False


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


def texts_differ(answer: str, given: str) -> bool:
    """Return whether two texts differ in what Math-Verify does not read: dots, times, words, braces, bases, units."""
    if bool(OTHER_MEANING.search(answer)) != bool(OTHER_MEANING.search(given)):
        return True
    if DOTS.search(answer) or LIST_DOTS.search(given):
        return True
    counts = [num_items(text) for text in (answer, given)]
    if min(counts) > 1 and counts[0] != counts[1]:
        return True
    words = [without_text_marks(text).strip(" .()") for text in (answer, given)]
    if all(map(WORD.fullmatch, words)):
        return words[0].casefold() != words[1].casefold()
    if (is_tuple(answer) and is_braced(given)) or (is_braced(answer) and is_tuple(given)):
        return True
    bases = [dict(BASE.findall(text)) for text in (answer, given)]
    if all(bases) and bases[0] != bases[1]:
        return True
    units = [unit_of(text) for text in (answer, given)]
    return all(units) and units[0] != units[1]


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
    text = DOTS.sub("…", SPACES.sub("", without_text_marks(text)))
    return text.replace("\\left", "").replace("\\right", "").replace(MINUS, "-").strip("$.")


def without_text_marks(text: str) -> str:
    return TEXT_MARKS.sub(r"\1", text)


def is_braced(text: str) -> bool:
    return compact(text).startswith("\\{")


def is_tuple(text: str) -> bool:
    return bool(re.fullmatch(r"\([^()]*,.*\)", compact(text)))


def num_items(text: str) -> int:
    r"""Return how many items a list or a set has in its text. Items of `x = \pm 2` count as two; prose is one item.

    >>> num_items("1, 1, 2"), num_items(r"\{(1,2), (3,4)\}"), num_items(r"\pm 2"), num_items("1,234")
    (3, 2, 2, 1)
    """
    plain = compact(text) if is_braced(text) else without_text_marks(text)
    plain = THOUSANDS.sub("", plain.replace("\\{", "").replace("\\}", ""))
    while BRACKETS.search(plain):
        plain = BRACKETS.sub("", plain)
    if "\n" in text or WORD.search(TEXT_MARKS.sub("", re.sub(r"\\[a-z]+|and|or", "", plain))):
        return 1
    return sum(1 + (("\\pm" in item) or ("\\mp" in item)) for item in BETWEEN_ITEMS.split(plain))


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
    unit = UNITS.get(name) or UNITS.get(name.lower()) or UNITS.get(name.lower().removesuffix("s"))
    return (unit, (match[2] or "").strip("^{}")) if unit else None


def is_too_large(expression: Any) -> bool:
    """Return whether a number in an expression that is not evaluated yet has too many digits to be computed."""
    return any(num_digits(part) > MAX_DIGITS for part in sympy.preorder_traversal(expression) if is_costly(part))


def is_costly(part: Any) -> bool:
    kinds = (sympy.Pow, sympy.factorial, sympy.factorial2, sympy.binomial, sympy.Sum, sympy.Product)
    return isinstance(part, kinds) or type(part).__name__ in ("subfactorial", "RisingFactorial", "FallingFactorial")


def num_digits(number: Any) -> float:
    """Return an upper bound of the digits of a number that is not evaluated yet, in numerator and denominator."""
    if isinstance(number, sympy.Integer | sympy.Rational | sympy.Float):
        return abs(math.log10(abs(number.p) + 1) + math.log10(getattr(number, "q", 1))) if number.is_Rational else 15.0
    parts = [num_digits(part) for part in number.args if isinstance(part, sympy.Basic)]
    if isinstance(number, sympy.Sum | sympy.Product):
        bounds = [bound for _, *ends in number.limits for bound in ends]
        return math.inf if any(size_of(bound) > MAX_TERMS for bound in bounds if bound.is_number) else sum(parts)
    if isinstance(number, sympy.Pow):
        return parts[0] * max(1.0, size_of(number.exp)) if number.base.is_number else parts[1]
    if is_costly(number):
        largest = max((size_of(part) for part in number.args), default=0.0)
        return largest * math.log10(largest + 1)
    return sum(parts)


def size_of(number: Any) -> float:
    """Return the absolute value of a number that is not evaluated yet; infinity where that is too large, 0 for none."""
    if not number.is_number or number.is_infinite:
        return 0.0
    if num_digits(number) > math.log10(MAX_DIGITS) + 12:
        return math.inf
    try:
        return float(abs(sympy.N(number)))
    except (TypeError, ValueError, OverflowError):
        return 0.0


def values_differ(expected: Any, given: Any) -> bool:
    """Return whether two parsed answers differ: as numbers, at some points, or in one of their parts."""
    if expected == given:
        return False
    expected, given = without_name(expected, given), without_name(given, expected)
    if expected is None or given is None:
        return True
    pair = (expected, given)
    if all(isinstance(each, sympy.MatrixBase) for each in pair):
        return expected.shape != given.shape or any(map(values_differ, expected.flat(), given.flat()))
    if all(isinstance(each, sympy.FiniteSet) for each in pair):
        return items_differ(items_of(expected), items_of(given))
    if all(isinstance(each, sympy.Tuple) for each in pair):
        return len(expected) != len(given) or any(map(values_differ, expected, given))
    if all(isinstance(each, sympy.Interval) for each in pair):
        ends = [(one.start, one.end, one.left_open, one.right_open) for one in pair]
        return ends[0][2:] != ends[1][2:] or any(map(values_differ, ends[0][:2], ends[1][:2]))
    if all(isinstance(each, sympy.Eq) for each in pair):
        return equations_differ(expected, given)
    if all(isinstance(each, Relational) for each in pair) and expected.lhs == given.lhs:
        return values_differ(expected.rhs, given.rhs)
    if all(isinstance(each, sympy.Expr) and not isinstance(each, sympy.Symbol) for each in pair):
        return expressions_differ(expected, given)
    return False


def without_name(one: Any, other: Any) -> Any:
    """Return the value of `name = value` beside something that is no equation; None for another equation.

    A name has no numbers in it: x, f(x), m + n. A number that equals the value is fine, too: 1 + 2 = 3.
    """
    equations = list(equations_of(one))
    if not equations or any(True for _ in equations_of(other)):
        return one
    left, value = equations[0].lhs, equations[-1].rhs
    if left.free_symbols or left.atoms(sympy.Function):
        numbers = {abs(number) for number in left.atoms(sympy.Number)}
        return value if numbers <= {1} else None
    return value if not expressions_differ(left, value) else None


def equations_of(value: Any) -> Iterator[sympy.Eq]:
    if isinstance(value, sympy.Eq):
        yield value
    elif isinstance(value, sympy.And):
        parts = getattr(value, "_unsorted_args", value.args)
        if all(isinstance(part, sympy.Eq) for part in parts):
            yield from parts


def items_of(items: Any) -> list[Any]:
    """Return the items as they were written; sympy's own sets forget those that are written twice."""
    return list(getattr(items, "_unsorted_args", items.args))


def items_differ(expected: list[Any], given: list[Any]) -> bool:
    """Return whether the items cannot be paired, in any order."""
    rest = list(given)
    for item in expected:
        partner = next((place for place, other in enumerate(rest) if not values_differ(item, other)), None)
        if partner is None:
            return True
        del rest[partner]
    return bool(rest)


def equations_differ(expected: sympy.Eq, given: sympy.Eq) -> bool:
    """Return whether the solutions of one equation do not solve the other: those for its last symbol, where the others
    have some values."""
    if values_of(expected.lhs - expected.rhs) and expected.lhs == given.lhs:
        return values_differ(expected.rhs, given.rhs)
    symbols = sorted(expected.free_symbols | given.free_symbols, key=str)
    if not symbols:
        return expressions_differ(expected.lhs - expected.rhs, given.lhs - given.rhs)
    plain = {symbol: sympy.Symbol(f"x{number}") for number, symbol in enumerate(symbols)}
    point = {plain[symbol]: value for symbol, value in zip(symbols[:-1], point_of(1), strict=False)}
    one, other = ((each.lhs - each.rhs).subs(plain).subs(point) for each in (expected, given))
    solutions = [sympy.solve(side, plain[symbols[-1]]) for side in (one, other)]
    return items_differ(*solutions)


def expressions_differ(expected: Any, given: Any) -> bool:
    """Return whether two expressions have other values at some point. What cannot be computed does not differ."""
    if all(isinstance(each, sympy.Float | sympy.Rational) for each in (expected, given)):
        return numbers_differ(expected, given)
    if any(isinstance(each, sympy.Float) for each in (expected, given)) and not (
        expected.free_symbols | given.free_symbols
    ):
        return numbers_differ(expected, given)
    if is_percent(expected) != is_percent(given):  # the sign may be left out
        return all(expressions_differ(*pair) for pair in percent_readings(expected, given))
    for one, other in zip_longest(values_of(expected, given), values_of(given, expected)):
        if one is not None and other is not None and is_apart(one, other):
            return True
    return False


def is_apart(one: Any, other: Any) -> bool:
    return bool(abs(one - other) > TOLERANCE * max(abs(one), abs(other)))


def is_percent(value: Any) -> bool:
    return isinstance(value, sympy.Mul) and any(isinstance(part, sympy.UnevaluatedExpr) for part in value.args)


def percent_readings(expected: Any, given: Any) -> list[tuple[Any, Any]]:
    """Return both readings of a pair of which one has a percent sign: 50% is 0.5, and 50."""

    def number_of(value: Any) -> Any:
        return value.args[0] if is_percent(value) else value

    return [(expected.doit(), given.doit()), (number_of(expected).doit(), number_of(given).doit())]


def numbers_differ(expected: Any, given: Any) -> bool:
    """Return whether two numbers differ, of which one is decimal: the shorter one has to be the other one, rounded, and
    has six significant digits; else both have to be equal."""
    shorter, longer = sorted((expected, given), key=lambda number: (not number.is_Float, decimal_places(number)))
    exact = [sympy.Rational(str(number)) if number.is_Float else number.doit() for number in (shorter, longer)]
    distance = sympy.N(abs(exact[0] - exact[1]), 40)
    if not distance.is_comparable:
        return False
    if distance <= TOLERANCE * sympy.N(abs(exact[0])) and not all(number.is_Rational for number in exact):
        return False
    if distance == 0:
        return False
    num_significant = len(Decimal(str(shorter)).normalize().as_tuple().digits) if shorter.is_Float else 0
    return num_significant < MIN_SIGNIFICANT or bool(
        distance > sympy.Rational(1, 2) * sympy.Rational(10) ** -decimal_places(shorter)
    )


def decimal_places(number: Any) -> int:
    return -int(Decimal(str(number)).normalize().as_tuple().exponent) if number.is_Float else 0


def values_of(expression: Any, other: Any = sympy.S.Zero) -> list[Any]:
    """Return the expression's values at some points; of a number only one. None: it has none there."""
    names = sorted({symbol.name for symbol in expression.free_symbols | other.free_symbols})
    values = []
    for number in range(NUM_POINTS if names else 1):
        point = dict(zip(names, point_of(number), strict=False))
        try:
            placed = expression.subs({symbol: point[symbol.name] for symbol in expression.free_symbols}).doit()
            value = sympy.N(placed, 30)
        except (TypeError, ValueError, AttributeError, KeyError, ArithmeticError):
            value = None
        values.append(value if value is not None and value.is_number and value.is_finite else None)
    return values


def point_of(number: int) -> list[sympy.Rational]:
    """Return values for up to 30 symbols, without any pattern between them."""
    return [sympy.Rational(1009 + 7 * number + 101 * place**2, 811 + 13 * place + number) for place in range(30)]
