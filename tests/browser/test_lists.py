"""Lists, comparisons and new jobs while jobs go on: late answers, jobs that are deleted, and pages that were left."""

import asyncio
import re

from playwright.async_api import Page, Route, expect

from onbeat.contracts.states import JobState
from tests.browser.seeding import seed_reward
from tests.browser.test_form import write
from tests.world import job_body

LIST = re.compile(r"/v1/jobs\?")
NOTE_WHAT_IS_SAID = """() => {
    const announcer = document.getElementById("announcer");
    window.said = [];
    new MutationObserver(() => said.push(announcer.textContent)).observe(announcer, {childList: true});
}"""


async def next_list(page: Page) -> None:
    """Wait until the page has asked for a list and shown it."""
    async with page.expect_request_finished(lambda request: bool(LIST.search(request.url))):
        pass
    await page.evaluate("new Promise((resolve) => setTimeout(resolve))")


# ---- the list of jobs --------------------------------------------------------------------------------------------


async def test_search_finds_a_job_by_its_name(visit, broker, world):
    for name in ("wanted", "other"):
        await world.create_job(name=name)
    page = await visit(broker.url)
    await expect(page.get_by_role("link", name="other")).to_be_visible()
    async with page.expect_request_finished(lambda request: "limit=" in request.url):
        await page.get_by_role("searchbox").fill("want")
    await expect(page.get_by_role("link", name="other")).to_have_count(0)
    await expect(page.get_by_role("link", name="wanted")).to_be_visible()
    await next_list(page)  # the next list, which the broker does not refuse


async def test_list_requested_before_a_move_is_not_shown_after_it(visit, broker, world):
    step_s = 10.0
    await world.start_training(await world.create_job(name="moved"))
    page = await visit(broker.url)
    state = page.get_by_test_id("job-state")
    await expect(state).to_have_text("running")
    await page.evaluate(NOTE_WHAT_IS_SAID)
    is_held, may_go = asyncio.Event(), asyncio.Event()

    async def hold(route: Route) -> None:
        answer = await route.fetch()
        is_held.set()
        await may_go.wait()
        await route.fulfill(response=answer)

    await page.route(LIST, hold, times=1)
    await asyncio.wait_for(is_held.wait(), step_s)
    await page.get_by_test_id("pause-job").click()
    await expect(state).to_have_text("paused")
    may_go.set()
    await next_list(page)
    await next_list(page)
    assert await page.evaluate("said") == ["moved is paused"]


async def test_curves_share_a_scale_and_differences_have_columns(visit, ledger, world, tmp_path):
    await seed_reward(world, 0.75, name="fast", optimizer={"learning_rate": 3e-5})
    await seed_reward(world, 0.25, name="slow", optimizer={"learning_rate": 1e-5})
    async with visit.broker(ledger, tmp_path) as broker:
        page = await visit(broker.url)
        await expect(page.get_by_text("reward curves from 0 to 0.75")).to_be_visible()
        rows = {name: page.get_by_test_id("job-row").filter(has_text=name) for name in ("fast", "slow")}
        await expect(rows["fast"].locator("circle")).to_have_attribute("cy", "3.0")  # the top of the scale
        await expect(rows["slow"].locator("circle")).to_have_attribute("cy", "16.3")  # a third of it
        strokes = await page.locator(".spark polyline").evaluate_all(
            "(all) => all.map((one) => getComputedStyle(one).stroke)"
        )
        assert "none" not in strokes
        column = page.get_by_role("columnheader", name="learning_rate")
        await expect(column).to_have_count(0)
        await page.get_by_label("Columns for what differs").check()
        await expect(column).to_be_visible()
        await page.reload()
        await expect(column).to_be_visible()
        for name, value in (("fast", "3e-5"), ("slow", "1e-5")):
            await expect(rows[name].get_by_role("cell", name=value, exact=True)).to_be_visible()
        await page.get_by_label("Columns for what differs").uncheck()
        await expect(column).to_have_count(0)
        assert page.url.endswith("#/")


# ---- comparing ---------------------------------------------------------------------------------------------------


async def test_deleted_job_is_announced_and_the_others_go_on(visit, broker, ledger, world):
    visit.watch.expect("status of 404")
    deleted, other = [await world.create_job(name=name) for name in ("deleted", "other")]
    page = await visit(broker.url, f"#/compare?jobs={deleted},{other}")
    states = page.get_by_role("row").filter(has=page.get_by_role("rowheader", name="State")).get_by_role("cell")
    await expect(states).to_have_text(["pending", "pending"])
    await ledger.jobs.move(deleted, JobState.CANCELLED)
    await ledger.jobs.delete(deleted)
    await world.start_training(other)
    await expect(states).to_have_text(["gone", "running"])
    await expect(page.get_by_text("deleted was deleted")).to_have_count(2)  # notice and announcement
    await ledger.jobs.move(other, JobState.PAUSED)
    await expect(states).to_have_text(["gone", "paused"])
    await expect(page.locator(".notice").filter(has_text="was deleted")).to_have_count(1)


# ---- samples -----------------------------------------------------------------------------------------------------


async def test_samples_of_iterations_that_came_later_are_reached(visit, broker, world):
    job_id, epoch = await world.started_job(schedule={"num_iterations": 4})

    async def generate(iteration: int) -> None:
        await world.wait_open(job_id, iteration)
        await world.drain(job_id)

    await generate(0)
    page = await visit(broker.url, f"#/jobs/{job_id}/samples")
    await expect(page.get_by_text(re.compile("^Responses .*of iteration 0"))).to_be_visible()
    for iteration in range(2):
        await world.commit(job_id, epoch, iteration)
        await generate(iteration + 1)
    await page.get_by_role("button", name="Show").click()
    await expect(page.get_by_text(re.compile("^Responses .*of iteration 2"))).to_be_visible()
    await world.commit(job_id, epoch, 2)
    await generate(3)
    await page.get_by_role("button", name="Next iteration").click()
    await expect(page.get_by_text(re.compile("^Responses .*of iteration 3"))).to_be_visible()
    await page.get_by_role("button", name="Next iteration").click()
    await expect(page.get_by_label("Iteration", exact=True)).to_have_value("3")


# ---- a new job ---------------------------------------------------------------------------------------------------


async def test_editor_that_was_left_does_not_lead_to_its_job(visit, broker, ledger):
    page = await visit(broker.url, "#/new")
    may_go = asyncio.Event()

    async def hold(route: Route) -> None:
        await may_go.wait()
        await route.continue_()

    await page.route("**/v1/jobs", hold)
    await write(page, job_body(name="created-later"))
    await page.get_by_test_id("submit-job").click()
    await page.get_by_role("link", name="Workers").click()
    heading = page.get_by_role("heading", level=1)
    await expect(heading).to_have_text("Workers")
    may_go.set()
    await expect(page.locator("#announcer")).to_have_text("created-later is created")
    assert page.url.endswith("#/workers")
    await expect(heading).to_have_text("Workers")
    assert len(await ledger.jobs.ids()) == 1
