"""The arithmetic of charts, timelines and samples, run in a browser, and charts as they are drawn. No broker."""

import itertools
import json
import random
import re
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, Route, expect

from onbeat.config import JobConfig
from onbeat.contracts.records import MAX_LISTED_ITERATIONS
from services.broker.api.dashboard import MEDIA_TYPES, SHARED

DASHBOARD = Path(__file__).parents[2] / "services" / "broker" / "dashboard"
ORIGIN = "http://dashboard.test"
STYLES = "".join(f'<link rel="stylesheet" href="{name}">' for name in ("vendor/uPlot.min.css", "style.css"))
PAGE = f"<!doctype html>{STYLES}<main></main>"


async def serve(route: Route) -> None:
    name = route.request.url.removeprefix(f"{ORIGIN}/")
    if not name:
        await route.fulfill(body=PAGE, content_type="text/html")
    else:
        path = SHARED.get(name, DASHBOARD / name)
        await route.fulfill(body=path.read_bytes(), content_type=MEDIA_TYPES[path.suffix])


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def modules(browser: Browser) -> AsyncIterator[Page]:
    """Open an empty page that can import the dashboard's modules."""
    context = await browser.new_context(viewport={"width": 800, "height": 600})
    await context.route(f"{ORIGIN}/**", serve)
    page = await context.new_page()
    await page.goto(f"{ORIGIN}/")
    yield page
    await context.close()


async def call(page: Page, module: str, body: str, argument: Any = None) -> Any:
    """Call a function whose `body` uses `m`, the module, and `a`, the argument."""
    script = f"async (a) => {{ const m = await import('{ORIGIN}/{module}'); return ({body})(m, a); }}"
    return await page.evaluate(script, argument)


def walk(number: int) -> list[list[float]]:
    dice = random.Random(0)
    return [[x, dice.gauss(0, 1)] for x in range(number)]


# Results of functions: (module, function of the module and an argument, argument, result).
TICKS = "(m, [ticks, ...about]) => ticks.map((tick) => m.tickOf(tick, ...about))"
LINES = """(m, a) => m.linesOf(a.map(([lr, seed], place) => ({ name: `job-${place}`, config: { lr, seed } })))
    .map(({ label, places }) => [label, places])"""
IDS = ["1700000000000-10", "1700000000000-9", "999-0", "1700000000001-0"]


