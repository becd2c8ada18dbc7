"""The API key: asked for, kept in the tab and nowhere else, and what a key without the right sees."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from playwright.async_api import Page, expect

from onbeat.contracts.states import JobState
from onbeat.process.api_keys import Role
from onbeat.streams.ledger import Ledger
from tests.broker_fixtures import Broker, Keys
from tests.browser.conftest import Visitor
from tests.browser.seeding import seed_job

REFUSED = r"status of 40[13]"  # the browser's note of each such answer


@pytest_asyncio.fixture(loop_scope="session")
async def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys.json")


@pytest_asyncio.fixture(loop_scope="session")
async def broker(visit: Visitor, ledger: Ledger, keys: Keys, tmp_path: Path) -> AsyncIterator[Broker]:
    await seed_job(ledger, "kept-secret", num_iterations=2)
    await seed_job(ledger, "under-way", num_iterations=2, num_done=1, state=JobState.RUNNING)
    async with visit.broker(ledger, tmp_path, api_keys_file=keys.path) as broker:
        yield broker


async def enter(page: Page, key: str) -> None:
    await page.get_by_label("API key").fill(key)
    await page.keyboard.press("Enter")


async def enters(page: Page, key: str) -> None:
    await enter(page, key)
    await expect(page.get_by_role("link", name="kept-secret")).to_be_visible()


async def test_only_the_right_key_lets_in_and_this_tab_alone(visit: Visitor, broker: Broker, keys: Keys) -> None:
    visit.watch.expect(REFUSED)
    page = await visit(broker.url)
    await expect(page.get_by_role("heading", level=1)).to_contain_text("asks for a key")
    await expect(page.get_by_text("kept-secret")).to_have_count(0)
    await enter(page, "onbeat_0_wrong")
    await expect(page.get_by_role("alert")).to_contain_text("not known")
    await expect(page.get_by_label("API key")).to_be_focused()
    await enters(page, keys.by_role[Role.READ])
    other = await page.context.new_page()
    await other.goto(broker.url)
    await expect(other.get_by_label("API key")).to_be_visible()
    await page.reload()
    await expect(page.get_by_role("link", name="kept-secret")).to_be_visible()


async def test_key_is_in_no_address_cookie_lasting_storage_or_markup(visit, broker, keys):
    visit.watch.expect(REFUSED)
    key = keys.by_role[Role.ADMIN]
    page = await visit(broker.url)
    await enters(page, key)
    await page.get_by_role("link", name="kept-secret").click()
    await expect(page.get_by_test_id("chart-reward")).to_be_visible()
    state = await page.context.storage_state(indexed_db=True)  # cookies, localStorage, IndexedDB
    assert key not in json.dumps(state)
    assert state["cookies"] == []
    assert key in await page.evaluate("JSON.stringify(sessionStorage)")
    assert key not in page.url
    assert all(key not in request.url for request in visit.watch.requests)
    assert key not in await page.content()
    await page.get_by_role("button", name="Forget key").click()
    await expect(page.get_by_label("API key")).to_be_visible()
    assert await page.evaluate("sessionStorage.length") == 0


async def test_revoked_key_is_asked_for_again(visit: Visitor, broker: Broker, keys: Keys) -> None:
    visit.watch.expect(REFUSED)
    page = await visit(broker.url)
    await enters(page, keys.by_role[Role.READ])
    keys.revoke(keys.by_role[Role.READ])
    await expect(page.get_by_label("API key")).to_be_visible()  # the list is asked for now and then


async def test_reader_sees_that_this_takes_another_role(visit: Visitor, broker: Broker, keys: Keys) -> None:
    visit.watch.expect(REFUSED)
    page = await visit(broker.url)
    await enters(page, keys.by_role[Role.READ])
    await page.get_by_role("row").filter(has_text="under-way").get_by_test_id("cancel-job").click()
    await page.get_by_role("dialog").get_by_role("button", name="Cancel the job").click()
    await expect(page.get_by_role("dialog")).to_contain_text("API key of role submit")
