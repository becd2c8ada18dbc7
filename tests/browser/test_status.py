"""The first thing to look at: the steps of a start, the verdict, the mark in the list, and what a view leaves out."""

import re

from playwright.async_api import expect

from onbeat.contracts.records import WorkerRecord
from onbeat.contracts.states import JobState
from tests.browser.conftest import Visitor
from tests.browser.seeding import seed_job


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


async def test_only_the_opened_findings_have_an_open_mark(visit, gallery):
    page = await visit(gallery.url, gallery.place("job that is stuck"))
    doctor = page.get_by_test_id("doctor")
    await expect(doctor.locator(":scope > summary")).to_contain_text("problems")
    marks = "(node) => [...node.querySelectorAll('summary')].map((each) => getComputedStyle(each, '::before').content)"
    assert await doctor.evaluate(marks) == ['"▾"', "none"]


async def test_nobody_is_said_to_generate_where_no_rollout_lives(visit, broker, world):
    job_id, _ = await world.started_job()
    page = await visit(broker.url, f"#/jobs/{job_id}")
    await expect(page.get_by_test_id("iteration")).to_contain_text("Its prompts wait for a rollout.")
    await world.ledger.workers.heartbeat("default", WorkerRecord(id="w1", job_id=job_id, state="generating"))
    await expect(page.get_by_test_id("iteration")).to_contain_text("Rollouts generate; the trainer works")


async def test_late_iteration_leaves_the_time_left_out(visit, ledger, tmp_path):
    job_id = await seed_job(ledger, "late", num_done=3, state=JobState.RUNNING)
    async with visit.broker(ledger, tmp_path) as broker:
        page = await visit(broker.url, f"#/jobs/{job_id}")
        await expect(page.get_by_text(re.compile("so far, about .* left$"))).to_be_visible()
        await expect(page.get_by_text(re.compile("so far$"))).to_be_visible(
            timeout=15_000
        )  # ten seconds, and no commit
        await expect(page.get_by_test_id("doctor")).not_to_contain_text(" left")


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
        page = await visit(broker.url, "#/new")
        await expect(page.get_by_text("This view is read-only and creates no jobs.")).to_be_visible()
        await expect(page.get_by_test_id("submit-job")).to_have_count(0)


async def test_choice_of_prompts_is_shown_with_its_reasons(visit, broker, world):
    """The broker of this test chooses the first prompts, of which no iteration had any."""
    job_id, epoch = await world.started_job(data={"order": "difficulty"})
    await world.wait_open(job_id, 0)
    await world.drain(job_id)
    page = await visit(broker.url, f"#/jobs/{job_id}/samples?group=0-0")
    await expect(page.get_by_test_id("chosen")).to_have_text(
        re.compile(r"Row \d was chosen because no iteration had it yet\.")
    )
    await world.commit(job_id, epoch, 0, reward_mean=0.5)
    page = await visit(broker.url, f"#/jobs/{job_id}")
    await expect(page.locator("main")).to_contain_text("2 prompts chosen as new rows")
    await expect(page.get_by_role("heading", name="Choice of prompts")).to_be_visible()
