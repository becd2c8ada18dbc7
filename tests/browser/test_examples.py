"""Supervised iterations: the pages say nothing of rewards and rollouts, which these do not have."""

import re

from playwright.async_api import expect

from tests.browser.gallery import drawn


async def test_job_of_examples_shows_its_loss_and_no_rollouts(visit, gallery):
    page = await visit(gallery.url, gallery.place("job of examples"))
    await expect(drawn(page, "job of examples")).to_be_visible()
    await expect(page.get_by_test_id("chart-examples")).to_have_count(1)  # it leads, and is not among the others, too
    await expect(page.get_by_text("The reward is shown")).to_have_count(0)
    beat = page.get_by_test_id("iteration")
    await expect(beat).to_contain_text("0 of 2 rows are in, open since")
    await expect(beat).to_contain_text("The trainer tokenises the rows of examples.")
    await expect(beat).to_contain_text(re.compile(r"Examples\s*2\s*8 learned tokens in 2 rows"))
    await expect(beat).to_contain_text(re.compile(r"Loss of examples\s*1.25"))
    for word in ("Rollouts", "a rollout", "No rollout", "esponses", "generating", "weight sync", "groups"):
        await expect(beat).not_to_contain_text(word)


async def test_job_of_examples_waits_for_no_rollout_at_its_start(visit, broker, ledger, world):
    start = {"data": {"type": "jsonl", "path": "examples.jsonl"}, "num_rows_per_iteration": 2}
    sections = {"objective": {"type": "sft"}, "warm_start": start, "data": start["data"], "reward": None}
    sections |= {"rollout": None}
    job_id = await world.create_job(**sections)
    page = await visit(broker.url, f"#/jobs/{job_id}")
    await expect(page.get_by_text("The loss of the examples is shown from the first committed")).to_be_visible()
    steps = page.get_by_test_id("start").locator("li")
    await expect(steps).to_have_count(3)
    await expect(steps.last).to_contain_text("The first rows of examples are tokenised")


async def test_rows_of_examples_have_no_reward_and_all_their_answers(visit, gallery):
    page = await visit(gallery.url, gallery.place("samples of examples"))
    sample = page.get_by_test_id("sample").first
    await expect(sample).to_contain_text("example: learned, without a reward")
    await expect(sample).to_contain_text(re.compile(r"4 learned tokens\s*$"))
    page = await visit(gallery.url, gallery.place("group of examples"))
    group = page.get_by_test_id("group-detail")
    await expect(group).to_contain_text("an example, tokenised by trainer-0")
    turns = group.get_by_test_id("turn")
    await expect(turns).to_contain_text([re.compile(r"^\s*Turn 1\s*9\s*$"), re.compile("And 3 more\\?.*12", re.DOTALL)])
    for word in ("generated in", "scored in", "environment", "opinion", "probability", "(empty)"):
        await expect(group).not_to_contain_text(word)
