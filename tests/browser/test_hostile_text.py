"""The dashboard shows hostile text of users and models as text, and it never becomes part of the page."""

from playwright.async_api import Page, expect

from tests.browser.seeding import Content, seed_job

SCRIPT = "<script>window.hacked = 1</script>"
IMAGE = "<img src=x onerror='window.hacked = 2'>"
LINK = "<a href='javascript:window.hacked = 3'>press me</a>"
SVG = "</textarea></pre><svg onload='window.hacked = 4'>"
CONTENT = Content(prompts=(f"prompt {SCRIPT}{IMAGE}", f"{SVG} &lt;b&gt;"), words=(IMAGE, LINK, SVG, "${1+1} {{1+1}}"))


async def assert_harmless(page: Page) -> None:
    assert await page.evaluate("window.hacked") is None
    assert (
        await page.locator("main :is(script, iframe, object, [onerror], [onload], [href^='javascript:'])").count() == 0
    )


async def test_markup_in_names_prompts_and_responses_is_text(visit, ledger, tmp_path):
    name = f"name {IMAGE}{LINK}"
    job_id = await seed_job(ledger, name, num_iterations=2, content=CONTENT)
    other = await seed_job(ledger, SCRIPT, num_iterations=2)
    await ledger.event_log.emit(job_id, f"kind {IMAGE}", f"message {IMAGE}{SCRIPT}")
    samples = f"#/jobs/{job_id}/samples"
    places = ["#/", f"#/jobs/{job_id}", samples, f"#/jobs/{job_id}/timeline", f"#/compare?jobs={job_id},{other}"]
    async with visit.broker(ledger, tmp_path) as broker:
        for place in places:
            page = await visit(broker.url, place)
            await expect(page.get_by_text(name).first).to_be_visible()
            if place == samples:
                await expect(page.get_by_text(CONTENT.prompts[0]).first).to_be_visible()
                await expect(page.get_by_test_id("sample").filter(has_text=IMAGE + " " + LINK).first).to_be_visible()
            await assert_harmless(page)


async def test_markup_in_an_address_is_text(visit, ledger, tmp_path):
    visit.watch.expect("status of 4")  # there is no such job
    async with visit.broker(ledger, tmp_path) as broker:
        for place in ("#/jobs/%3Cimg%20src=x%20onerror=window.hacked=1%3E", "#/%3Csvg%20onload=window.hacked=1%3E"):
            page = await visit(broker.url, place)
            await expect(page.get_by_role("heading", level=1)).to_be_visible()
            await assert_harmless(page)
