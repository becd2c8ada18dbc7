"""A job page that follows: what happens to the job appears without a reload, also after the broker was away."""

from urllib.parse import parse_qs, urlsplit

from playwright.async_api import Page, expect

from onbeat.contracts.states import JobState
from tests.broker_fixtures import serving
from tests.browser.conftest import Visitor
from tests.conftest import free_port
from tests.integration.broker.test_live_api import ledger_events
from tests.waiting import eventually
from tests.world import failed_group, make_group


async def expect_progress(page: Page, done: int, total: int) -> None:
    await expect(page.get_by_role("progressbar", name=f"{done} of {total} iterations").first).to_be_visible()


async def expect_state(page: Page, state: str) -> None:
    await expect(page.get_by_test_id("job-state").first).to_have_text(state)


async def test_page_shows_what_happens_without_a_reload(visit, broker, ledger, world):
    job_id = await world.create_job(schedule={"num_iterations": 4})
    page = await visit(broker.url, f"#/jobs/{job_id}")
    await expect_state(page, "pending")
    epoch = await world.start_training(job_id)
    await expect_state(page, "running")
    await world.train(job_id, epoch, range(2))
    await expect_progress(page, 2, 4)
    reward = page.get_by_test_id("chart-reward")
    await expect(reward.get_by_role("slider")).to_have_attribute("aria-valuenow", "1")
    await world.train(job_id, epoch, range(2, 4))
    await expect(reward.get_by_role("slider")).to_have_attribute("aria-valuenow", "3")
    await ledger.jobs.move(job_id, JobState.SUCCEEDED)
    await expect_state(page, "succeeded")
    await expect_progress(page, 4, 4)
    await reward.get_by_text("Values").click()
    await expect(reward.locator("tbody tr")).to_have_count(4)


async def test_page_shows_a_held_out_reward_without_a_reload(visit, broker, world):
    held_out = {"data": {"type": "jsonl", "path": "prompts.jsonl"}, "num_prompts": 2, "num_samples_per_prompt": 2}
    job_id = await world.create_job(evaluation=held_out)
    page = await visit(broker.url, f"#/jobs/{job_id}")
    await world.start_training(job_id)
    await world.drain_evaluation(job_id, 0)
    await expect(page.get_by_test_id("chart-held-out").get_by_role("slider")).to_have_attribute("aria-valuenow", "0")


async def test_list_shows_new_jobs_and_states_without_a_reload(visit, broker, world):
    page = await visit(broker.url)
    await expect(page.get_by_role("heading", level=1)).to_be_visible()
    await expect(page.get_by_test_id("job-row")).to_have_count(0)
    job_id = await world.create_job(name="comes-later")
    row = page.get_by_test_id("job-row").filter(has_text="comes-later")
    await expect(row.get_by_test_id("job-state")).to_have_text("pending")
    await world.start_training(job_id)
    await expect(row.get_by_test_id("job-state")).to_have_text("running")


async def test_page_says_which_groups_dynamic_sampling_replaced(visit, broker, ledger, world):
    rollout = {"num_prompts_per_iteration": 2, "max_prompts_per_iteration": 3}
    job_id, epoch = await world.started_job(rollout=rollout)
    await world.wait_open(job_id, 0)
    page = await visit(broker.url, f"#/jobs/{job_id}")
    beat = page.get_by_test_id("iteration")
    (claim,) = await world.claim_all(job_id, count=1)
    await ledger.rollout.submit(job_id, claim.entry_id, failed_group(claim.task))
    await expect(beat).to_contain_text("1 of 3 groups are in; 1 of them failed; 1 of them replaced, open since")
    for make in (failed_group, make_group):
        (claim,) = await world.claim_all(job_id, count=1)
        await ledger.rollout.submit(job_id, claim.entry_id, make(claim.task))
    short = "2 of them failed; 1 of them replaced; 1 of them not replaced: no prompts are left"
    await expect(beat).to_contain_text(f"3 of 3 groups are in; {short}")
    await world.commit(job_id, epoch, 0)
    await expect(beat).to_contain_text(f"in 3 groups, {short.replace(';', ',')}")
    await expect(page.locator(".event-kind.warn")).to_have_text("iteration.short")


