"""The table of charts, axes, and charts in SVG, which the report of a job and notebooks show."""

import re
from xml.etree import ElementTree

import pytest

from onbeat.charts.scale import log_scale, scale_of_values
from onbeat.charts.svg import MAX_POINTS, draw_chart, style
from onbeat.charts.table import Chart, Line, chart, lines_of, other_series, table, with_rates

CHART = Chart(id="c", title="Curve")


def ticks(values: list[float], **fields: object) -> list[str]:
    scale = scale_of_values(Chart.model_validate({"id": "c", "title": "c", **fields}), values, 5)
    return [label for _, label in scale.ticks]


# ---- the table ---------------------------------------------------------------------------------------------------


def test_table_names_each_group_chart_and_series_once() -> None:
    groups, charts = [group.id for group in table().groups], [entry.id for entry in table().charts]
    series = [line.series for entry in table().charts for line in entry.lines]
    for names in (groups, charts, series):
        assert len(names) == len(set(names))
    assert {entry.group for entry in table().charts} == set(groups)
    assert len(table().colours) == len(table().dashes)


def test_lines_are_those_with_values_or_of_the_pattern() -> None:
    curves = with_rates(
        {
            "eval/reward_mean": [(0, 0.5)],
            "eval/hard/reward_mean": [(0, 0.25), (4, 0.75)],
            "eval/easy/reward_mean": [(0, 1.0)],
            "iteration/reward_mean": [(0, 0.5), (1, 0.75)],
            "iteration/reward_std": [(0, 0.75)],
            "iteration/prompt_tokens": [(0, 30), (1, 30)],
            "iteration/response_tokens": [(0, 10)],
            "iteration/wall_s": [(0, 2.0), (1, 2.0)],
            "train/kl": [(0, float("nan"))],
            "iteration/staleness_max": [(0, 0.0)],
            "train/odd": [(0, 1.0)],
        }
    )
    assert [line.name for line in lines_of(chart("held-out"), curves)] == ["easy", "hard"]
    (reward,) = lines_of(chart("reward"), curves)
    assert reward.band == [(0, 0.0, 1.0)]  # a share stays between 0 and 1
    assert [line.points for line in lines_of(chart("throughput"), curves)] == [[(0, 20.0)]]
    assert lines_of(chart("kl"), curves) == lines_of(chart("staleness"), curves) == []
    assert set(other_series(curves)) >= {"train/odd", "iteration/prompt_tokens"}
    assert "iteration/reward_std" not in set(other_series(curves))


def test_scores_that_a_named_set_repeats_make_one_line() -> None:
    """The first of two sets has its scores with and without its name, and the other only with it."""
    easy = {"reward_mean": [(0, 0.5)], "reward/a_mean": [(0, 0.25)], "response_tokens_mean": [(0, 8.0)]}
    curves = {f"{prefix}{name}": points for prefix in ("eval/", "eval/easy/") for name, points in easy.items()}
    curves |= {"eval/hard/reward_mean": [(0, 0.125)], "eval/hard/reward/a_mean": [(0, 0.75)]}
    assert [line.name for line in lines_of(chart("held-out"), curves)] == ["easy", "hard"]
    assert [line.name for line in lines_of(chart("held-out-parts"), curves)] == ["easy/a", "hard/a"]
    assert list(other_series(curves)) == ["eval/easy/response_tokens_mean"]


# ---- axes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "fields", "labels"),
    [
        pytest.param([0.0, 1.0], {}, ["0", "0.5", "1.0"], id="values with space around them"),
        pytest.param([3.0], {}, ["2", "3", "4"], id="a single value"),
        pytest.param([0.0], {"isPercent": True, "domain": [0, 0.1]}, ["0%", "5%", "10%"], id="a domain"),
        pytest.param([-2e-6, 0.0], {}, ["-2e-6", "-1.5e-6", "-1e-6", "-5e-7", "0"], id="tiny values"),
        pytest.param([0.0, 30_000.0], {}, ["0", "10K", "20K", "30K"], id="large values"),
        pytest.param([0.01, 1.0], {"isLog": True}, ["0.01", "0.1", "1"], id="a logarithmic axis"),
        pytest.param([0.0, 1.0], {"isLog": True}, ["0", "0.5", "1.0"], id="no logarithm of 0"),
    ],
)
def test_ticks(values: list[float], fields: dict[str, object], labels: list[str]) -> None:
    assert ticks(values, **fields) == labels


def test_logarithmic_axis_within_a_power_of_ten_has_ticks() -> None:
    assert [label for _, label in log_scale(0.011, 0.06, 5).ticks] == ["0.01", "0.02", "0.05"]


# ---- drawings ----------------------------------------------------------------------------------------------------


def test_line_goes_from_its_first_to_its_last_place() -> None:
    drawn = draw_chart(CHART, [Line("mean", [(0, 0.0), (2, 1.0), (4, 0.5)])], height=100, end=8)
    places = re.search(r'polyline points="([^"]+)"', drawn)
    assert places is not None
    assert [place.split(",")[0] for place in places[1].split()] == ["0.0", "250.0", "500.0"]  # the job goes on to 8
    assert ">8</text>" in drawn
    assert "mean 0 → 0.5" in drawn


def test_band_is_an_area_and_one_value_a_dot() -> None:
    line = Line("mean", [(0, 0.5), (1, 0.5)], [(0, 0.25, 0.75), (1, 0.0, 1.0)])
    assert draw_chart(CHART, [line]).count("polygon") == 1
    dot = draw_chart(CHART, [Line("mean", [(3, 0.5)])])
    assert ("polyline" in dot, dot.count("<circle")) == (False, 1)


def test_long_line_is_drawn_with_means_of_its_points() -> None:
    drawn = draw_chart(CHART, [Line("mean", [(x, float(x)) for x in range(10 * MAX_POINTS)])])
    places = re.search(r'polyline points="([^"]+)"', drawn)
    assert places is not None
    assert len(places[1].split()) == MAX_POINTS
    assert "each point is the mean of 10" in drawn


def test_lines_differ_in_colour_and_dash() -> None:
    drawn = draw_chart(CHART, [Line(f"line {index}", [(0, 1.0), (1, float(index))]) for index in range(3)])
    assert [drawn.count(f"--series-{number}") for number in (1, 2, 3, 4)] == [2, 2, 2, 0]  # swatch and line
    assert drawn.count('stroke-dasharray="6, 3"') == drawn.count('stroke-dasharray="2, 3"') == 2


def test_hostile_name_of_a_series_is_text() -> None:
    hostile = "\"><script>alert('x')</script>"
    drawn = draw_chart(Chart(id="c", title=hostile, unit=hostile), [Line(hostile, [(0, 1.0), (1, 2.0)])])
    assert "<script" not in drawn
    ElementTree.fromstring(drawn)  # it is well formed


def test_style_has_both_themes_and_every_colour() -> None:
    light, dark = style().split("@media screen and (prefers-color-scheme:dark)")
    for number, colour in enumerate(table().colours, 1):
        assert f"--series-{number}:{colour.light};" in light
        assert f"--series-{number}:{colour.dark};" in dark
