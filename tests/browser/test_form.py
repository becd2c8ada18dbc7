"""A new job: it is checked, its first prompts are shown, and nothing is created twice."""

import json
import re
from pathlib import Path
from typing import Any

from playwright.async_api import Locator, Page, expect

from tests.tiny_models import write_tied_model
from tests.world import job_body

PREVIEW_MS = 60_000  # a process loads the tokenizer, another one the reward
QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.toml"


def editor(page: Page) -> Locator:
    return page.get_by_label("The job as TOML")


def toml_of(value: Any) -> str:
    """Write a value as TOML on one line."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml_of(item)}" for key, item in value.items()) + " }"
    return json.dumps(value)


async def write(page: Page, job: dict[str, Any]) -> None:
    """Fill the editor with one line for each section."""
    await editor(page).fill("\n".join(f"{key} = {toml_of(value)}" for key, value in job.items()))


async def selected(page: Page) -> str:
    """Return the selected text of the editor, which has the focus."""
    await expect(editor(page)).to_be_focused()
    script = "(text) => text.value.slice(text.selectionStart, text.selectionEnd)"
    return str(await editor(page).evaluate(script))


async def test_wrong_field_is_named_with_its_line_and_found(visit, broker, ledger):
    visit.watch.expect("status of 422")
    page = await visit(broker.url, "#/new")
    await write(page, job_body(optimizer={"learning_rate": -1}))
    await page.get_by_test_id("submit-job").click()
    wrong = page.get_by_role("alert").get_by_role("listitem")
    await expect(wrong).to_contain_text("optimizer.learning_rate")
    await expect(editor(page)).to_have_attribute("aria-invalid", "true")
    described = await editor(page).get_attribute("aria-describedby")
    assert described is not None
    assert await page.get_by_role("alert").get_attribute("id") in described.split()
    await wrong.get_by_role("button", name="Line 7").click()
    assert await selected(page) == "optimizer = { learning_rate = -1 }"
    assert await ledger.jobs.ids() == []


async def test_check_names_all_fields_then_shows_the_first_prompts(visit, broker, ledger, tmp_path):
    visit.watch.expect("status of 422")
    model = write_tied_model(tmp_path / "model")
    rows = tmp_path / "my rows.jsonl"
    rows.write_text('{"question": "2 + 2?", "answer": "4"}\n', encoding="utf-8")
    page = await visit(broker.url, "#/new")
    job = job_body(model={"path": str(model)}, optimizer={"learning_rate": -1}, seed="one")
    del job["data"]
    sections = "".join(f"{key} = {toml_of(value)}\n" for key, value in job.items())
    await editor(page).fill(f'{sections}[data]\ntype = "reasoning_gym"\ntask = "chain_sum"\n# the end')
    await page.get_by_label("Upload a data file").set_input_files(rows)
    await page.get_by_role("button", name="Use it in [data]").click()
    assert await selected(page) == 'path = "datasets/my-rows.jsonl"'
    text = await editor(page).input_value()
    assert text.endswith('[data]\ntype = "jsonl"\npath = "datasets/my-rows.jsonl"\n# the end')
    check = page.get_by_test_id("check-job")
    await check.click()
    wrong = page.get_by_role("alert").get_by_role("listitem")
    await expect(wrong).to_have_count(3)
    await expect(wrong).to_contain_text(["optimizer.learning_rate", "seed", "data.prompt_field"])
    text = text.replace("learning_rate = -1", "learning_rate = 1e-5").replace('seed = "one"', "seed = 1")
    await editor(page).fill(text + '\nprompt_field = "question"\n')
    await check.click()
    await expect(page.get_by_role("heading", name="The broker would accept this job")).to_be_visible()
    prompt = page.get_by_role("group", name="Prompt 1")
    await expect(prompt).to_contain_text("2 + 2?", timeout=PREVIEW_MS)
    await expect(prompt).not_to_have_text("2 + 2?")  # the template is around it
    rewards = page.get_by_role("region", name="Rewards of prompt 1").get_by_role("row")
    await expect(rewards).to_have_text(
        [re.compile(row) for row in ("value", r"answer 4\s*exact\s*1", r"empty response\s*exact\s*0")]
    )
    await editor(page).press("x")
    await expect(page.get_by_role("heading", name="Accepted before your last change")).to_be_visible()
    await page.get_by_text("Rewards, tasks and environments to choose from").click()
    await expect(page.get_by_text("chain_sum", exact=True)).to_be_visible(timeout=PREVIEW_MS)
    assert await ledger.jobs.ids() == []


async def test_broken_toml_names_its_line(visit, broker, ledger):
    visit.watch.expect("status of 400")
    page = await visit(broker.url, "#/new")
    await editor(page).fill('name = "a"\nseed = \n')
    await page.get_by_test_id("submit-job").click()
    problem = page.get_by_role("alert")
    await expect(problem).to_contain_text("Malformed TOML")
    await problem.get_by_role("button", name="Line 2").click()
    assert await selected(page) == "seed = "
    assert await ledger.jobs.ids() == []


async def test_what_was_written_is_kept_when_the_page_is_left(visit, broker):
    page = await visit(broker.url, "#/new")
    await expect(editor(page)).to_have_value(QUICKSTART.read_text())
    await editor(page).fill("mine = 1")
    await page.get_by_role("link", name="Jobs").first.click()
    await expect(editor(page)).to_have_count(0)
    await page.go_back()
    await expect(editor(page)).to_have_value("mine = 1")


async def test_quick_start_takes_the_place_of_own_text_if_wanted(visit, broker):
    page = await visit(broker.url, "#/new")
    start = page.get_by_role("button", name="Start from the quick start")
    await expect(editor(page)).to_have_value(QUICKSTART.read_text())
    await editor(page).fill("mine = 1")
    await start.click()
    await page.get_by_role("dialog").get_by_role("button", name="Keep mine").click()
    await expect(editor(page)).to_have_value("mine = 1")
    await start.click()
    await page.get_by_role("dialog").get_by_role("button", name="Replace it").click()
    await expect(editor(page)).to_have_value(QUICKSTART.read_text())


async def test_job_like_another_one_has_its_configuration(visit, broker, ledger, world):
    data = {"now": "2026-11-29T08:00:00Z"}  # usually recorded by submission
    job_id = await world.create_job(name="first", data=data, schedule={"num_iterations": 7})
    page = await visit(broker.url, f"#/jobs/{job_id}")
    await page.get_by_role("link", name="Duplicate").click()
    await page.get_by_test_id("submit-job").click()
    await expect(page.get_by_role("progressbar", name="0 of 7 iterations")).to_be_visible()
    ids = await ledger.jobs.ids()
    configs = [json.loads((await ledger.jobs.fields(job_id))["config"]) for job_id in ids]
    assert (len(ids), configs[0]) == (2, configs[1])


async def test_double_click_creates_one_job(visit, broker, ledger):
    page = await visit(broker.url, "#/new")
    await write(page, job_body(name="only-one"))
    await page.get_by_test_id("submit-job").dblclick()
    await expect(page.get_by_role("heading", level=1, name="only-one")).to_be_visible()
    assert len(await ledger.jobs.ids()) == 1
