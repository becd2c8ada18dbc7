"""Ranges and ticks of axes, and numbers in words: the same as the dashboard's, charts.js and format.js there."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from onbeat.charts.table import Chart

MARGIN = 0.06  # space above and below the values, as a share of their range
MAX_EXPONENT_POWER = -3  # numbers below 1e-3 have an exponent


@dataclass(frozen=True)
class Scale:
    """A scale of an axis, from `low` to `high` (of a logarithmic one: their powers of ten), and ticks with labels."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]  # (value, label)
    is_log: bool = False

    def place(self, value: float) -> float:
        """Return the share of the axis that lies below the value.

        >>> Scale(0, 4, []).place(1), Scale(-2, 2, [], is_log=True).place(10)
        (0.25, 0.75)
        """
        return ((math.log10(value) if self.is_log else value) - self.low) / (self.high - self.low)


def scale_of_values(chart: Chart, values: Sequence[float], most_ticks: int) -> Scale:
    """Return the y axis of a chart: the values with some space around them, and at least the chart's domain."""
    if chart.is_log and min(values) > 0:
        return log_scale(min(values), max(values), most_ticks)
    least, most = chart.domain or (values[0], values[0])
    low, high = min(*values, least), max(*values, most)
    around = abs(low) / 2 or 0.5 if low == high else (high - low) * MARGIN
    bottom = max(0.0, low - around) if low >= 0 else low - around  # values that are never below 0 have no axis there
    top = high + around
    step = round_step((top - bottom) / most_ticks)
    if len(multiples(bottom, top, step)) < 2:  # one tick shows no scale
        step = round_step((top - bottom) / (2 * most_ticks))
    ticks = [(value, tick_label(value, step, chart.is_percent)) for value in multiples(bottom, top, step)]
    return Scale(bottom, top, ticks)


def log_scale(least: float, most: float, most_ticks: int) -> Scale:
    low, high = math.log10(least), math.log10(most)
    around = (high - low) * MARGIN or 0.1
    low, high = low - around, high + around
    powers = range(math.floor(low), math.ceil(high) + 1)
    candidates = [10.0**power * factor for power in powers for factor in (1, 2, 5)]
    inside = [value for value in candidates if low <= math.log10(value) <= high]
    decades = [value for value in inside if math.log10(value).is_integer()]
    values = decades if len(decades) > 1 else inside
    every = -(-len(values) // most_ticks) or 1
    return Scale(low, high, [(value, number(value, 1)) for value in values[::every]], is_log=True)


def scale_of_iterations(first: int, last: int, most_ticks: int) -> Scale:
    """Return the x axis; one of a single iteration has it in the middle.

    >>> scale_of_iterations(0, 25, 6).ticks
    [(0.0, '0'), (5.0, '5'), (10.0, '10'), (15.0, '15'), (20.0, '20'), (25.0, '25')]
    """
    step = max(1, round_step((last - first) / most_ticks)) if last > first else 1
    ticks = [(value, number(value)) for value in multiples(first, last, step)]
    return Scale(first - 0.5, last + 0.5, ticks) if first == last else Scale(first, last, ticks)


def round_step(least: float) -> float:
    """Return 1, 2 or 5 times a power of ten, `least` or more.

    >>> round_step(0.03), round_step(3), round_step(7)
    (0.05, 5.0, 10.0)
    """
    power = math.floor(math.log10(least))
    for exponent in (power, power + 1):
        for factor in (1, 2, 5):
            step = factor * 10.0**exponent if exponent >= 0 else factor / 10.0**-exponent
            if step >= least * (1 - 1e-9):
                return step
    raise AssertionError(least)


def multiples(low: float, high: float, step: float) -> list[float]:
    """Return the multiples of a step from `low` to `high`.

    >>> multiples(0.05, 0.31, 0.1)
    [0.1, 0.2, 0.3]
    """
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    digits = digits_of(step)
    return [round(index * step, digits) for index in range(first, last + 1)]


def digits_of(step: float) -> int:
    """Return the digits behind the point that tell multiples of a step apart."""
    return min(12, max(0, math.ceil(-math.log10(step) - 1e-9)))


def tick_label(value: float, step: float, is_percent: bool) -> str:
    if is_percent:
        return f"{100 * value:.{digits_of(100 * step)}f}%"
    if value == 0:
        return "0"
    if abs(value) >= 10_000 and step >= 10:
        return compact(value)
    return number(value) if abs(value) < 1e-4 else f"{value:.{digits_of(step)}f}"


def compact(value: float) -> str:
    """Shorten a large number.

    >>> compact(12_500), compact(3_000_000)
    ('12.5K', '3M')
    """
    for size, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= size:
            return f"{value / size:.4g}{name}"
    return f"{value:.4g}"


def number(value: float, digits: int = 3) -> str:
    """Format a number with so many significant digits.

    >>> [number(value) for value in (0.12345, 12_345.6, 2e-6, 25, 0.7)]
    ['0.123', '12,346', '2e-6', '25', '0.7']
    """
    if value == int(value) or abs(value) >= 10**digits:
        return f"{value:,.0f}"
    if abs(value) < 10**MAX_EXPONENT_POWER:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}"
    return f"{value:.{digits}g}"


def in_words(chart: Chart, value: float) -> str:
    """Format a value of a chart, without the unit."""
    return f"{100 * value:.{1 if 0 < value < 0.1 else 0}f}%" if chart.is_percent else number(value)
