"""The first thing to look at: the steps of a start, the verdict, the mark in the list, and what a view leaves out."""

import re

from playwright.async_api import expect

from tests.browser.conftest import Visitor


async def test_start_is_shown_in_steps_and_then_how_it_learns(visit, broker, ledger, world):
    job_id = await world.create_job()
    page = await visit(broker.url, f"#/jobs/{job_id}")
    step = page.get_by_test_id("start").locator("[aria-current=step]")
    await expect(step).to_have_text(re.compile("A trainer starts and takes the job, usually 5 to 20 s"))
    epoch = await ledger.trainer.claim_job(job_id, "trainer-a", 600)
    await expect(step).to_contain_text("The trainer loads the model, usually")
    await ledger.versions.announce(job_id, epoch, 0, "127.0.0.1:1", "d0")
    await world.wait_open(job_id, 0)
    await expect(step).to_contain_text("Rollouts load it into their engine, usually")
    await world.drain(job_id)
    await expect(page.get_by_test_id("start")).to_have_count(0)
    await world.commit(job_id, epoch, 0, reward_mean=0.5)
    verdict = page.get_by_test_id("doctor").locator("summary").first
    await expect(verdict).to_contain_text("Status")
    await expect(verdict).to_contain_text("reward 0.50")


async def test_job_with_a_finding_has_a_mark_in_the_list(visit, broker, ledger, world):
    job_id, epoch = await world.started_job()
    await world.wait_open(job_id, 0)
    await world.drain(job_id)
    await world.commit(job_id, epoch, 0)
    await ledger.trainer.renew_job(job_id, epoch, 0)  # nobody takes the job
    page = await visit(broker.url)
    mark = page.get_by_test_id("job-finding")
    await expect(mark).to_contain_text("! trainer-a stopped, died or lost its connection: its lease of it ran out")


async def test_read_only_view_shows_no_buttons_that_are_refused(visit: Visitor, ledger, world, tmp_path):
    job_id, _ = await world.started_job()
    async with visit.broker(ledger, tmp_path, is_read_only=True) as broker:
        for place in ("#/", f"#/jobs/{job_id}"):
            page = await visit(broker.url, place)
            await expect(page.get_by_test_id("job-state").first).to_have_text("running")
            await expect(page.get_by_text("read-only view")).to_be_visible()
            for name in (re.compile("^(Pause|Cancel|Delete)"), "Duplicate", "New job"):
                for role in ("button", "link"):
                    await expect(page.get_by_role(role, name=name)).to_have_count(0)
