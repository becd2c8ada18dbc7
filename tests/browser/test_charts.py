"""The arithmetic of charts, timelines and samples, run in a browser, and charts as they are drawn. No broker."""

import itertools
import json
import math
import random
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, Route, expect

from onbeat.config import JobConfig

DASHBOARD = Path(__file__).parents[2] / "services" / "broker" / "dashboard"
ORIGIN = "http://dashboard.test"
TYPES = {".js": "text/javascript", ".css": "text/css"}
PAGE = '<!doctype html><link rel="stylesheet" href="style.css"><link rel="stylesheet" href="job.css"><main></main>'


async def serve(route: Route) -> None:
    name = route.request.url.removeprefix(f"{ORIGIN}/")
    if not name:
        await route.fulfill(body=PAGE, content_type="text/html")
    else:
        await route.fulfill(body=(DASHBOARD / name).read_bytes(), content_type=TYPES[Path(name).suffix])


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def modules(browser: Browser) -> AsyncIterator[Page]:
    """An empty page that can import the dashboard's modules."""
    context = await browser.new_context(viewport={"width": 800, "height": 600})
    await context.route(f"{ORIGIN}/**", serve)
    page = await context.new_page()
    await page.goto(f"{ORIGIN}/")
    yield page
    await context.close()


async def call(page: Page, module: str, body: str, argument: Any = None) -> Any:
    """`body`: a function of `m`, the module, and `a`, the argument."""
    script = f"async (a) => {{ const m = await import('{ORIGIN}/{module}'); return ({body})(m, a); }}"
    return await page.evaluate(script, argument)


def walk(number: int, seed: int = 0) -> list[list[float]]:
    dice = random.Random(seed)
    return [[x, dice.gauss(0, 1)] for x in range(number)]


# ---- thinning ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1, 600, 601, 1000, 10_000])
async def test_thinned_points_keep_ends_order_and_extremes(modules: Page, number: int) -> None:
    points = walk(number)
    kept = await call(modules, "scales.js", "(m, a) => m.thin(a, 600)", points)
    assert len(kept) <= 600
    assert [point for point in points if point in kept] == kept  # some of them, in their order
    assert kept[:1] + kept[-1:] == points[:1] + points[-1:]
    if points:
        assert (min(y for _, y in kept), max(y for _, y in kept)) == (
            min(y for _, y in points),
            max(y for _, y in points),
        )


async def test_single_spike_among_ten_thousand_points_is_drawn(modules: Page) -> None:
    for at in (1, 17, 4999, 9998):
        points = [[x, 100.0 if x == at else 0.0] for x in range(10_000)]
        assert [at, 100] in await call(modules, "scales.js", "(m, a) => m.thin(a, 600)", points)


async def test_thinned_band_encloses_every_value(modules: Page) -> None:
    band = [[x, y - abs(y), y + 1] for x, y in walk(5000)]
    kept = await call(modules, "scales.js", "(m, a) => m.thinBand(a, 600)", band)
    assert len(kept) <= 600
    assert [x for x, _, _ in kept] == sorted(x for x, _, _ in kept)
    inner = sorted(kept[1:-1])
    for (x, low, high), (after, low_after, high_after) in itertools.pairwise(inner):
        for _, least, most in band[math.ceil(x) : math.floor(after) + 1]:
            assert min(low, low_after) <= least
            assert most <= max(high, high_after)


async def test_trailing_mean_is_that_of_the_last_points(modules: Page) -> None:
    points = walk(50)
    found = await call(modules, "scales.js", "(m, a) => m.trailingMean(a, 7)", points)
    for index, (x, mean) in enumerate(found):
        last = [y for _, y in points[max(0, index - 6) : index + 1]]
        assert (x, mean) == (index, pytest.approx(sum(last) / len(last)))


# ---- scales ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-0.2, 1.1), (0.00012, 0.00013), (3, 1e7), (-5e-8, 2e-8), (41, 59)])
async def test_ticks_are_round_evenly_apart_and_within(modules: Page, low: float, high: float) -> None:
    ticks = await call(modules, "scales.js", "(m, [low, high]) => m.ticks(low, high, 5)", [low, high])
    assert 2 <= len(ticks) <= 8
    assert all(low <= tick <= high for tick in ticks)
    step = ticks[1] - ticks[0]
    mantissa = step / 10 ** math.floor(math.log10(step) + 1e-9)
    assert min(abs(mantissa - wanted) for wanted in (1, 2, 5)) < 1e-6
    assert [b - a for a, b in itertools.pairwise(ticks)] == pytest.approx([step] * (len(ticks) - 1))
    wide = await call(modules, "scales.js", "(m, a) => m.niceDomain(a)", [low, high])
    assert wide[0] <= low < high <= wide[1]
    assert wide[1] - wide[0] <= 1.4 * (high - low)