@pytest.mark.parametrize(
    ("module", "body", "argument", "result"),
    [
        pytest.param(
            "charts.js", TICKS, [[10.79, 10.795], 0.005], ["10.790", "10.795"], id="close ticks are told apart"
        ),
        pytest.param("charts.js", TICKS, [[0, 0.5, 1], 0.5], ["0", "0.5", "1.0"], id="ticks have one precision"),
        pytest.param("charts.js", TICKS, [[0, 2000], 2000], ["0", "2000"], id="whole ticks have no point"),
        pytest.param("charts.js", TICKS, [[10_000, 12_500], 500], ["10K", "12.5K"], id="large ticks are short"),
        pytest.param("charts.js", TICKS, [[-2e-6, 0], 2e-6], ["-2e-6", "0"], id="tiny ticks have exponents"),
        pytest.param("charts.js", TICKS, [[0.5], 0.1, True], ["50%"], id="shares are percentages"),
        pytest.param("charts.js", TICKS, [[0.005], 0.005, True], ["0.5%"], id="small shares have a point"),
        pytest.param(
            "charts.js",
            "(m, a) => a.map((ys) => m.digitsFor(ys.map((y, x) => [x, y])))",
            [[10.79, 10.81], [0.2, 0.9], [1, 1], [], [-5e-7, 3e-7], [1000.0001, 1000.0002]],
            [5, 3, 3, 3, 3, 8],
            id="values that hardly move are told apart",
        ),
        pytest.param(
            "differences.js",
            "(m, a) => [...m.flatten(a)]",
            {
                "lora": None,
                "schedule": {"mode": "sync", "earlier_ends": []},
                "sets": [{"top_k": 5}],
                "betas": [0.9, 0.95],
            },
            [["schedule.mode", "sync"], ["sets.0.top_k", "5"], ["betas", "[0.9,0.95]"]],
            id="empty values are no difference of jobs",
        ),
        pytest.param(
            "differences.js",
            "(m, a) => m.differencesOf(a)",
            [
                {"name": "a", "seed": 0, "pool": "p", "lr": 1e-5, "data": {"now": "2026-01-01T00:00:00Z"}},
                {"name": "b", "seed": 1, "pool": "p", "lr": 2.5e-6, "data": {"now": "2026-01-01T00:00:02Z"}},
            ],
            [["lr", ["1e-5", "2.5e-6"]], ["seed", ["0", "1"]]],
            id="only what differs is shown, without name and date",
        ),
        pytest.param(
            "differences.js",
            "(m, a) => m.shortNames(a)",
            ["a.top_k", "b.top_k", "c.decay", "reward.name"],
            ["a.top_k", "b.top_k", "decay", "reward.name"],
            id="keys are whole whose last word is not clear",
        ),
        pytest.param(
            "differences.js",
            "(m, a) => m.columnsOf(a).map(({ key, name, texts }) => [key, name, [...texts]])",
            [
                {"id": "odd", "config": {}},
                {"id": "a", "config": {"lora": {"rank": 8}, "optimizer": {"lr": 1}, "seed": 0}},
                {"id": "b", "config": {"optimizer": {"lr": 2}, "seed": 0}},
            ],
            [
                ["optimizer.lr", "lr", [["a", "1"], ["b", "2"]]],
                ["lora.rank", "rank", [["a", "8"], ["b", "\N{EN DASH}"]]],
            ],
            id="keys that all jobs have are the first columns",
        ),
        pytest.param(
            "jobs.js",
            "(m, a) => a.map(m.scaleOf)",
            [[[[0, 0.2], [1, 0.4]], [[0, 0.75]]], [[[0, -2], [1, -1]]], [[], []]],
            [[0, 0.75], [-2, 0], None],
            id="one scale has all curves and 0",
        ),
        *(
            pytest.param("differences.js", LINES, configs, lines, id=name)
            for name, configs, lines in [
                ("jobs that differ only in seeds are one line", [[1, 0], [1, 1]], [["2 seeds", [0, 1]]]),
                (
                    "other seeds join the line of their values",
                    [[1, 0], [2, 0], [1, 1], [1, 2]],
                    [["lr=1, 3 seeds", [0, 2, 3]], ["lr=2", [1]]],
                ),
                ("jobs of the same seed have their names", [[1, 0], [1, 0]], [["job-0", [0]], ["job-1", [1]]]),
                ("long values give way to names", [["x" * 60, 0], ["y", 0]], [["job-0", [0]], ["job-1", [1]]]),
                ("a job alone has its name", [[1, 0]], [["job-0", [0]]]),
            ]
        ),
        pytest.param(
            "compare.js",
            "(m, a) => m.overSeeds(a)",
            [[[0, 1], [1, 2]], [[0, 3]], [[2, 5], [4, 6]]],
            {
                "points": [[0, 2], [1, 2], [2, 5], [4, 6]],
                "band": [[0, 1, 3], [1, 2, 2], [2, 5, 5], [4, 6, 6]],
            },
            id="a band is around the seeds that have a value",
        ),
        pytest.param(
            "events.js",
            "(m, a) => a.sort(m.order)",
            IDS,
            [IDS[2], IDS[1], IDS[0], IDS[3]],
            id="events are ordered by time and number",
        ),
        pytest.param(
            "events.js",
            """(m, count) => {
            const events = Array.from({ length: count }, (_, i) => ({ id: `${i}-0` }));
            const kept = m.merge([], [...events.slice(-9), ...events]);
            return [kept.length, kept[0].id, new Set(kept).size, m.merge(kept, kept.slice(9)) === kept];
        }""",
            6000,
            [5000, "5999-0", 5000, True],
            id="the newest events are kept, each once",
        ),
        pytest.param(
            "group.js",
            "(m, a) => a.map((chance) => m.levelOf(chance === null ? undefined : Math.log(chance)))",
            [1.0, 0.9, 0.89, 0.5, 0.3, 0.1, 0.02, 0.001, 0.0, None],
            [0, 0, 1, 1, 2, 3, 4, 5, -1, -1],
            id="tokens have colours by probability",
        ),
        pytest.param(
            "group.js", "(m, a) => m.visible(a)", " a\tb\n\r", "·a⇥\tb↵\n␍", id="white space of a token is seen"
        ),
        pytest.param(
            "parts.js",
            "(m, a) => m.marked(a, 'job-1').map((part) => part.props ? part.props.children : part)",
            "job-1 has been PAUSED for 3483 s, 0.25 s of them: `onbeat jobs resume job-1` continues job-1",
            [
                "This job has been paused for 58 min, 0.25 s of them: ",
                "onbeat jobs resume job-1",
                " continues this job",
            ],
            id="sentences of the broker are a reader's",
        ),
    ],
)
async def test_function_of_the_dashboard_gives_what_is_written(modules, module, body, argument, result):
    assert await call(modules, module, body, argument) == result


