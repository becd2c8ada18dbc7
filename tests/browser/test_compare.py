"""Several jobs on the same axes, chosen in the list."""

from playwright.async_api import expect

from tests.browser.gallery import drawn
from tests.browser.seeding import seed_reward


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
    await expect(reward.get_by_role("listitem")).to_contain_text(["num_iterations=30", "num_iterations=20"])
    for name in ("learned", "slower"):
        await expect(page.get_by_role("columnheader", name=name).first).to_be_visible()
    headings = page.get_by_role("heading", level=2)
    await expect(headings).to_have_text(["Configuration differences", "Results", "Curves"])
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
    await expect(other).to_have_attribute(
        "aria-valuetext", "iteration 0: num_iterations=30 1.2, num_iterations=20 1.2 nats"
    )
    await page.keyboard.press("Escape")
    await expect(other).to_have_attribute("aria-valuenow", "29")


async def test_seeds_of_a_job_are_one_line_with_a_band(visit, ledger, world, tmp_path):
    slow, fast = {"learning_rate": 1e-6}, {"learning_rate": 3e-5}
    ids = [
        await seed_reward(world, 0.25, seed=0, optimizer=slow),
        await seed_reward(world, 0.5, seed=0, optimizer=fast),
        await seed_reward(world, 0.75, seed=1, optimizer=slow),
    ]
    async with visit.broker(ledger, tmp_path) as broker:
        page = await visit(broker.url, f"#/compare?jobs={','.join(ids)}")
        await expect(page.get_by_test_id("chart-reward").get_by_role("listitem")).to_have_text(
            ["learning_rate=1e-6, 2 seeds0.5, lowest to highest: 0.25 to 0.75", "learning_rate=3e-50.5"]
        )
        differences = page.get_by_role("region", name="Configuration differences")
        await expect(differences.get_by_role("row", name="seed").get_by_role("cell")).to_have_text(["0", "0", "1"])
        colours = [await swatch.get_attribute("style") for swatch in await differences.locator("svg").all()]
        assert colours[0] == colours[2] != colours[1]


async def test_ninth_line_is_left_out_and_more_seeds_are_not(visit, ledger, world, tmp_path):
    ids = [await seed_reward(world, 0.5, seed=seed) for seed in (0, 1)]
    ids += [await seed_reward(world, 0.5, optimizer={"learning_rate": number * 1e-5}) for number in range(1, 9)]
    async with visit.broker(ledger, tmp_path) as broker:
        page = await visit(broker.url, f"#/compare?jobs={','.join(ids)}")
        await expect(page.get_by_role("heading", level=1, name="Compare 9 jobs")).to_be_visible()
        await expect(page.get_by_test_id("chart-reward").get_by_role("listitem")).to_have_count(8)
        await expect(page.get_by_text("left out: 1 of 10 jobs")).to_be_visible()


async def test_jobs_that_are_gone_are_named_and_the_others_shown(visit, gallery):
    visit.watch.expect("status of 404")
    page = await visit(gallery.url, gallery.place("comparison") + ",job-that-is-gone")
    await expect(drawn(page, "comparison")).to_be_visible()
    await expect(page.get_by_text("job-that-is-gone")).to_be_visible()
