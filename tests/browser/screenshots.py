"""Remakes docs/screenshots from two jobs of a local stack that is running, as a person sees them.

After `onbeat up --rollout-cores 0 --trainer-cores 1` and `onbeat jobs create examples/quickstart.toml`, twice, the
second one with another learning rate: `python -m tests.browser.screenshots http://127.0.0.1:8800 JOB OTHER_JOB`.
"""

import argparse
import asyncio
import io
import os
import subprocess
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.async_api import Browser, Page, async_playwright, expect

from tests.browser.gallery import drawn

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "screenshots"
INSTALL, INSTALL_S = Path(__file__).with_name("install-chromium.sh"), 600.0
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 375, "height": 700}
NUM_COLOURS = 200  # colours of a picture: more than a page has, except at the edges of its letters
STEP_MS = 30_000
SETTLE_MS = 1000  # until the curves of the list and the timeline of the job's page are there as well


async def open_page(browser: Browser, url: str, place: str, name: str, **options: Any) -> Page:
    """Open the page that has this `name` in the gallery."""
    page = await browser.new_page(**{"viewport": DESKTOP, "reduced_motion": "reduce"} | options)
    page.set_default_timeout(STEP_MS)
    await page.goto(f"{url}/{place}")
    await expect(drawn(page, name)).to_be_visible(timeout=STEP_MS)
    return page


async def save(page: Page, name: str, height: int) -> None:
    """Save a screenshot of the page's first `height` pixels."""
    width = page.viewport_size["width"] if page.viewport_size else DESKTOP["width"]
    await page.set_viewport_size({"width": width, "height": height})
    await page.wait_for_timeout(SETTLE_MS)
    picture = Image.open(io.BytesIO(await page.screenshot())).convert("RGB")
    FOLDER.mkdir(exist_ok=True)
    picture.quantize(NUM_COLOURS, dither=Image.Dither.NONE).save(FOLDER / f"{name}.png", optimize=True)
    await page.close()


async def take_all(browser: Browser, url: str, job: str, other: str) -> None:
    places = {
        "jobs": ("#/", "jobs", 400),
        "new-job": ("#/new", "new job", 1000),
        "job": (f"#/jobs/{job}", "job", 1500),
        "samples": (f"#/jobs/{job}/samples", "samples", 800),
        "timeline": (f"#/jobs/{job}/timeline", "timeline", 640),
        "compare": (f"#/compare?jobs={job},{other}", "comparison", 1000),
        "workers": ("#/workers", "workers", 560),
    }
    for name, (place, shown, height) in places.items():
        await save(await open_page(browser, url, place, shown), name, height)
    phone = {"viewport": PHONE, "device_scale_factor": 2, "is_mobile": True, "has_touch": True, "color_scheme": "dark"}
    await save(await open_page(browser, url, f"#/jobs/{job}", "job", **phone), "job-phone", height=1000)
    page = await open_page(browser, url, f"#/jobs/{other}/samples?max=0", "samples")  # it learns slowly
    await page.get_by_test_id("sample").get_by_role("link", name="Open group").first.click()
    await expect(drawn(page, "group")).to_be_visible()
    await page.get_by_test_id("response").first.locator(".token.level-3, .token.level-2, .token").first.hover()
    await save(page, "group", height=1000)


async def take(chromium: str, url: str, job: str, other: str) -> None:
    no_sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=no_sandbox)
        await take_all(browser, url, job, other)
        await browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, purpose in (("url", "of the broker"), ("job", "one that has trained"), ("other", "to compare it with")):
        parser.add_argument(name, help=purpose)
    install = subprocess.run([INSTALL], stdout=subprocess.PIPE, text=True, check=True, timeout=INSTALL_S)
    asyncio.run(take(install.stdout.strip(), **vars(parser.parse_args())))


if __name__ == "__main__":
    main()
