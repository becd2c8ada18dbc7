"""A real headless browser, and brokers for it to look at. Without a browser these tests are skipped, but never in CI.

Browser, brokers and tests share one event loop, that of the session. A test fails for whatever its pages complain of:
see `watch.py`.
"""

import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, BrowserContext, Page, async_playwright, expect

from onbeat.streams.connection import connect
from onbeat.streams.ledger import Ledger
from tests.broker_fixtures import Broker, serving
from tests.browser.gallery import Gallery, open_gallery
from tests.browser.watch import Watch
from tests.conftest import own_redis

HERE = Path(__file__).parent
INSTALL_S = 600.0
STEP_MS = 10_000  # limit for one step of a page, on a machine that does other things as well
DESKTOP = {"width": 1280, "height": 800}

expect.set_options(timeout=STEP_MS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest.fixture(scope="session")
def chromium() -> str:
    """Return the path of a browser, which is installed where that is allowed."""
    try:
        done = subprocess.run([HERE / "install-chromium.sh"], capture_output=True, text=True, timeout=INSTALL_S)
        path, why = done.stdout.strip(), done.stderr.strip()
    except subprocess.TimeoutExpired:
        path, why = "", f"install-chromium.sh took more than {INSTALL_S:.0f} s"
    if path:
        return path
    if os.environ.get("CI"):
        pytest.fail(f"CI needs a browser:\n{why}")
    pytest.skip(f"no browser: {why.splitlines()[-1]}")


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def browser(chromium: str) -> AsyncIterator[Browser]:
    # Chromium's sandbox does not start as root; the only pages that it sees here are ours.
    no_sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=no_sandbox)
        yield browser
        await browser.close()


class Visitor:
    """Opens pages, each in a context of its own: no cookies, no storage, nothing cached."""

    def __init__(self, browser: Browser) -> None:
        self.watch = Watch()
        self._browser = browser
        self._contexts: list[BrowserContext] = []

    async def __call__(self, url: str, place: str = "#/", **options: Any) -> Page:
        """Open a page. `options` are those of the browser's context, such as its color_scheme."""
        context = await self._browser.new_context(**{"viewport": DESKTOP, "reduced_motion": "reduce"} | options)
        self._contexts.append(context)
        context.set_default_timeout(STEP_MS)
        await self.watch.look_at(context, url)
        page = await context.new_page()
        await page.goto(f"{url}/{place}")
        return page

    @asynccontextmanager
    async def broker(self, ledger: Ledger, folder: Path, **settings: Any) -> AsyncIterator[Broker]:
        """Run a broker that outlives the pages: they complain when it goes away."""
        async with serving(ledger, folder, **settings) as broker:
            try:
                yield broker
            finally:
                await self.leave()

    async def leave(self) -> None:
        while self._contexts:
            await self._contexts.pop().close()


@pytest_asyncio.fixture(loop_scope="session")
async def visit(browser: Browser) -> AsyncIterator[Visitor]:
    visitor = Visitor(browser)
    yield visitor
    await visitor.leave()
    visitor.watch.check()


@asynccontextmanager
async def own_ledger(folder: Path) -> AsyncIterator[Ledger]:
    with own_redis(folder / "redis") as url:
        redis = connect(url, retry_s=5)
        yield Ledger(redis)
        await redis.aclose()


@pytest_asyncio.fixture(loop_scope="session")
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    async with own_ledger(tmp_path) as ledger:
        yield ledger


@pytest_asyncio.fixture(loop_scope="session")
async def broker(visit: Visitor, ledger: Ledger, tmp_path: Path) -> AsyncIterator[Broker]:
    """Run a broker without API keys, on a Redis of its own."""
    async with visit.broker(ledger, tmp_path) as broker:
        yield broker


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def gallery(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gallery]:
    folder = tmp_path_factory.mktemp("gallery")
    async with own_ledger(folder) as ledger, open_gallery(ledger, folder) as gallery:
        yield gallery