async def test_ticks_have_no_trace_of_binary_fractions(modules: Page) -> None:
    assert await call(modules, "scales.js", "(m) => m.ticks(0, 0.7, 7)") == [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]


async def test_ticks_of_odd_domains(modules: Page) -> None:
    assert await call(modules, "scales.js", "(m) => m.ticks(4, 4)") == [4]
    assert await call(modules, "scales.js", "(m) => m.ticks(NaN, NaN)") == []
    assert await call(modules, "scales.js", "(m) => m.wholeTicks(0, 2, 9)") == [0, 1, 2]
    assert await call(modules, "scales.js", "(m) => m.logTicks(0.008, 0.6, 5)") == [0.01, 0.02, 0.05, 0.1, 0.2, 0.5]
    assert await call(modules, "scales.js", "(m) => m.logTicks(1e-6, 10, 4)") == [1e-6, 1e-4, 1e-2, 1]


async def test_nearest_is_that_of_a_full_search(modules: Page) -> None:
    dice = random.Random(1)
    values = sorted(dice.uniform(0, 100) for _ in range(200))
    asked = [-5.0, 105.0, *values[:3], *(dice.uniform(0, 100) for _ in range(300))]
    found = await call(
        modules, "scales.js", "(m, [values, asked]) => asked.map((x) => m.nearest(values, x))", [values, asked]
    )
    assert [abs(values[i] - x) for i, x in zip(found, asked, strict=True)] == [
        min(abs(v - x) for v in values) for x in asked
    ]
    assert await call(modules, "scales.js", "(m) => m.nearest([], 3)") == -1


# ---- timeline ----------------------------------------------------------------------------------------------------


