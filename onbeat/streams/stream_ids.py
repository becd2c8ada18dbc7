"""The ids of entries of Redis streams: `MILLISECONDS-NUMBER`, by the Redis clock. `-` comes before all entries."""

LARGEST_NUMBER = 2**64 - 1


def order(entry: str) -> tuple[int, int]:
    """Return an id's milliseconds and number, to sort by.

    >>> sorted(["10-0", "9-10", "9-9", "-", "9"], key=order)
    ['-', '9', '9-9', '9-10', '10-0']
    """
    milliseconds, _, number = entry.partition("-")
    return int(milliseconds or 0), int(number or 0)


def id_before(entry: str) -> str:
    """Return the largest id below this one.

    >>> id_before("5-1"), id_before("5-0")
    ('5-0', '4-18446744073709551615')
    """
    milliseconds, number = order(entry)
    return f"{milliseconds}-{number - 1}" if number else f"{milliseconds - 1}-{LARGEST_NUMBER}"


def time_of(entry: str) -> float:
    """Return when the entry was added, in Unix seconds.

    >>> time_of("1500-3")
    1.5
    """
    return order(entry)[0] / 1000
