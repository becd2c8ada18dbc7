"""A check in front of Math-Verify: it finds answers that differ although Math-Verify calls them equal.

Math-Verify rounds numbers to six digits behind the point, reads a fragment where it cannot read the whole, and forgets
units, bases and dots. docs/rewards.md has the table of what counts as equal; a change of it raises ANSWER_RULES.
"""

import math
from collections.abc import Callable, Iterator
from decimal import Decimal
from itertools import zip_longest
from typing import Any

import sympy
from math_verify.errors import TimeoutException
from math_verify.utils import timeout
from sympy.core.relational import Relational

from services.rollout.rewards.answer_texts import TOO_LARGE, compact, compare_times, last_answer, texts_differ

MAX_DIGITS = 20_000  # digits of a number that is computed
MAX_TERMS = 10_000  # terms of a sum or product
MIN_SIGNIFICANT = 6  # digits of a decimal number that stands for the number which it is rounded from
TOLERANCE = sympy.Float("1e-12")  # relative, of exact numbers and of expressions at a point
NUM_POINTS = 3
CHECK_S = 5


def is_equal(
    answer: str, expected: list[Any], response: str, parse: Callable[[str], list[Any]], verify: Callable[..., bool]
) -> bool:
    """Return whether the response has the answer.

    `expected`: what Math-Verify reads in the answer, an expression and its text. `parse` and `verify`: its own, which
    come last: large powers must not be computed.
    """
    right, shown = last_answer(answer), last_answer(response)
    if compact(right) == compact(shown):
        return True
    if (is_same_time := compare_times(right, shown)) is not None:
        return is_same_time
    if texts_differ(right, shown, is_prose=shown == response) or TOO_LARGE.search(shown) or TOO_LARGE.search(right):
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
    if all(isinstance(side, sympy.MatrixBase) for side in pair):
        return expected.shape != given.shape or any(map(values_differ, expected.flat(), given.flat()))
    if all(isinstance(side, sympy.FiniteSet) for side in pair):
        return items_differ(items_of(expected), items_of(given))
    if all(isinstance(side, sympy.Tuple) for side in pair):
        return len(expected) != len(given) or any(map(values_differ, expected, given))
    if all(isinstance(side, sympy.Interval) for side in pair):
        ends = [(one.start, one.end, one.left_open, one.right_open) for one in pair]
        return ends[0][2:] != ends[1][2:] or any(map(values_differ, ends[0][:2], ends[1][:2]))
    if all(isinstance(side, sympy.Eq) for side in pair):
        return equations_differ(expected, given)
    if all(isinstance(side, Relational) for side in pair) and expected.lhs == given.lhs:
        return values_differ(expected.rhs, given.rhs)
    if all(isinstance(side, sympy.Expr) and not isinstance(side, sympy.Symbol) for side in pair):
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
    one, other = ((side.lhs - side.rhs).subs(plain).subs(point) for side in (expected, given))
    solutions = [sympy.solve(side, plain[symbols[-1]]) for side in (one, other)]
    return items_differ(*solutions)


def expressions_differ(expected: Any, given: Any) -> bool:
    """Return whether two expressions have other values at some point. What cannot be computed does not differ."""
    if all(isinstance(side, sympy.Float | sympy.Rational) for side in (expected, given)):
        return numbers_differ(expected, given)
    if any(isinstance(side, sympy.Float) for side in (expected, given)) and not (
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