def lane_spans(number: int) -> list[dict[str, Any]]:
    """Groups that overlap, each generated and then scored; now and then weights are loaded."""
    dice, spans = random.Random(2), []
    for index in range(number):
        start, took = dice.uniform(0, 100), dice.uniform(0.1, 6)
        about = {"lane": "w", "iteration": index // 10, "group_id": f"g{index}"}
        spans.append({"kind": "generate", "start": start, "end": start + took, **about})
        spans.append({"kind": "score", "start": start + took, "end": start + took + 0.5, **about})
    return spans + [{"lane": "w", "kind": "load", "start": t, "end": t + 1, "iteration": t} for t in range(0, 100, 20)]


async def test_groups_that_overlap_get_rows_of_their_own(modules: Page) -> None:
    packed = await call(modules, "spans.js", "(m, a) => m.packLane(a)", lane_spans(80))
    rows: dict[int, list[dict[str, Any]]] = {}
    rows_of_group: dict[str, set[int]] = {}
    for item in packed["items"]:
        if item["span"]["kind"] == "load":
            assert item["row"] == -1  # over all rows
            continue
        rows.setdefault(item["row"], []).append(item["span"])
        rows_of_group.setdefault(item["span"]["group_id"], set()).add(item["row"])
    assert len(packed["items"]) == len(lane_spans(80))
    assert set(rows) == set(range(packed["numRows"]))
    assert all(len(found) == 1 for found in rows_of_group.values())  # generated and scored in one row
    for spans in rows.values():
        ordered = sorted(spans, key=lambda span: span["start"])
        assert all(a["end"] <= b["start"] + 1e-5 for a, b in itertools.pairwise(ordered))


async def test_span_under_the_pointer_is_found(modules: Page) -> None:
    script = """(m, a) => {
        const { items } = m.packLane(a);
        return items.map(({ span, row }) => m.itemAt(items, (span.start + span.end) / 2, row).span);
    }"""
    spans = [span for span in lane_spans(80) if span["kind"] != "load"]
    found = await call(modules, "spans.js", script, spans)
    assert sorted(json.dumps(span) for span in found) == sorted(json.dumps(span) for span in spans)
    nothing = "(m, a) => m.itemAt(m.packLane(a).items, 1000, 0)"
    assert await call(modules, "spans.js", nothing, spans) is None


async def test_overlap_of_both_sides_equals_a_count_of_moments(modules: Page) -> None:
    dice = random.Random(3)
    starts = sorted(dice.sample(range(900), 60))
    spans = [
        {"lane": "w", "kind": "generate", "start": s, "end": s + dice.randrange(1, 30), "iteration": 0} for s in starts
    ]
    spans += [
        {"lane": "trainer", "kind": "micro_batch", "start": s, "end": s + 7, "iteration": 0} for s in range(0, 900, 20)
    ]
    spans += [
        {"lane": "trainer", "kind": "wait", "start": s + 7, "end": s + 20, "iteration": 0} for s in range(0, 900, 20)
    ]

    def runs(kind: str, moment: float) -> bool:
        return any(span["kind"] == kind and span["start"] <= moment < span["end"] for span in spans)

    both = sum(runs("generate", t + 0.5) and runs("micro_batch", t + 0.5) for t in range(1000))
    assert 0 < both < 900
    assert await call(modules, "spans.js", "(m, a) => m.covered(m.overlap(a))", spans) == both


async def test_bands_of_iterations_lie_from_commit_to_commit(modules: Page) -> None:
    timeline = {"start": 0, "end": 30, "iterations": [4, 5, 6], "lanes": [], "spans": []}
    records = [
        {"iteration": 4, "committed_at": 9},
        {"iteration": 5, "committed_at": 21},
        {"iteration": 6, "committed_at": None},
    ]
    found = await call(modules, "spans.js", "(m, [t, r]) => m.bands(t, r)", [timeline, records])
    assert [(band["iteration"], band["start"], band["end"]) for band in found] == [(4, 0, 9), (5, 9, 21), (6, 21, 30)]


# ---- series, events, configuration, tokens -----------------------------------------------------------------------


async def test_series_take_points_in_any_order_and_the_newest_of_an_iteration(modules: Page) -> None:
    script = """(m) => {
        const series = new m.Series();
        series.load({ "train/kl": [[0, 1], [2, 3]] });
        series.add(4, { "train/kl": 5 });
        series.add(3, { "train/kl": 4 });
        const tokens = { "iteration/prompt_tokens": 30, "iteration/response_tokens": 10 };
        series.add(4, { "train/kl": 6, ...tokens, "iteration/wall_s": 2 });
        const [kl] = series.lines(m.CHARTS.find(({ id }) => id === "kl"));
        const shown = m.CHARTS.filter((chart) => series.lines(chart).length).map(({ id }) => id);
        return [kl.points, series.of("iteration/tokens_per_s"), shown];
    }"""
    points, rates, shown = await call(modules, "series.js", script)
    assert points == [[0, 1], [2, 3], [3, 4], [4, 6]]
    assert rates == [[4, 20]]
    assert shown == ["kl", "throughput", "time"]  # a chart without values is not there


async def test_events_are_ordered_by_time_and_number(modules: Page) -> None:
    ids = ["1700000000000-10", "1700000000000-9", "999-0", "1700000000001-0"]
    assert await call(modules, "events.js", "(m, a) => a.sort(m.order)", ids) == [ids[2], ids[1], ids[0], ids[3]]


async def test_configuration_as_toml_is_the_same_job(modules: Page) -> None:
    config = JobConfig.model_validate(
        {
            "name": "odd",
            "model": {"path": "bundled:smollm2-135m-instruct"},
            "data": {"type": "reasoning_gym", "task": "chain_sum", "system_prompt": 'a "quoted"\n\\ line \u007f é'},
            "reward": {"name": "exact", "options": {"a key": [1, 2.5, {"x": "y"}], "deep": {"deeper": {"on": True}}}},
            "rollout": {"num_prompts_per_iteration": 2, "num_samples_per_prompt": 2, "max_response_tokens": 8},
            "optimizer": {"learning_rate": 1e-7},
            "schedule": {"num_iterations": 3},
            "tracking": [{"type": "wandb", "tags": ["a"]}, {"type": "mlflow"}],
        }
    )
    text = await call(modules, "toml.js", "(m, a) => m.toToml(a)", config.model_dump(mode="json"))
    assert JobConfig.model_validate(tomllib.loads(text)) == config


async def test_tokens_are_coloured_by_probability_and_show_white_space(modules: Page) -> None:
    chances = [1.0, 0.9, 0.89, 0.5, 0.3, 0.1, 0.02, 0.001, 0.0]
    script = "(m, a) => a.map((chance) => m.levelOf(chance === null ? undefined : Math.log(chance)))"
    assert await call(modules, "tokens.js", script, [*chances, None]) == [0, 0, 1, 1, 2, 3, 4, 5, -1, -1]
    assert await call(modules, "tokens.js", "(m) => m.visible(' a\\tb\\n\\r')") == "·a⇥\tb↵\n␍"


# ---- a chart -----------------------------------------------------------------------------------------------------

DRAW = """async (m, series) => {
    const chart = m.lineChart({ title: "Reward", unit: "points" });
    document.querySelector("main").replaceChildren(chart.element);
    chart.update(series);
    await new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)));
    window.chart = chart;
}"""


async def test_chart_of_a_thousand_iterations_draws_few_points_and_tells_all_values(modules: Page) -> None:
    points = walk(1000)
    await call(
        modules, "charts.js", DRAW, [{"name": "mean", "points": points, "band": [[x, y - 1, y + 1] for x, y in points]}]
    )
    drawn = await modules.locator("polyline").get_attribute("points")
    assert drawn is not None
    assert 300 < len(drawn.split()) <= 600
    slider = modules.get_by_role("slider", name="Reward by iteration")
    await slider.focus()
    for key, at in (("End", 999), ("ArrowLeft", 998), ("PageDown", 988), ("Home", 0), ("ArrowLeft", 0), ("PageUp", 10)):
        await modules.keyboard.press(key)
        assert await slider.get_attribute("aria-valuenow") == str(at)
    text = await slider.get_attribute("aria-valuetext")
    assert text is not None
    assert text.startswith("iteration 10: mean ")
    assert text.endswith(" points")
    await modules.get_by_text("Values").click()
    await expect(modules.locator("tbody tr")).to_have_count(1000)  # browsers tell that it is open a moment later


async def test_open_table_of_a_chart_grows_with_it(modules: Page) -> None:
    await call(modules, "charts.js", DRAW, [{"name": "a", "points": walk(3)}, {"name": "b", "points": walk(2)}])
    await modules.get_by_text("Values").click()
    await modules.evaluate(
        "(series) => chart.update(series)", [{"name": "a", "points": walk(5)}, {"name": "b", "points": walk(2)}]
    )
    await modules.wait_for_function("document.querySelectorAll('tbody tr').length === 5")
    assert await modules.locator("tbody tr").last.inner_text() == f"4\t{await value(modules, 4)}\t\N{EN DASH}"
    assert await modules.locator("thead th").all_inner_texts() == ["iteration", "a", "b"]
    late = [{"name": "a", "points": walk(5)}, {"name": "b", "points": walk(5)}]  # of a job that is behind
    await modules.evaluate("(series) => chart.update(series)", late)
    await modules.wait_for_function(
        "document.querySelector('tbody tr:last-child td:last-child').textContent.length > 1"
    )
    one = [{"name": "a", "points": walk(5)}]
    await modules.evaluate("(series) => chart.update(series)", one)
    await modules.wait_for_function("document.querySelectorAll('thead th').length === 2")
    await modules.evaluate("(series) => chart.update(series)", [{"name": "a", "points": walk(7)}])
    await modules.wait_for_function("document.querySelectorAll('tbody tr').length === 7")
    assert await modules.locator("tbody th").all_inner_texts() == [str(x) for x in range(7)]


async def value(page: Page, index: int) -> str:
    return str(await call(page, "dom.js", "(m, a) => m.number(a, 3)", walk(5)[index][1]))


async def test_logarithmic_chart_falls_back_where_a_value_is_zero(modules: Page) -> None:
    draw = DRAW.replace('unit: "points"', "isLog: true")
    ticks = "() => [...document.querySelectorAll('.chart-tick')].map((each) => each.textContent)"
    await call(modules, "charts.js", draw, [{"name": "a", "points": [[0, 0.001], [1, 1], [2, 0.1]]}])
    assert {"0.001", "0.01", "0.1", "1"} <= set(await modules.evaluate(ticks))
    await call(modules, "charts.js", draw, [{"name": "a", "points": [[0, 0], [1, 1]]}])
    assert {"0", "0.2", "0.8"} <= set(await modules.evaluate(ticks))


async def test_odd_series_are_drawn(modules: Page) -> None:
    """None at all, an empty one, a single point, all the same, one that is far away."""
    for points in ([], [[5, 0.5]], [[0, 0], [1, 0]], [[0, 3], [1, 3]], [[0, -1e12], [1, 1e12]]):
        await call(modules, "charts.js", DRAW, [{"name": "a", "points": points}])
        shapes = await modules.locator(".chart-plot :is(polyline, circle)").evaluate_all(
            "(all) => all.map((each) => each.outerHTML)"
        )
        assert len(shapes) == 1
        assert "NaN" not in shapes[0]
    await call(modules, "charts.js", DRAW, [])
    assert await modules.get_by_role("slider").get_attribute("aria-valuetext") == "no values yet"


async def test_linked_charts_point_at_the_same_iteration(modules: Page) -> None:
    script = """async (m) => {
        const charts = ["one", "two"].map((title) => m.lineChart({ title }));
        const main = document.querySelector("main");
        main.replaceChildren(...charts.map(({ element }) => element));
        m.link(main, () => charts);
        for (const chart of charts) chart.update([{ name: "a", points: [[0, 1], [1, 2], [2, 4]] }]);
        await new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)));
    }"""
    await call(modules, "charts.js", script)
    await modules.get_by_role("slider", name="one").focus()
    await modules.keyboard.press("Home")
    assert await modules.get_by_role("slider", name="two").get_attribute("aria-valuetext") == "iteration 0: a 1"
    await modules.keyboard.press("Escape")
    assert await modules.get_by_role("slider", name="two").get_attribute("aria-valuetext") == "iteration 2: a 4"
