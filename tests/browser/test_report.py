"""The report of a job in a real browser: on a desk and a phone, in both themes, and on paper."""

import re
from pathlib import Path

import pytest
from playwright.async_api import Browser

from onbeat.client import AsyncClient
from onbeat.terminal.report_page import page_of
from onbeat.terminal.run_report import read_run_report
from tests.browser.gallery import Gallery
from tests.browser.test_accessibility import TOO_WIDE, violations

NUM_PAGES = 2
NAMES = ("scored", "stuck", "episodes", "wordy")


async def report_of(gallery: Gallery, name: str) -> str:
    async with AsyncClient(gallery.url) as client:
        return page_of(await read_run_report(client, gallery.job_ids[name]))


@pytest.mark.parametrize(("width", "theme"), [(1400, "light"), (390, "dark")])
async def test_report_fits_the_screen_without_barriers(
    browser: Browser, gallery: Gallery, tmp_path: Path, width: int, theme: str
) -> None:
    context = await browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
    page = await context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for name in reversed(NAMES):
        (tmp_path / "report.html").write_text(await report_of(gallery, name))
        await page.goto((tmp_path / "report.html").as_uri())
        assert await page.evaluate(TOO_WIDE, width) == [], name
        await page.evaluate("for (const part of document.querySelectorAll('details')) part.open = true")
        assert await page.evaluate(TOO_WIDE, width) == [], name
    assert await violations(page) == []
    is_dark = await page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(19, 20, 23)"
    assert is_dark == (theme == "dark")
    assert set(asked) == {(tmp_path / "report.html").as_uri()}
    await context.close()


@pytest.mark.parametrize("paper", ["A4", "Letter"])
async def test_report_is_printed_on_two_pages(browser: Browser, gallery: Gallery, tmp_path: Path, paper: str) -> None:
    page = await browser.new_page()
    for name in NAMES:
        (tmp_path / "report.html").write_text(await report_of(gallery, name))
        await page.goto((tmp_path / "report.html").as_uri())
        pdf = await page.pdf(format=paper)
        assert len(re.findall(rb"/Type\s*/Page\b", pdf)) == NUM_PAGES, name
    await page.close()