async def test_page_says_what_a_stuck_job_waits_for(visit, broker, world):
    job_id = await world.create_job(pool="nobody-there")
    page = await visit(broker.url, f"#/jobs/{job_id}")
    await expect(page.get_by_test_id("doctor")).to_contain_text("trainer of pool nobody-there")


async def test_job_is_paused_resumed_and_cancelled_from_its_page(visit, broker, ledger, world):
    job_id, _ = await world.started_job()
    page = await visit(broker.url, f"#/jobs/{job_id}")
    await page.get_by_test_id("pause-job").click()
    await expect_state(page, "paused")
    assert await ledger.jobs.state(job_id) is JobState.PAUSED
    await page.get_by_test_id("resume-job").click()
    await expect_state(page, "running")
    assert await ledger.jobs.state(job_id) is JobState.RUNNING
    await page.get_by_test_id("cancel-job").click()
    await page.get_by_role("dialog").get_by_role("button", name="Keep it").click()
    assert await ledger.jobs.state(job_id) is JobState.RUNNING
    await page.get_by_test_id("cancel-job").click()
    await page.get_by_role("dialog").get_by_role("button", name="Cancel the job").click()
    await expect_state(page, "cancelling")
    await ledger.jobs.move(job_id, JobState.CANCELLED)  # the trainer has seen it
    await expect_state(page, "cancelled")
    await ledger.jobs.resume(job_id, JobState.CANCELLED)  # the same move as from a terminal
    await expect_state(page, "pending")
    await world.start_training(job_id)
    await expect_state(page, "running")


async def test_next_page_of_samples_is_of_the_same_iteration(visit, broker, world):
    job_id, epoch = await world.started_job(rollout={"num_prompts_per_iteration": 11, "num_samples_per_prompt": 2})
    await world.train(job_id, epoch, range(1))
    page = await visit(broker.url, f"#/jobs/{job_id}/samples")
    await expect(page.get_by_text("Responses 1 to 20 of iteration 0")).to_be_visible()
    await world.train(job_id, epoch, range(1, 2))
    await page.get_by_role("button", name="Next", exact=True).click()
    await expect(page.get_by_text("Responses 21 to 22 of iteration 0")).to_be_visible()


async def test_stream_is_taken_up_again_after_the_broker_was_restarted(visit, ledger, world, tmp_path):
    not_reached = r"ERR_CONNECTION_REFUSED|ERR_INCOMPLETE_CHUNKED|ERR_CONNECTION_RESET|status of 503"
    visit.watch.expect(not_reached)
    port, job_id = free_port(), await world.create_job(schedule={"num_iterations": 4})
    epoch = await world.start_training(job_id)
    async with serving(ledger, tmp_path, port=port) as broker:
        page = await visit(broker.url, f"#/jobs/{job_id}")
        await world.train(job_id, epoch, range(1))
        await expect_progress(page, 1, 4)
        await world.wait_open(job_id, 1)
        shown = page.get_by_test_id("events").get_by_role("listitem")
        await expect(shown).to_have_count(len(await ledger_events(ledger, job_id)))
    await world.drain(job_id)
    assert await world.commit(job_id, epoch, 1, reward_mean=0.75)  # while no broker is there
    async with visit.broker(ledger, tmp_path, port=port) as broker:
        await expect_progress(page, 2, 4)
        await world.train(job_id, epoch, range(2, 4))
        await expect_progress(page, 4, 4)
        slider = page.get_by_test_id("chart-reward").get_by_role("slider")
        await expect(slider).to_have_attribute("aria-valuenow", "3")
        await expect(shown).to_have_count(len(await ledger_events(ledger, job_id)))
        assert cursors(visit)[-1] in await ledger_events(ledger, job_id), "it was sent again from the beginning"


def cursors(visit: Visitor) -> list[str]:
    """After which event each stream was asked for."""
    addresses = [urlsplit(request.url) for request in visit.watch.requests]
    return [parse_qs(address.query)["after"][0] for address in addresses if address.path.endswith("/stream")]


async def test_page_that_is_left_listens_no_more(visit, broker, world):
    job_id = await world.create_job()
    page = await visit(broker.url, f"#/jobs/{job_id}")

    await eventually("the page listens", lambda: broker.num_watchers == 1)
    await page.get_by_role("navigation", name="Pages").get_by_role("link", name="Jobs").click()
    await eventually("nobody listens", lambda: broker.num_watchers == 0)
