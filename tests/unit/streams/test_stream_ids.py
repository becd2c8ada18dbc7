"""Ids of entries of Redis streams: their order, their time, and the id before one."""

import pytest

from onbeat.streams.stream_ids import id_before, order, time_of


def test_ids_are_sorted_by_number_not_by_text() -> None:
    assert sorted(["10-0", "9-10", "9-9", "-", "9"], key=order) == ["-", "9", "9-9", "9-10", "10-0"]


@pytest.mark.parametrize(("entry", "before"), [("5-1", "5-0"), ("5-0", "4-18446744073709551615")])
def test_id_before_is_the_largest_smaller_one(entry: str, before: str) -> None:
    assert id_before(entry) == before


def test_time_of_an_entry_is_in_seconds() -> None:
    assert time_of("1500-3") == 1.5
