"""The speed of the dashboard in a browser, on a job of 1,000 iterations with 100,000 responses and a list of 200 jobs.

The jobs are those of `dashboard_api.py`, and a real broker serves them over loopback to a headless Chromium on the same
machine. Each page is loaded LOADS times in a context of its own, so nothing is cached; figures are medians. A page is
`drawn` when its main content is there (the charts, the rows, the samples, the spans) since the navigation began, and
`interactive` when a click after that was answered and painted. Long tasks are those of over 50 ms on the page's thread.
`live` is a job of as many iterations that goes on while its page is open: how long after a commit its charts show it
(the broker looks at the job twice a second), and what drawing it costs the page.
"""

import asyncio
import os
import random
import shutil
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from dashboard_api import (
    JOB,
    NUM_GROUPS,
    NUM_RESPONSES,
    broker,
    create,
    make_group,
    make_iteration,
    report,
    write_jobs,
)
from harness import command_line, medians, note_redis, save, start, temporary_folder
from playwright.async_api import Browser, Page, async_playwright

from onbeat.config import JobConfig
from onbeat.contracts.states import JobState
from onbeat.streams.connection import connect
from onbeat.streams.ledger import Ledger
from tests.conftest import EMBEDDED, own_redis

NUM_ITERATIONS, NUM_JOBS, LOADS, NUM_LIVE = 1000, 200, 7, 7
NUM_LISTED = 50  # the page shows this many at first
STEP_MS = 30_000  # a page may take this long for one step

# Each page has a place, a selector of its main content, and the number of matches once it is drawn.
PAGES = {
    "jobs": ("#/", "[data-testid=job-row]", NUM_LISTED),
    "job": ("#/jobs/long", "[data-testid=chart-reward] canvas", 1),
    "samples": ("#/jobs/long/samples", "[data-testid=sample]", 10),
    "samples of 10,000": ("#/jobs/wide/samples", "[data-testid=sample]", 10),
    "timeline": ("#/jobs/long/timeline", "[data-testid=timeline] [role=slider]", 1),
    "timeline of 1,000 groups": ("#/jobs/wide/timeline", "[data-testid=timeline] [role=slider]", 1),
}

# `answered` is the time from the event of the first click to the frame after it, in milliseconds.
OBSERVE = """
window.longTasks = [];
new PerformanceObserver((list) => longTasks.push(...list.getEntries().map((task) => task.duration)))
    .observe({ type: "longtask", buffered: true });
window.answered = new Promise((resolve) => {
    const painted = (event) => setTimeout(() => resolve(performance.now() - event.timeStamp));
    addEventListener("click", (event) => requestAnimationFrame(() => painted(event)), { capture: true, once: true });
});
"""

# It resolves to milliseconds since the navigation began, after the frame that shows the content.
DRAWN = """([selector, count]) => new Promise((resolve) => {
    const painted = () => setTimeout(() => resolve(performance.now()));
    const look = () => requestAnimationFrame(document.querySelectorAll(selector).length >= count ? painted : look);
    look();
})"""

# It resolves to the Unix time in seconds at which the newest point is drawn, and the long tasks on the way there, which
# browsers report a moment later.
SHOWN = """(iteration) => new Promise((resolve) => {
    longTasks.length = 0;
    const slider = document.querySelector("[data-testid=chart-reward] [role=slider]");
    const report = (time) => setTimeout(() => resolve([time, longTasks]), 300);
    const painted = () => setTimeout(() => report(Date.now() / 1000));
    const look = () => requestAnimationFrame(slider.ariaValueNow === String(iteration) ? painted : look);
    look();
})"""


async def write_running_job(ledger: Ledger, num_iterations: int) -> str:
    """Write the running job and return its epoch, with which a process acts as its trainer."""
    epoch = await create(ledger, "running", num_iterations + NUM_LIVE + 1)
    for iteration in range(num_iterations):
        await make_iteration(ledger, "running", epoch, iteration, 2)
    return epoch


async def write_more_jobs(ledger: Ledger, count: int) -> None:
    """Write jobs for the list: most are over."""
    for index in range(count):
        config = JobConfig.model_validate(JOB | {"name": f"job-{index}", "schedule": {"num_iterations": 40}})
        await ledger.jobs.create(f"job-{index:04}", config.model_dump(mode="json"), 40, 0)
        if index % 10:
            await ledger.jobs.move(f"job-{index:04}", JobState.CANCELLED)


