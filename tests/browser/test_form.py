"""The form of a new job: what the broker refuses is said beside the field, and nothing is created twice."""

import json
import re

from playwright.async_api import Locator, Page, expect

from onbeat.streams.ledger import Ledger
from tests.browser.conftest import Visitor
from tests.integration.broker_fixtures import job_body
from tests.integration.test_live_api import Broker


def field(page: Page, path: str) -> Locator:
    """By its label, which is the whole path for those who hear it."""
    return page.get_by_label(re.compile(rf"^{re.escape(path)}( \*)?$"))


async def write_json(page: Page, job: object) -> None:
    await page.get_by_role("button", name="Edit as JSON").click()
    await page.get_by_label("The job as JSON").fill(json.dumps(job))


async def test_empty_form_names_every_field_that_is_missing(visit: Visitor, broker: Broker, ledger: Ledger) -> None:
    visit.watch.expect("status of 422")
    page = await visit(broker.url, "#/new")
    await page.get_by_test_id("submit-job").click()
    for path in ("model.path", "reward.name", "rollout.num_prompts_per_iteration"):
        await expect(field(page, path)).to_have_attribute("aria-invalid", "true")
        await expect(page.locator(f"[id='{path}-error']")).not_to_be_empty()
    await expect(field(page, "model.path")).to_be_focused()
    await field(page, "model.path").fill("x")
    await expect(field(page, "model.path")).not_to_have_attribute("aria-invalid", "true")
    assert await ledger.job_ids() == []


async def test_wrong_value_in_a_folded_section_is_brought_into_sight(visit: Visitor, broker: Broker) -> None:
    visit.watch.expect("status of 422")
    page = await visit(broker.url, "#/new")
    await write_json(page, job_body(optimizer={"learning_rate": -1}))
    await page.get_by_role("button", name="Back to the form").click()
    rate, section = (
        field(page, "optimizer.learning_rate"),
        page.locator("details > summary", has_text="optimizer").first,
    )
    await expect(rate).to_have_value("-1")
    await section.click()
    await expect(rate).to_be_hidden()
    await page.get_by_test_id("submit-job").click()
    await expect(rate).to_be_focused()
    await expect(page.locator("[id='optimizer.learning_rate-error']")).to_contain_text("-1")


async def test_quick_start_is_filled_in_and_read_back_from_json(visit: Visitor, broker: Broker) -> None:
    page = await visit(broker.url, "#/new")
    await page.get_by_role("button", name="Fill in the quick start").click()
    await expect(field(page, "model.path")).to_have_value("bundled:smollm2-135m-instruct")
    await expect(field(page, "data.type")).to_have_value("reasoning_gym")
    await field(page, "rollout.max_response_tokens").fill("33")
    await page.get_by_role("button", name="Edit as JSON").click()
    text = page.get_by_label("The job as JSON")
    job = json.loads(await text.input_value())
    assert (job["data"]["task"], job["rollout"]["max_response_tokens"]) == ("basic_arithmetic", 33)
    job["rollout"]["max_response_tokens"] = 34
    await text.fill(json.dumps(job))
    await page.get_by_role("button", name="Back to the form").click()
    await expect(field(page, "rollout.max_response_tokens")).to_have_value("34")


async def test_double_click_creates_one_job(visit: Visitor, broker: Broker, ledger: Ledger) -> None:
    page = await visit(broker.url, "#/new")
    await write_json(page, job_body(name="only-one"))
    await page.get_by_test_id("submit-job").dblclick()
    await expect(page.get_by_role("heading", level=1, name="only-one")).to_be_visible()
    assert len(await ledger.job_ids()) == 1


async def test_broken_json_is_told_and_not_sent(visit: Visitor, broker: Broker) -> None:
    page = await visit(broker.url, "#/new")
    await page.get_by_role("button", name="Edit as JSON").click()
    await page.get_by_label("The job as JSON").fill('{"name": ')
    await page.get_by_test_id("submit-job").click()
    await expect(page.get_by_role("alert")).to_contain_text("no job in JSON")
    assert [request for request in visit.watch.requests if request.method == "POST"] == []
