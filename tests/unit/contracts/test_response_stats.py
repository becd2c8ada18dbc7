"""Statistics of scored responses: worked by hand, added up over replicas, and always bounded."""

import pytest

from onbeat.contracts.response_stats import MAX_PARTS, ResponseStats, more_parts
from onbeat.streams.codec import Response


def respond(reward: float, num_tokens: int = 3, **parts: float) -> Response:
    return Response(token_ids=range(num_tokens), reward=reward, reward_parts=parts)


def stats_of(*groups: list[Response], solved_at: float = 1.0) -> ResponseStats:
    stats = ResponseStats(solved_at=solved_at)
    for group in groups:
        stats.add(group)
    return stats


GROUPS = [
    [respond(1.0, 1, right=1.0, short=0.0), respond(1.0, 2, right=1.0, short=1.0)],
    [respond(0.1, 3, right=0.0, short=1.0), respond(0.0, 20)],
    [respond(1.0, 4), respond(0.1, 5)],
    [],  # it failed
]


def test_shape_and_parts_worked_by_hand() -> None:
    stats = stats_of(*GROUPS)
    assert stats.shape() == {
        "response_tokens_min": 1,
        "response_tokens_p95": 20,
        "response_tokens_max": 20,
        "solved_all_frac": pytest.approx(1 / 3),
        "solved_none_frac": pytest.approx(1 / 3),
    }
    assert stats.part_scores(["right", "short", "gone"]) == {  # over the three responses that have them
        "reward/right_mean": pytest.approx(2 / 3),
        "reward/right_std": pytest.approx((2 / 9) ** 0.5),
        "reward/short_mean": pytest.approx(2 / 3),
        "reward/short_std": pytest.approx((2 / 9) ** 0.5),
    }
    assert (ResponseStats().shape(), ResponseStats().part_scores(["right"])) == ({}, {})


def test_solved_is_what_reaches_the_threshold() -> None:
    assert stats_of(*GROUPS, solved_at=0.05).num_solved_none == 0
    assert stats_of(*GROUPS, solved_at=2.0).num_solved_none == 3
    assert stats_of([respond(0.7 + 0.2 + 0.1)]).num_solved_all == 1  # 0.9999999999999999


def test_replicas_add_up_to_the_whole() -> None:
    whole, total = stats_of(*GROUPS), ResponseStats()
    for groups in (GROUPS[:1], GROUPS[1:]):
        total.merge(ResponseStats.model_validate_json(stats_of(*groups).model_dump_json()))
    assert total == whole


def test_a_reward_that_invents_names_has_few_curves() -> None:
    known: list[str] = []
    for iteration in range(50):
        stats = stats_of([respond(0.0, **{f"part-{iteration}-{i}": 1.0 for i in range(1000)})])
        known = more_parts(known, stats.parts)
    assert len(known) == MAX_PARTS
    assert all(name.startswith("part-0-") for name in known)
    assert more_parts(["z"], ["a", "z"]) == ["z", "a"]  # a known part keeps its place


def test_parts_without_a_finite_value_count_for_nothing() -> None:
    stats = stats_of([respond(1.0, odd=float("nan")), respond(1.0, odd=float("inf")), respond(1.0, odd=2.0)])
    assert stats.part_scores(["odd"]) == {"reward/odd_mean": 2.0, "reward/odd_std": 0.0}


def test_responses_without_a_reward_count_for_nothing_but_length() -> None:
    abstained = Response(token_ids=range(9), has_no_reward=True, reward_parts={"form": 1.0})
    stats = stats_of([respond(1.0, right=1.0), abstained], [abstained])
    assert (stats.num_groups, stats.num_solved_all, stats.num_solved_none) == (1, 1, 0)
    assert (stats.shape()["response_tokens_max"], list(stats.parts)) == (9, ["right"])
    assert set(stats_of([abstained]).shape()) == {"response_tokens_min", "response_tokens_p95", "response_tokens_max"}


def test_groups_that_a_part_judges_in_part_are_counted() -> None:
    judged, unjudged = respond(1.0, right=1.0, form=1.0), respond(1.0, right=1.0)
    abstained = Response(token_ids=[1], has_no_reward=True)
    groups = [[judged, unjudged], [judged, judged, abstained], [unjudged, unjudged], [judged, unjudged]]
    total = ResponseStats(summed_parts=["right", "form"])
    for group in groups:
        stats = ResponseStats(summed_parts=["right", "form"])
        stats.add(group)
        total.merge(ResponseStats.model_validate_json(stats.model_dump_json()))
    assert total.mixed_scores() == {"reward/form_mixed_groups": 2}
    assert stats_of(*groups).mixed_scores() == {}  # parts that are no rewards of the sum may come and go
