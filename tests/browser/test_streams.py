"""Streams of a page: closed while the page is hidden, complete after a lost connection, and clear about defects."""

from playwright.async_api import Page, Route, expect

from onbeat.contracts.records import WorkerRecord
from onbeat.contracts.states import JobState
from onbeat.streams.keys import JobKeys
from tests.broker_fixtures import Broker
from tests.browser.conftest import Visitor
from tests.browser.seeding import seed_job
from tests.browser.test_live import cursors, expect_progress
from tests.integration.broker.test_live_api import ledger_events
from tests.waiting import eventually

HIDDEN_MS = 10_000  # as api.js has it
SET_HIDDEN = """(isHidden) => {
    Object.defineProperty(document, "hidden", { value: isHidden, configurable: true });
    document.dispatchEvent(new Event("visibilitychange"));
}"""
LISTEN = """async (path) => {
    const { stream } = await import("/assets/api.js");
    const heard = [];
    const states = [];
    const onMessage = (kind, data, id) => {
        if (kind !== "event") return;
        heard.push(id);
        if (heard.length === 1) throw new Error("this page has a defect");
    };
    await stream(path, { signal: AbortSignal.timeout(8000), onMessage, onState: (state) => states.push(state) });
    return { heard, states };
}"""


async def open_with_clock(visit: Visitor, broker: Broker, job_id: str) -> Page:
    """Open a page whose timers the test moves."""
    page = await visit(broker.url, f"#/jobs/{job_id}")
    await page.clock.install()
    await page.reload()
    await expect(page.get_by_test_id("live")).to_have_text("live")
    await eventually("only the page as it is now listens", lambda: broker.num_watchers == 1)
    return page


async def hide(page: Page, broker: Broker) -> None:
    """Hide the page and wait until it has closed its stream."""
    await page.evaluate(SET_HIDDEN, True)
    await page.clock.fast_forward(HIDDEN_MS + 1000)
    await eventually("nobody listens", lambda: broker.num_watchers == 0)


async def test_hidden_page_closes_its_stream_and_resumes_when_shown(visit, broker, ledger, world):
    job_id, epoch = await world.started_job(schedule={"num_iterations": 4})
    page = await open_with_clock(visit, broker, job_id)
    await world.train(job_id, epoch, range(1))
    shown = page.get_by_test_id("events").get_by_role("listitem")
    await expect_progress(page, 1, 4)
    await hide(page, broker)
    num_connections = len(cursors(visit))
    await world.train(job_id, epoch, range(1, 3))
    await page.clock.fast_forward(HIDDEN_MS)
    assert (broker.num_watchers, len(cursors(visit))) == (0, num_connections), "it came back, and nobody looks"
    await page.evaluate(SET_HIDDEN, False)
    await expect_progress(page, 3, 4)
    await expect(shown).to_have_count(len(await ledger_events(ledger, job_id)))
    assert cursors(visit)[-1] in await ledger_events(ledger, job_id), "it was sent again from the beginning"


async def test_curves_have_no_holes_after_a_gap_whose_events_are_gone(visit, broker, ledger, world):
    job_id, epoch = await world.started_job(schedule={"num_iterations": 8})
    page = await open_with_clock(visit, broker, job_id)
    await world.train(job_id, epoch, range(2))
    await expect_progress(page, 2, 8)
    await hide(page, broker)
    await world.train(job_id, epoch, range(2, 7))
    await ledger.redis.xtrim(JobKeys(job_id).events, maxlen=1, approximate=False)
    await page.evaluate(SET_HIDDEN, False)
    await expect_progress(page, 7, 8)
    reward = page.get_by_test_id("chart-reward")
    await reward.get_by_text("Values").click()
    await expect(reward.locator("tbody tr")).to_have_count(7)


async def test_page_error_reaches_the_console_and_its_stream_goes_on(visit, broker, ledger, world):
    visit.watch.expect("this page has a defect")
    job_id, _ = await world.started_job()
    await ledger.jobs.move(job_id, JobState.FAILED, "no more memory")
    page = await visit(broker.url)
    shown = await page.evaluate(LISTEN, f"/jobs/{job_id}/stream")
    assert shown == {"heard": await ledger_events(ledger, job_id), "states": ["connecting", "open", "over"]}
    assert any("this page has a defect" in said for said in visit.watch.complaints)


async def test_older_events_can_be_asked_for_again_after_a_failure(visit, ledger, tmp_path):
    visit.watch.expect("status of 503")
    job_id = await seed_job(ledger, "twelve")
    async with visit.broker(ledger, tmp_path) as broker:
        page = await visit(broker.url, f"#/jobs/{job_id}")
        log = page.get_by_test_id("events")
        older = log.get_by_role("button", name="Load older events")

        async def refuse(route: Route) -> None:
            await route.fulfill(status=503, json={"title": "Busy", "detail": "Redis does not answer"})

        await page.route("**/events?*", refuse)
        await older.click()
        await expect(log.get_by_role("alert")).to_have_text("They could not be read: Redis does not answer")
        await page.unroute("**/events?*")
        await older.click()
        await expect(older).to_be_hidden()
        await expect(log.get_by_role("alert")).to_be_hidden()
        await expect(log.get_by_role("listitem")).to_have_count(len(await ledger_events(ledger, job_id)))


async def test_rollout_is_silent_by_the_clock_of_the_others(visit, broker, world):
    job_id = await world.create_job()
    for name, ago_s in (("quick", -600), ("slow", -570)):
        worker = WorkerRecord(id=name, state="generating", job_id=job_id)
        await world.beat("default", worker, ago_s)
    await world.beat("default", WorkerRecord(id="fresh", state="starting"), -570)
    page = await visit(broker.url, f"#/jobs/{job_id}")
    chips = page.get_by_role("list", name="Rollouts of this job").get_by_role("listitem")
    await expect(chips.filter(has_text="slow")).to_contain_text("silent for 30 s")
    await expect(chips.filter(has_text="quick")).not_to_contain_text("silent")
    await page.goto(f"{broker.url}/#/workers")
    rows = page.get_by_role("region", name="Rollouts").get_by_role("row")
    await expect(rows.filter(has_text="slow")).to_contain_text("silent, was generating")
    for name in ("quick", "fresh"):
        await expect(rows.filter(has_text=name)).not_to_contain_text("silent")