async def measure_load(browser: Browser, address: str, selector: str, count: int) -> dict[str, float]:
    async with opened(browser, address) as page:
        async with asyncio.timeout(STEP_MS / 1000):
            drawn_ms = await page.evaluate(DRAWN, [selector, count])
        answered_ms = await measure_click(page)
        tasks = await page.evaluate("longTasks")
    return {
        "drawn_ms": drawn_ms,
        "click_answered_ms": answered_ms,
        "interactive_ms": drawn_ms + answered_ms,
        "long_tasks": len(tasks),
        "longest_task_ms": max(tasks, default=0),
    }


@asynccontextmanager
async def opened(browser: Browser, address: str) -> AsyncIterator[Page]:
    """Open a page of a new context, so that nothing is cached."""
    context = await browser.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(STEP_MS)
    await context.add_init_script(OBSERVE)
    page = await context.new_page()
    await page.goto(address, wait_until="commit")
    yield page
    await context.close()


async def measure_click(page: Page) -> float:
    """Click the switch of the theme, which changes every pixel; return the milliseconds until the answer."""
    await page.locator("#theme").click()
    return float(await asyncio.wait_for(page.evaluate("answered"), STEP_MS / 1000))


async def measure_live(browser: Browser, url: str, ledger: Ledger, epoch: str, first: int) -> dict[str, Any]:
    delays, tasks = [], []
    async with opened(browser, f"{url}/#/jobs/running") as page, asyncio.timeout(NUM_LIVE * STEP_MS / 1000):
        await page.evaluate(DRAWN, ["[data-testid=chart-reward] canvas", 1])
        for iteration in range(first, first + NUM_LIVE):
            shown = asyncio.create_task(page.evaluate(SHOWN, iteration))
            committed_at = await commit_iteration(ledger, epoch, iteration)
            shown_at, long_tasks = await shown
            delays.append(1000 * (shown_at - committed_at))
            tasks.append(max(long_tasks, default=0))
    return {
        "commits": NUM_LIVE,
        "shown_after_ms": round(statistics.median(delays)),
        "shown_after_ms_max": round(max(delays)),
        "longest_task_ms": round(statistics.median(tasks)),
    }


async def commit_iteration(ledger: Ledger, epoch: str, iteration: int) -> float:
    """Play the rollout and the trainer of the iteration that the broker opens. Returns the Unix time of the commit."""
    dice, done = random.Random(iteration), 0
    while done < NUM_GROUPS:
        for claim in await ledger.rollout.claim("running", "w1", NUM_GROUPS, 600):
            await ledger.rollout.submit("running", claim.entry_id, make_group(claim.task, "w1", dice))
            done += 1
        await asyncio.sleep(0.01)
    version, digest = iteration + 1, f"d{iteration + 1}"
    await ledger.versions.announce("running", epoch, version, "127.0.0.1:1", digest)
    committed_at = time.time()
    await ledger.trainer.commit("running", epoch, iteration, version, digest, report(dice), "used")
    return committed_at


async def measure_loads(browser: Browser, url: str, num_loads: int) -> dict[str, Any]:
    loads: dict[str, list[dict[str, float]]] = {name: [] for name in PAGES}
    for turn in range(num_loads + 1):  # the first one of each warms up the broker
        for name, (place, selector, count) in PAGES.items():
            figures = await measure_load(browser, f"{url}/{place}", selector, count)
            loads[name] += [figures] if turn else []
    return {
        name: {figure: round(median, 1) for figure, median in medians(figures).items()}
        | {"interactive_ms_max": round(max(load["interactive_ms"] for load in figures), 1)}
        for name, figures in loads.items()
    }


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    no_sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    path = os.environ.get("ONBEAT_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=no_sandbox)
        yield browser
        await browser.close()


async def run(num_iterations: int, num_loads: int) -> dict[str, Any]:
    note_redis(EMBEDDED)
    with temporary_folder() as folder, own_redis(folder) as redis_url:
        redis = connect(redis_url)
        ledger = Ledger(redis)
        await write_more_jobs(ledger, NUM_JOBS - 3)
        epoch = await write_running_job(ledger, num_iterations)
        await write_jobs(ledger, num_iterations)  # the newest, so that they are listed first
        with broker(redis_url, folder) as (url, _):
            async with chromium() as browser:
                pages = await measure_loads(browser, url, num_loads)
                live = await measure_live(browser, url, ledger, epoch, num_iterations)
                version = f"Chromium {browser.version}"
        await redis.aclose()
    return {
        "num_iterations": num_iterations,
        "num_responses": num_iterations * NUM_GROUPS * NUM_RESPONSES,
        "num_jobs": NUM_JOBS,
        "browser": version,
        "loads": num_loads,
        "pages": pages,
        "live": live,
    }


if __name__ == "__main__":
    start(command_line(__doc__))
    save("dashboard_page", asyncio.run(run(NUM_ITERATIONS, LOADS)))
