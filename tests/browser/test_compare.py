"""Several jobs on the same axes, chosen in the list."""

from playwright.async_api import expect

from tests.browser.gallery import drawn


async def test_jobs_ticked_in_the_list_are_compared(visit, gallery):
    page = await visit(gallery.url)
    for name in ("learned", "slower"):
        row = page.get_by_test_id("job-row").filter(has=page.get_by_role("link", name=name))
        await row.get_by_role("checkbox").check()
    await page.get_by_role("link", name="Compare").click()
    await expect(page.get_by_role("heading", level=1, name="Compare 2 jobs")).to_be_visible()
    reward = page.get_by_test_id("chart-reward")
    await reward.get_by_text("Values").click()
    rows = reward.locator("tbody tr")
    await expect(rows).to_have_count(30)
    await expect(rows.filter(has_text="\N{EN DASH}")).to_have_count(10)  # the other one has 20 iterations
    for row in (await rows.all())[20:]:
        await expect(row).to_contain_text("\N{EN DASH}")
    for name in ("learned", "slower"):
        await expect(reward.get_by_role("listitem").filter(has_text=name)).to_be_visible()
        await expect(page.get_by_role("columnheader", name=name).first).to_be_visible()
    different = page.get_by_role("row").filter(has_text="schedule.num_iterations")
    await expect(different.get_by_role("cell")).to_have_text(["30", "20"])
    await expect(page.get_by_role("row").filter(has_text="optimizer.learning_rate")).to_have_count(0)


async def test_pointing_at_one_chart_marks_the_iteration_on_all_charts(visit, gallery):
    page = await visit(gallery.url, gallery.place("comparison"))
    await expect(drawn(page, "comparison")).to_be_visible()
    await page.get_by_test_id("chart-reward").get_by_role("slider").focus()
    await page.keyboard.press("Home")
    other = page.get_by_test_id("chart-entropy").get_by_role("slider")
    await expect(other).to_have_attribute("aria-valuenow", "0")
    await expect(other).to_have_attribute("aria-valuetext", "iteration 0: learned 1.2, slower 1.2 nats")
    await page.keyboard.press("Escape")
    await expect(other).to_have_attribute("aria-valuenow", "29")


async def test_jobs_that_are_gone_are_named_and_the_others_shown(visit, gallery):
    visit.watch.expect("status of 404")
    page = await visit(gallery.url, gallery.place("comparison") + ",job-that-is-gone")
    await expect(drawn(page, "comparison")).to_be_visible()
    await expect(page.get_by_text("job-that-is-gone")).to_be_visible()
