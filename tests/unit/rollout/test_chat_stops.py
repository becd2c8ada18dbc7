"""Stop strings: what is shown does not depend on where the pieces of a text begin and end."""

import random

from services.rollout.engines.stops import StopFilter


def shown(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    text = StopFilter(stops)
    parts = [text.push(piece) for piece in pieces]
    return "".join(parts) + text.rest(), text.is_hit


def test_text_ends_before_first_complete_stop_wherever_cut() -> None:
    rng = random.Random(0)
    num_hits = 0
    for _ in range(3000):
        text = "".join(rng.choices("ab", k=rng.randint(0, 12)))
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(rng.randint(0, 3))]
        cuts = sorted(rng.choices(range(len(text) + 1), k=3))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        expected = by_characters(text, stops)
        assert shown(pieces, stops) == expected, (pieces, stops)
        num_hits += expected[1]
    assert 1000 < num_hits < 2900


def by_characters(text: str, stops: list[str]) -> tuple[str, bool]:
    """Apply the definition: the shortest beginning that ends with a stop is cut before the longest such one."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


def test_nothing_is_held_back_that_cannot_become_a_stop() -> None:
    text = StopFilter(["\nUser:", "END"])
    assert [text.push(piece) for piece in ("Hello", " EN", "O\n", "\nUse", "d")] == [
        "Hello",
        " ",
        "ENO",
        "\n",
        "\nUsed",
    ]
    assert text.rest() == ""
