"""A job from its form to its last sample, on a real local stack: Redis, broker, trainer and a rollout as processes."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from onbeat.types import JobState
from tests.browser.conftest import Visitor
from tests.browser.test_form import field
from tests.e2e.stack import RunningStack, running, tiny_job

TRAINED_MS = 90_000  # what a small job may take on a machine that does other things as well
NUM_ITERATIONS = 5


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with running(tmp_path_factory.mktemp("stack")) as stack:
        yield stack


async def open_optional(page: Page) -> None:
    folded = page.locator("details:not([open]) > summary:visible")
    while await folded.count():
        await folded.first.click()


async def fill_in(page: Page, folder: Path) -> None:
    """The small job of the other end-to-end tests."""
    job = tiny_job(folder, rollout={"max_response_tokens": 48}, schedule={"num_iterations": NUM_ITERATIONS})
    await field(page, "data.type").select_option(job["data"]["type"])
    await open_optional(page)
    await field(page, "name").fill("from-the-page")
    await field(page, "model.path").fill(job["model"]["path"])
    await field(page, "model.dtype").select_option(job["model"]["dtype"])
    await field(page, "data.path").fill(job["data"]["path"])
    await field(page, "reward.name").fill(job["reward"]["name"])
    await field(page, "reward.options").fill(json.dumps(job["reward"]["options"]))
    for name, value in job["rollout"].items():
        await field(page, f"rollout.{name}").fill(str(value))
    await field(page, "optimizer.learning_rate").fill(str(job["optimizer"]["learning_rate"]))
    await field(page, "schedule.num_iterations").fill(str(NUM_ITERATIONS))


async def test_job_is_submitted_followed_and_read_on_the_page(visit: Visitor, stack: RunningStack) -> None:
    visit.watch.expect("status of 422")
    page = await visit(stack.url)
    await page.get_by_role("link", name="New job").first.click()
    await expect(page.get_by_role("heading", level=1, name="New job")).to_be_visible()
    await fill_in(page, stack.data_dir.parent)
    await is_refused_beside_the_field(page)
    await field(page, "rollout.num_samples_per_prompt").fill("4")
    await page.get_by_test_id("submit-job").click()
    await expect(page.get_by_role("heading", level=1, name="from-the-page")).to_be_visible()
    await page.evaluate("window.isSamePage = true")
    await expect(page.get_by_test_id("job-state").first).to_have_text("running")
    await expect(page.get_by_test_id("job-state").first).to_have_text("succeeded", timeout=TRAINED_MS)
    await expect(page.get_by_role("progressbar").first).to_have_attribute("aria-valuenow", str(NUM_ITERATIONS))
    slider = page.get_by_test_id("chart-reward").get_by_role("slider")
    await expect(slider).to_have_attribute("aria-valuenow", str(NUM_ITERATIONS - 1))
    await shows_both_sides_of_the_pipeline(page)
    await shows_responses_token_by_token(page)
    assert await page.evaluate("window.isSamePage"), "it was loaded again"
    (job,) = stack.client.jobs.list()
    assert (job.state, job.name) == (JobState.SUCCEEDED, "from-the-page")


async def is_refused_beside_the_field(page: Page) -> None:
    """With a group of one, whose advantages would all be 0."""
    wrong = field(page, "rollout.num_samples_per_prompt")
    await wrong.fill("0")
    await page.get_by_test_id("submit-job").click()
    await expect(wrong).to_have_attribute("aria-invalid", "true")
    described_by = await wrong.get_attribute("aria-describedby")
    assert described_by is not None
    assert "rollout.num_samples_per_prompt-error" in described_by
    await expect(page.locator("[id='rollout.num_samples_per_prompt-error']")).to_contain_text("greater than or equal")


async def shows_both_sides_of_the_pipeline(page: Page) -> None:
    """Lanes with what each did; the spans are told by the arrow keys as well."""
    await page.get_by_role("navigation", name="Pages of this job").get_by_role("link", name="Timeline").click()
    await expect(page.get_by_role("heading", level=1, name="Timeline of")).to_be_focused()  # the page is there
    timeline = page.get_by_test_id("timeline")
    for lane, kinds in (("trainer", "micro-batch|optimizer|publish|wait"), ("rollout-0", "generat|scor|pull|load")):
        slider = timeline.get_by_role("slider", name=lane)
        await slider.focus()
        await page.keyboard.press("ArrowRight")
        told = re.compile(rf"{lane}: .*({kinds}).*(iteration|policy version) \d", re.IGNORECASE)
        await expect(slider).to_have_attribute("aria-valuetext", told)
        await expect(page.get_by_test_id("timeline-readout")).to_have_text(told)
    await expect(page.get_by_test_id("timeline-summary")).to_contain_text("the trainer was idle")


async def shows_responses_token_by_token(page: Page) -> None:
    await page.get_by_role("navigation", name="Pages of this job").get_by_role("link", name="Samples").click()
    sample = page.get_by_test_id("sample").first
    await expect(sample).to_contain_text("say ")
    await expect(sample.get_by_text("advantage not told")).to_have_count(0)
    await sample.get_by_role("link", name="All of group").click()
    detail = page.get_by_test_id("group-detail")
    await expect(detail.get_by_test_id("response")).to_have_count(4)
    await detail.locator("[data-index='0']").first.hover()
    readout = page.get_by_test_id("token-readout")
    await expect(readout).to_have_text(re.compile(r"token 1 of \d+: .*probability \d"))
    await expect(readout).not_to_contain_text("not known")


async def test_running_job_is_cancelled_from_the_list(visit: Visitor, stack: RunningStack) -> None:
    job = tiny_job(stack.data_dir.parent, schedule={"num_iterations": 10_000})
    job_id = stack.client.jobs.create(job | {"name": "endless"}).id
    page = await visit(stack.url)
    row = page.get_by_test_id("job-row").filter(has_text="endless")
    await expect(row.get_by_test_id("job-state")).to_have_text("running")
    await row.get_by_test_id("cancel-job").click()
    await page.get_by_role("dialog").get_by_role("button", name="Cancel the job").click()
    await expect(row.get_by_test_id("job-state")).to_have_text("cancelled", timeout=TRAINED_MS)
    assert stack.job(job_id).state is JobState.CANCELLED
