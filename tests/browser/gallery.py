"""A broker with one job of each kind, for tests that only look; and each page of the dashboard, with what shows that it
is drawn."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from playwright.async_api import Locator, Page

from onbeat.contracts.records import TrainerRecord, WorkerRecord
from onbeat.contracts.states import JobState
from onbeat.streams.ledger import Ledger
from tests.broker_fixtures import serving
from tests.browser.seeding import WORKERS, Content, seed_examples, seed_job
from tests.world import World

SILENT_S = 60.0  # since the processes of the stuck job were last seen: longer than they may be silent
LONG = Content(prompts=("Say it at length. " * 40, "averyveryverylongwordwithoutanyspace" * 12), words=("blah",) * 60)

HELD_OUT = ("What is 6 + 3?", "What is 2 - 8?", "What is 4 + 4?", "What is 9 - 1?")
EPISODES = Content(held_out=HELD_OUT, is_episode=True, is_cut=True)
JUDGED = Content(held_out=HELD_OUT, is_judged=True, is_cut=True)
MIXED = Content(sources=("sums", "differences", "sums", "differences"))


@dataclass(frozen=True)
class Gallery:
    url: str
    job_ids: dict[str, str]  # ids by name

    def place(self, page: str) -> str:
        """Return the page's address, with the job's id in place of the name in 'job {learned}'."""
        return PAGES[page][0].format(**self.job_ids)


@asynccontextmanager
async def open_gallery(ledger: Ledger, folder: Path) -> AsyncIterator[Gallery]:
    ids = {
        "learned": await seed_job(ledger, "learned", num_iterations=30),
        "scored": await seed_job(ledger, "scored", num_iterations=30, content=Content(held_out=HELD_OUT)),
        "episodes": await seed_job(ledger, "episodes", num_iterations=2, content=EPISODES),
        "judged": await seed_job(ledger, "judged", num_iterations=4, content=JUDGED),
        "mixed": await seed_job(ledger, "mixed", num_iterations=4, content=MIXED),
        "paused": await seed_job(ledger, "paused", num_done=5, state=JobState.PAUSED),
        "cancelled": await seed_job(ledger, "cancelled", num_done=1, state=JobState.CANCELLED),
        "started": await seed_job(ledger, "started", num_done=0, state=JobState.RUNNING),
        "slower": await seed_job(ledger, "slower", num_iterations=20),
        "wordy": await seed_job(ledger, "wordy" + "name" * 23, num_iterations=3, content=LONG),
        "failed": await seed_job(ledger, "failed", num_done=2, state=JobState.FAILED),
        "stuck": await seed_job(ledger, "stuck", num_done=3, state=JobState.RUNNING),
        "examples": await seed_examples(ledger),
        "queued": await World(ledger).create_job(name="queued", pool="nobody-there"),
    }
    for worker in WORKERS:
        record = WorkerRecord(id=worker, job_id=ids["stuck"], state="generating", policy_version=3)
        await World(ledger).beat("default", record, ago_s=SILENT_S)
    trainer = TrainerRecord(id="trainer-0", job_id=ids["stuck"], state="training")
    await World(ledger).beat("default", trainer, ago_s=SILENT_S)
    async with serving(ledger, folder) as broker:
        yield Gallery(broker.url, ids)


LOSS = "[data-testid=chart-examples] canvas"
CHART, RESPONSE, SAMPLE = "[data-testid=chart-reward] canvas", "[data-testid=response]", "[data-testid=sample]"
# Place of each page, and a selector of what it is for, the last part of it that is loaded.
PAGES = {
    "jobs": ("#/", "[data-testid=job-row]"),
    "jobs with columns": ("#/?differ=1", "[data-testid=job-row] .job-value"),
    "new job": ("#/new", "[data-testid=submit-job]"),
    "job": ("#/jobs/{learned}", CHART),
    "job that failed": ("#/jobs/{failed}", CHART),
    "job that is stuck": ("#/jobs/{stuck}", CHART),
    "job that waits": ("#/jobs/{queued}", "[data-testid=doctor]"),
    "job with long names": ("#/jobs/{wordy}", CHART),
    "job that is paused": ("#/jobs/{paused}", CHART),
    "job that was cancelled": ("#/jobs/{cancelled}", CHART),
    "job that begins": ("#/jobs/{started}", "[data-testid=doctor]"),
    "job with a judge": ("#/jobs/{judged}", CHART),
    "job of several sources": ("#/jobs/{mixed}", CHART),
    "job of examples": ("#/jobs/{examples}", LOSS),
    "samples": ("#/jobs/{learned}/samples", SAMPLE),
    "samples without rewards": ("#/jobs/{judged}/samples", SAMPLE),
    "samples of examples": ("#/jobs/{examples}/samples?iteration=1", SAMPLE),
    "held-out samples": ("#/jobs/{judged}/samples?evaluation=4", SAMPLE),
    "samples of a source": ("#/jobs/{mixed}/samples?source=sums", SAMPLE),
    "no samples": ("#/jobs/{queued}/samples", "text=No response has been accepted yet"),
    "long samples": ("#/jobs/{wordy}/samples", SAMPLE),
    "group": ("#/jobs/{learned}/samples?group=29-0", RESPONSE),
    "group without rewards": ("#/jobs/{judged}/samples?group=3-0", RESPONSE),
    "group of examples": ("#/jobs/{examples}/samples?group=1-0", RESPONSE),
    "long group": ("#/jobs/{wordy}/samples?group=2-0", RESPONSE),
    "episodes": ("#/jobs/{episodes}/samples?group=1-0", RESPONSE),
    "timeline": ("#/jobs/{learned}/timeline", "[data-testid=timeline] [role=slider]"),
    "comparison": ("#/compare?jobs={learned},{slower}", ".chart canvas"),
    "timeline of nothing": ("#/jobs/{queued}/timeline", "h1"),
    "workers": ("#/workers", f"text={WORKERS[0]}"),
    "API": ("docs", "h1"),
    "no such page": ("#/nothing", "text=Page not found"),
}


def drawn(page: Page, name: str) -> Locator:
    return page.locator(PAGES[name][1]).first
