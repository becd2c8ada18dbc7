"""A job from its text to its last sample, on a real local stack: Redis, broker, trainer and a rollout as processes."""

import re
from collections.abc import Iterator

import pytest
from playwright.async_api import Page, expect

from onbeat.contracts.states import JobState
from tests.browser.test_form import write
from tests.e2e.stack import RunningStack, running, tiny_job


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with running(tmp_path_factory.mktemp("stack")) as stack:
        yield stack


async def test_job_is_submitted_followed_and_read_on_the_page(visit, stack):
    num_iterations = 3
    trained_ms = 90_000  # limit for a small job on a machine that does other things as well
    rollout = {"max_response_tokens": 48, "num_samples_per_prompt": 4}
    job = tiny_job(stack.data_dir.parent, rollout=rollout, schedule={"num_iterations": num_iterations})
    job["name"] = "from-the-page"
    page = await visit(stack.url)
    await page.get_by_role("link", name="New job").first.click()
    await expect(page.get_by_role("heading", level=1, name="New job")).to_be_visible()
    await write(page, job)
    await page.get_by_test_id("submit-job").click()
    await expect(page.get_by_role("heading", level=1, name="from-the-page")).to_be_visible()
    await page.evaluate("window.isSamePage = true")
    await expect(page.get_by_test_id("job-state").first).to_have_text("running")
    await expect(page.get_by_test_id("job-state").first).to_have_text("succeeded", timeout=trained_ms)
    await expect(page.get_by_role("progressbar").first).to_have_attribute("aria-valuenow", str(num_iterations))
    slider = page.get_by_test_id("chart-reward").get_by_role("slider")
    await expect(slider).to_have_attribute("aria-valuenow", str(num_iterations - 1))
    await shows_both_sides_of_the_pipeline(page)
    await shows_responses_token_by_token(page)
    assert await page.evaluate("window.isSamePage"), "it was loaded again"
    (record,) = stack.client.jobs.list()
    assert (record.state, record.name) == (JobState.SUCCEEDED, "from-the-page")


async def shows_both_sides_of_the_pipeline(page: Page) -> None:
    """Lanes with what each did; the arrow keys read the spans out as well."""
    await page.get_by_role("navigation", name="Pages of this job").get_by_role("link", name="Timeline").click()
    await expect(page.get_by_role("heading", level=1, name="Timeline of")).to_be_focused()  # the page is there
    timeline = page.get_by_test_id("timeline")
    slider = timeline.get_by_role("slider")
    await slider.focus()
    for key, lane, kinds in (
        ("ArrowRight", "trainer", "micro-batch|optimizer|publish|wait"),
        ("ArrowDown", "rollout-0", "generat|scor|pull|load"),
    ):
        await page.keyboard.press(key)
        description = re.compile(rf"{lane}: .*({kinds}).*(iteration|policy version) \d", re.IGNORECASE)
        await expect(slider).to_have_attribute("aria-valuetext", description)
        await expect(page.get_by_test_id("timeline-readout")).to_have_text(description)
    await expect(page.get_by_test_id("timeline-summary")).to_contain_text("the trainer was idle")
    await expect(page.get_by_test_id("timeline-summary")).to_contain_text(
        re.compile("Engine and trainer share|During ")
    )


async def shows_responses_token_by_token(page: Page) -> None:
    await page.get_by_role("navigation", name="Pages of this job").get_by_role("link", name="Samples").click()
    sample = page.get_by_test_id("sample").first
    await expect(sample).to_contain_text("say ")
    await expect(sample.get_by_text("known after the commit")).to_have_count(0)
    await sample.get_by_role("link", name="Open group").click()
    detail = page.get_by_test_id("group-detail")
    await expect(detail.get_by_test_id("response")).to_have_count(4)
    await detail.locator("[data-index='0']").first.hover()
    readout = page.get_by_test_id("token-readout")
    await expect(readout).to_have_text(re.compile(r"token 1 of \d+: .*probability \d"))
    await expect(readout).not_to_contain_text("not known")