# ---- values and axes ---------------------------------------------------------------------------------------------


async def test_trailing_mean_is_that_of_the_last_points(modules: Page) -> None:
    points = walk(50)
    means = await call(modules, "charts.js", "(m, a) => m.trailingMean(a, 7)", points)
    for index, (x, mean) in enumerate(means):
        last = [y for _, y in points[max(0, index - 6) : index + 1]]
        assert (x, mean) == (index, pytest.approx(sum(last) / len(last)))


async def test_nearest_is_that_of_a_full_search(modules: Page) -> None:
    dice = random.Random(1)
    values = sorted(dice.uniform(0, 100) for _ in range(200))
    asked = [-5.0, 105.0, *values[:3], *(dice.uniform(0, 100) for _ in range(300))]
    indices = await call(
        modules, "series.js", "(m, [values, asked]) => asked.map((x) => m.nearest(values, x))", [values, asked]
    )
    assert [abs(values[i] - x) for i, x in zip(indices, asked, strict=True)] == [
        min(abs(v - x) for v in values) for x in asked
    ]
    assert await call(modules, "series.js", "(m) => m.nearest([], 3)") == -1


# ---- timeline ----------------------------------------------------------------------------------------------------


def lane_spans() -> list[dict[str, Any]]:
    """Groups that overlap, each generated and then scored; now and then weights are loaded."""
    dice, spans = random.Random(2), []
    for index in range(80):
        start, took = dice.uniform(0, 100), dice.uniform(0.1, 6)
        about = {"lane": "w", "iteration": index // 10, "group_id": f"g{index}"}
        spans.append({"kind": "generate", "start": start, "end": start + took, **about})
        spans.append({"kind": "score", "start": start + took, "end": start + took + 0.5, **about})
    return spans + [{"lane": "w", "kind": "load", "start": t, "end": t + 1, "iteration": t} for t in range(0, 100, 20)]


async def test_groups_that_overlap_get_rows_of_their_own(modules: Page) -> None:
    packed = await call(modules, "spans.js", "(m, a) => m.packLane(a)", lane_spans())
    rows: dict[int, list[dict[str, Any]]] = {}
    rows_of_group: dict[str, set[int]] = {}
    for item in packed["items"]:
        if item["span"]["kind"] == "load":
            assert item["row"] == -1  # over all rows
            continue
        rows.setdefault(item["row"], []).append(item["span"])
        rows_of_group.setdefault(item["span"]["group_id"], set()).add(item["row"])
    assert len(packed["items"]) == len(lane_spans())
    assert set(rows) == set(range(packed["numRows"]))
    assert all(len(rows) == 1 for rows in rows_of_group.values())  # generated and scored in one row
    for spans in rows.values():
        ordered = sorted(spans, key=lambda span: span["start"])
        assert all(a["end"] <= b["start"] + 1e-5 for a, b in itertools.pairwise(ordered))


async def test_span_under_the_pointer_is_found(modules: Page) -> None:
    script = """(m, a) => {
        const { items } = m.packLane(a);
        return items.map(({ span, row }) => m.itemAt(items, (span.start + span.end) / 2, row).span);
    }"""
    spans = [span for span in lane_spans() if span["kind"] != "load"]
    unpacked = await call(modules, "spans.js", script, spans)
    assert sorted(json.dumps(span) for span in unpacked) == sorted(json.dumps(span) for span in spans)
    nothing = "(m, a) => m.itemAt(m.packLane(a).items, 1000, 0)"
    assert await call(modules, "spans.js", nothing, spans) is None


async def test_bands_of_iterations_lie_from_commit_to_commit(modules: Page) -> None:
    times = [("trainer", 4, 7), ("trainer", 4, 9), ("trainer", 5, 21), ("w", 5, 25), ("w", 6, 28)]
    spans = [{"lane": lane, "iteration": iteration, "end": end} for lane, iteration, end in times]
    timeline = {"start": 0, "end": 30, "iterations": [4, 5, 6], "spans": spans}
    bands = await call(modules, "spans.js", "(m, a) => m.bands(a)", timeline)
    assert [(band["iteration"], band["start"], band["end"]) for band in bands] == [(4, 0, 9), (5, 9, 21), (6, 21, 30)]


# ---- series, events, configuration, tokens -----------------------------------------------------------------------


async def test_series_accept_points_in_any_order_and_keep_the_newest(modules: Page) -> None:
    script = """async (m) => {
        const { CHARTS } = await import(location.origin + "/table.js");
        const series = new m.Series();
        series.addAll({ "train/kl": [[0, 1], [2, 3]] });
        series.add(4, { "train/kl": 5 });
        series.add(3, { "train/kl": 4 });
        const tokens = { "iteration/prompt_tokens": 30, "iteration/response_tokens": 10 };
        series.add(4, { "train/kl": 6, ...tokens, "iteration/wall_s": 2 });
        const [kl] = series.lines(CHARTS.find(({ id }) => id === "kl"));
        const shown = CHARTS.filter((chart) => series.lines(chart).length).map(({ id }) => id);
        return [kl.points, series.of("iteration/tokens_per_s"), shown];
    }"""
    points, rates, shown = await call(modules, "series.js", script)
    assert points == [[0, 1], [2, 3], [3, 4], [4, 6]]
    assert rates == [[4, 20]]
    assert shown == ["kl", "throughput", "time"]  # a chart without values is not there


async def test_parts_and_named_sets_have_lines_of_their_own(modules: Page) -> None:
    script = """async (m) => {
        const { CHARTS } = await import(location.origin + "/table.js");
        const series = new m.Series();
        const names = ["reward/right_mean", "reward/right_std", "reward/short_mean", "train/odd"];
        names.push("eval/reward_mean", "eval/pass_at_k", "eval/reward/right_mean");
        series.addAll(Object.fromEntries(names.map((name) => [name, [[0, 1]]])));
        const linesOf = (chart) => series.lines(chart).map(({ name }) => name);
        const charts = () => Object.fromEntries(CHARTS.map((chart) => [chart.id, linesOf(chart)]));
        const single = charts();
        const scores = ["reward_mean", "reward/right_mean", "reward/short_mean", "response_tokens_mean"];
        for (const prefix of ["eval/", "eval/easy/"]) for (const name of scores) series.add(0, { [prefix + name]: 1 });
        series.add(0, { "eval/hard/reward_mean": 0.5, "eval/hard/reward/right_mean": 0.5 });
        return [single, charts(), series.others()];
    }"""
    single, sets, others = await call(modules, "series.js", script)
    assert (single["parts"], single["held-out"], single["held-out-parts"]) == (["right", "short"], ["mean"], ["right"])
    assert single["solved"] == ["held out, by any of k"]
    assert (sets["held-out"], sets["held-out-parts"]) == (["easy", "hard"], ["easy/right", "easy/short", "hard/right"])
    assert others == ["eval/easy/response_tokens_mean", "reward/right_std", "train/odd"]


async def test_answers_are_paired_and_the_telling_ones_come_first(modules: Page) -> None:
    def answers(number: int, rewards: list[float]) -> list[dict[str, Any]]:
        return [
            {"group_id": f"eval-{number}-{place}", "index": 0, "prompt": str(place), "reward": reward}
            for place, reward in enumerate(rewards)
        ]

    script = """(m, [before, after, config]) => m.telling(m.pairsOf(before, after, m.solvedAt(config))).map(
        ({ prompt, before, after }) => [prompt, before.isRight, after?.isRight ?? null])"""
    sets = [{"num_prompts": 4}, {"num_prompts": None, "solved_at": 0.5}]
    config = {"solved_at": 1.0, "evaluation": {"num_prompts": 2, "sets": sets}}
    pair = [answers(0, [0, 0, 0, 1, 0.5]), answers(8, [1, 1, 0, 0, 0.5]), config]
    in_order = [["0", False, True], ["2", False, False], ["3", True, False], ["4", True, True], ["1", False, True]]
    assert await call(modules, "before_after.js", script, pair) == in_order
    once = await call(modules, "before_after.js", script, [answers(0, [1, 0]), [], config])
    assert once == [["0", True, None], ["1", False, None]]


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
    text = await call(modules, "format.js", "(m, a) => m.toToml(a)", config.model_dump(mode="json"))
    assert JobConfig.model_validate(tomllib.loads(text)) == config


async def test_curves_of_a_long_job_are_read_in_all_parts(modules: Page) -> None:
    last = MAX_LISTED_ITERATIONS + 2

    async def answer(route: Route) -> None:
        after = int(parse_qs(urlsplit(route.request.url).query)["after"][0])
        points = [[x, x / 2] for x in range(after + 1, min(last, after + MAX_LISTED_ITERATIONS) + 1)]
        await route.fulfill(json={"metrics": {"iteration/wall_s": points, "eval/reward_mean": [[last, 0.5]]}})

    await modules.route(f"{ORIGIN}/v1/jobs/j/metrics?*", answer)
    read = """async (m) => {
        const series = new m.Series();
        await series.read("/jobs/j", -1);
        return [series.of("iteration/wall_s").length, series.last("iteration/wall_s"), series.of("eval/reward_mean")];
    }"""
    assert await call(modules, "series.js", read) == [last + 1, last / 2, [[last, 0.5]]]


# ---- lanes -------------------------------------------------------------------------------------------------------

LANES = """async (m) => {
    const { html, render } = await import("http://dashboard.test/parts.js");
    const lanes = ["trainer", "w"].map((id) => ({ id, idle_frac: null }));
    const spans = [{ lane: "w", kind: "generate", start: 0, end: 4, iteration: 0, group_id: "0-0" }];
    const timeline = { start: 0, end: 10, iterations: [0], lanes, spans };
    window.opened = [];
    const on = { onChoose: () => {}, onOpen: ({ span }) => opened.push(span.group_id), onZoom: () => {} };
    render(null, document.querySelector("main"));
    const all = { ...on, timeline, isLarge: true, ref: (lanes) => (window.lanes = lanes) };
    render(html`<${m.Lanes} ...${all} />`, document.querySelector("main"));
    await new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)));
}"""
CHOSEN = re.compile("^w: generate, group 0-0 of iteration 0")


async def test_no_time_below_the_lanes_is_cut(modules: Page) -> None:
    await call(modules, "lanes.js", LANES)
    labels = await modules.evaluate("lanes.chart.axes[0]._values")
    assert labels[0] == "0 s"
    assert labels[-1] == ""  # 10 s, at the right edge


async def test_arrow_key_chooses_the_first_span_below_an_empty_lane(modules: Page) -> None:
    """The state is that before the first commit, when nothing is known of the trainer."""
    await call(modules, "lanes.js", LANES)
    slider = modules.get_by_role("slider")
    await slider.focus()
    await modules.keyboard.press("ArrowRight")
    await expect(slider).to_have_attribute("aria-valuetext", CHOSEN)


async def test_span_stays_chosen_and_is_opened_by_an_unsteady_click(modules: Page) -> None:
    await call(modules, "lanes.js", LANES)
    slider = modules.get_by_role("slider")
    frame = await slider.bounding_box()
    assert frame is not None
    x, y = frame["x"] + frame["width"] / 5, frame["y"] + frame["height"] - 40
    script = """([x, y, away]) => {
        const move = (clientX) => new PointerEvent("pointermove", { clientX, clientY: y, bubbles: true });
        for (const at of [x, away]) document.querySelector(".u-over").dispatchEvent(move(at));
    }"""
    await modules.evaluate(script, [x, y, frame["x"] + 0.8 * frame["width"]])
    await expect(slider).to_have_attribute("aria-valuetext", CHOSEN)
    for pixels, opened in ((2, ["0-0"]), (60, ["0-0"])):  # the second is a drag
        await modules.mouse.move(x, y)
        await modules.mouse.down()
        await modules.mouse.move(x + pixels, y)
        await modules.mouse.up()
        assert await modules.evaluate("opened") == opened


# ---- a chart -----------------------------------------------------------------------------------------------------

DRAW = """async (m, [lines, options]) => {
    const { html, render } = await import("http://dashboard.test/parts.js");
    const main = document.querySelector("main");
    window.draw = async (lines) => {
        const ref = (chart) => (window.chart = chart);
        render(html`<${m.Chart} title="Reward" unit="points" ...${options} lines=${lines} ref=${ref} />`, main);
        await new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)));
    };
    render(null, main);
    await draw(lines);
}"""


async def draw(page: Page, lines: list[dict[str, Any]], **options: Any) -> None:
    await call(page, "charts.js", DRAW, [lines, options])


async def redraw(page: Page, *lines: tuple[str, list[list[float]]]) -> None:
    await page.evaluate("(lines) => draw(lines)", [{"name": name, "points": points} for name, points in lines])


async def test_chart_of_a_thousand_iterations_shows_all_values(modules: Page) -> None:
    points = walk(1000)
    await draw(modules, [{"name": "mean", "points": points, "band": [[x, y - 1, y + 1] for x, y in points]}])
    await expect(modules.locator("canvas")).to_have_count(1)
    slider = modules.get_by_role("slider", name="Reward by iteration")
    await slider.focus()
    for key, at in (("End", 999), ("ArrowLeft", 998), ("PageDown", 988), ("Home", 0), ("ArrowLeft", 0), ("PageUp", 10)):
        await modules.keyboard.press(key)
        await expect(slider).to_have_attribute("aria-valuenow", str(at))
    text = await slider.get_attribute("aria-valuetext")
    assert text is not None
    assert text.startswith("iteration 10: mean ")
    assert text.endswith(" points")
    await modules.get_by_text("Values").click()
    await expect(modules.locator("tbody tr")).to_have_count(1000)  # browsers tell that it is open a moment later


async def test_open_table_of_a_chart_grows_with_it(modules: Page) -> None:
    await draw(modules, [{"name": "a", "points": walk(3)}, {"name": "b", "points": walk(2)}])
    await modules.get_by_text("Values").click()
    await redraw(modules, ("a", walk(5)), ("b", walk(2)))
    rows = modules.locator("tbody tr")
    await expect(rows).to_have_count(5)
    await expect(rows.last).to_have_text(f"4 {await value(modules, 4)} \N{EN DASH}", use_inner_text=True)
    await expect(modules.locator("thead th")).to_have_text(["iteration", "a", "b"])
    await redraw(modules, ("a", walk(5)), ("b", walk(5)))  # values of a job that is behind
    await expect(rows.last).to_have_text(f"4 {await value(modules, 4)} {await value(modules, 4)}", use_inner_text=True)
    await redraw(modules, ("a", walk(5)))
    await expect(modules.locator("thead th")).to_have_count(2)
    await redraw(modules, ("a", walk(7)))
    await expect(rows).to_have_count(7)
    await expect(modules.locator("tbody th")).to_have_text([str(x) for x in range(7)])


async def value(page: Page, index: int) -> str:
    return str(await call(page, "format.js", "(m, a) => m.number(a, 3)", walk(5)[index][1]))


async def test_logarithmic_chart_falls_back_where_a_value_is_zero(modules: Page) -> None:
    labels = "chart.chart.axes[1]._values.filter(Boolean)"
    await draw(modules, [{"name": "a", "points": [[0, 0.001], [1, 1], [2, 0.1]]}], isLog=True)
    assert {"0.001", "0.01", "0.1", "1"} <= set(await modules.evaluate(labels))
    await redraw(modules, ("a", [[0, 0], [1, 1]]))
    assert {"0", "0.2", "0.8"} <= set(await modules.evaluate(labels))


async def test_odd_series_are_drawn(modules: Page) -> None:
    """An empty one, a single point, all the same, one that is far away, and none at all."""
    for points in ([], [[5, 0.5]], [[0, 0], [1, 0]], [[0, 3], [1, 3]], [[0, -1e12], [1, 1e12]]):
        await draw(modules, [{"name": "a", "points": points}])
        low, high = await modules.evaluate("[chart.chart.scales.y.min, chart.chart.scales.y.max]")
        if points:
            assert low <= min(y for _, y in points) <= max(y for _, y in points) <= high
            assert low < high
    await draw(modules, [])
    assert await modules.get_by_role("slider").get_attribute("aria-valuetext") == "no values yet"


async def test_axis_is_as_long_as_the_job_and_shows_a_young_one(modules: Page) -> None:
    cases = {(0, 0, 0, 24): (0, 24), (0, 24, 0, 24): (0, 24), (0, 5, 0, 999): (0, 100), (0, 50, 0, 999): (0, 500)}
    cases |= {(10, 12, 10, 19): (10, 19), (0, 25, 0, 24): (0, 25), (0, 0, 0, 0): (-0.5, 0.5)}
    for (low, high, *ends), shown in cases.items():
        axis = await call(
            modules, "charts.js", "(m, [low, high, ends]) => m.axisOf(low, high, ends)", [low, high, ends]
        )
        assert tuple(axis) == shown


async def test_axis_of_a_first_value_is_as_long_as_the_job(modules: Page) -> None:
    await draw(modules, [{"name": "a", "points": [[0, 0.5]]}], ends=[0, 11])
    assert await modules.evaluate("[chart.chart.scales.x.min, chart.chart.scales.x.max]") == [0, 11]


BAND = """(m, rewards) => {
    const series = new m.Series();
    series.addAll({ reward: rewards.map((y, x) => [x, y]), spread: rewards.map((_, x) => [x, 0.5]) });
    return series.line("mean", "reward", "spread");
}"""


async def test_band_around_shares_stays_within_them(modules: Page) -> None:
    """The drawn band and the values in words agree."""
    line = await call(modules, "series.js", BAND, [0.25, 0.75])
    assert line["band"] == [[0, 0, 0.75], [1, 0.25, 1]]
    await draw(modules, [line])
    assert await modules.evaluate("chart.chart.scales.y.min") == 0
    await expect(modules.locator(".chart-value")).to_have_text("0.75, one standard deviation: 0.25 to 1")
    line = await call(modules, "series.js", BAND, [0.25, 2])
    assert line["band"] == [[0, -0.25, 0.75], [1, 1.5, 2.5]]
