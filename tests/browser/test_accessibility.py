"""Every page by axe in both themes, on a phone, and by keyboard alone."""

import re
from typing import Any

import pytest
from axe_core_python.base import AXE_FILE_PATH
from playwright.async_api import Page, expect

from tests.browser.gallery import PAGES, drawn

PHONE = {"width": 375, "height": 700}
MOST_PHONE_HEIGHT = 2500  # pixels of a job's page
AXE = "axe.run(document, {resultTypes: ['violations']}).then((result) => result.violations)"

# The script finds elements beyond the right edge that are not inside one that is cut off or scrolls by itself. A phone
# makes the page wider than the screen for them.
TOO_WIDE = """(width) => {
    const isCut = (node) => node.parentElement && (
        getComputedStyle(node.parentElement).overflowX !== "visible" || isCut(node.parentElement));
    return [...document.querySelectorAll("body *")]
        .filter((node) => node.getBoundingClientRect().right > width + 1 && !isCut(node))
        .map((node) => node.outerHTML.slice(0, 120));
}"""

BROKEN_IDS = """[...document.querySelectorAll(".pool, tbody .mono, tbody th a[href*='group=']")]
    .filter((each) => each.getClientRects().length > 1).map((each) => each.textContent)"""


async def violations(page: Page) -> list[str]:
    """Return the violations that axe-core finds. The page's policy would refuse its script: the context bypasses it."""
    await page.evaluate(AXE_FILE_PATH.read_text())
    return [described(violation) for violation in await page.evaluate(AXE)]


def described(violation: dict[str, Any]) -> str:
    nodes = "; ".join(f"{node['html'][:200]} ({node['failureSummary']})" for node in violation["nodes"][:3])
    return f"{violation['impact']} {violation['id']}: {violation['help']}: {nodes}"


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_no_page_has_barriers(visit, gallery, theme):
    page = await visit(gallery.url, color_scheme=theme, bypass_csp=True)
    problems = []
    for name in PAGES:
        await page.goto(f"{gallery.url}/{gallery.place(name)}")
        await expect(drawn(page, name)).to_be_visible()
        problems += [f"{name}: {violation}" for violation in await violations(page)]
    assert not problems, "\n".join(problems)


async def test_every_page_fits_a_phone(visit, gallery):
    """Nothing scrolls sideways, and ids stay on one line."""
    page = await visit(gallery.url, viewport=PHONE, has_touch=True, is_mobile=True)
    problems = []
    for name in PAGES:
        await page.goto(f"{gallery.url}/{gallery.place(name)}")
        await page.reload()  # else the last page may still be there
        await expect(drawn(page, name)).to_be_attached()
        problems += [f"{name} is too wide: {node}" for node in await page.evaluate(TOO_WIDE, PHONE["width"])]
        widths = await page.evaluate("[innerWidth, document.documentElement.scrollWidth]")
        problems += [f"{name} has the widths {widths}"] if widths != [PHONE["width"]] * 2 else []
        problems += [f"{name} breaks {id_}" for id_ in await page.evaluate(BROKEN_IDS)]
    assert not problems, "\n".join(problems)


async def test_controls_are_reached_on_a_phone(visit, gallery):
    page = await visit(gallery.url, viewport=PHONE, has_touch=True, is_mobile=True)
    for name in ("learned", "slower"):
        await page.get_by_role("checkbox", name=f"Select {name}").check()
    await expect(page.get_by_role("link", name="Compare")).to_be_visible()
    await page.goto(f"{gallery.url}/{gallery.place('job')}")
    await expect(page.get_by_test_id("chart-reward")).to_be_visible()
    height = await page.evaluate("document.documentElement.scrollHeight")
    assert height < MOST_PHONE_HEIGHT, "only the reward is not folded"
    await expect(page.get_by_test_id("chart-entropy")).to_have_count(0)
    await page.get_by_text(re.compile(r"^\d+ curves$")).click()
    await expect(page.get_by_test_id("chart-entropy")).to_be_visible()
    await page.goto(f"{gallery.url}/{gallery.place('samples')}")
    await expect(drawn(page, "samples")).to_be_attached()
    boxes = [await page.get_by_label(name, exact=True).bounding_box() for name in ("Reward from", "to")]
    assert len({box["y"] for box in boxes if box}) == 1, "the bounds of a reward are side by side"


async def test_chosen_theme_stays_and_else_it_is_that_of_the_system(visit, gallery):
    page = await visit(gallery.url, color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = await page.evaluate(background)
    await page.get_by_role("button", name="Switch to the light theme").click()
    light = await page.evaluate(background)
    await page.reload()
    assert [await page.evaluate(background), dark != light] == [light, True]
    other = await visit(gallery.url, color_scheme="light")
    assert await other.evaluate(background) == light


async def tab_to(page: Page, selector: str) -> None:
    """Move the focus with the Tab key, as users without a mouse do, and check that each stop is visible."""
    for _ in range(60):
        await page.keyboard.press("Tab")
        if await page.evaluate("(selector) => document.activeElement.matches(selector)", selector):
            outline = await page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert outline != "none", f"{selector} has the focus, and nothing shows it"
            return
    raise AssertionError(f"{selector} was not reached in 60 steps")


async def test_job_is_opened_and_its_chart_read_by_keyboard_alone(visit, gallery):
    job_id = gallery.job_ids["learned"]
    page = await visit(gallery.url)
    await expect(drawn(page, "jobs")).to_be_visible()
    await tab_to(page, f"a[href='#/jobs/{job_id}']")
    await page.keyboard.press("Enter")
    await expect(drawn(page, "job")).to_be_visible()
    await expect(page.get_by_role("heading", level=1)).to_be_focused()
    await tab_to(page, "[data-testid=chart-reward] [role=slider]")
    readout = page.get_by_test_id("chart-reward").get_by_role("slider")
    for key, iteration in (("End", "29"), ("ArrowLeft", "28"), ("ArrowLeft", "27"), ("Home", "0")):
        await page.keyboard.press(key)
        await expect(readout).to_have_attribute("aria-valuenow", iteration)
    await expect(readout).to_have_attribute("aria-valuetext", re.compile("^iteration 0: mean 0.2"))
    await expect(page.get_by_test_id("chart-reward").locator("figcaption")).to_contain_text("iteration 0")


async def test_link_to_the_content_skips_the_bar(visit, gallery):
    page = await visit(gallery.url)
    await expect(drawn(page, "jobs")).to_be_visible()
    await page.keyboard.press("Tab")
    await expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(page.locator("main")).to_be_focused()
    await expect(drawn(page, "jobs")).to_be_visible()
