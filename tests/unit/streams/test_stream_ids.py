"""Ids of entries of Redis streams: their order and their time. The docstring of `id_before` tests the id before one."""

from onbeat.streams.stream_ids import order, time_of


def test_ids_are_sorted_by_number_not_by_text() -> None:
    assert sorted(["10-0", "9-10", "9-9", "-", "9"], key=order) == ["-", "9", "9-9", "9-10", "10-0"]


def test_time_of_an_entry_is_in_seconds() -> None:
    assert time_of("1500-3") == 1.5
