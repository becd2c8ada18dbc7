"""Pages with the samples of a model: filtered by reward and iteration, and token by token."""

import re

from playwright.async_api import Page, expect

from tests.browser.gallery import HELD_OUT, drawn
from tests.browser.seeding import Content, seed_job


async def rewards(page: Page) -> set[str]:
    return set(await page.get_by_test_id("sample").locator(".whole .num").all_inner_texts())


async def test_samples_are_filtered_by_reward_and_iteration(visit, gallery):
    page = await visit(gallery.url, gallery.place("samples"))
    await expect(page.get_by_text(re.compile("^Responses .*of iteration 29"))).to_be_visible()
    await expect(page.get_by_test_id("sample")).to_have_count(16)
    assert await rewards(page) == {"0", "1"}
    await page.get_by_label("Reward from").fill("0.5")
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("with a reward from 0.5")).to_be_visible()
    assert await rewards(page) == {"1"}
    await page.get_by_label("Iteration", exact=True).fill("0")
    await page.get_by_label("Reward from").fill("")
    await page.get_by_label("to", exact=True).fill("0.5")
    await page.keyboard.press("Enter")
    await expect(page.get_by_text(re.compile("of iteration 0.*up to 0.5"))).to_be_visible()
    assert await rewards(page) == {"0"}
    await page.reload()  # the address says what is shown
    await expect(page.get_by_text(re.compile("of iteration 0.*up to 0.5"))).to_be_visible()
    assert await rewards(page) == {"0"}


async def test_answers_before_and_after_are_side_by_side(visit, gallery):
    page = await visit(gallery.url, f"#/jobs/{gallery.job_ids['scored']}")
    await page.get_by_text("Before and after").click()
    answers = page.get_by_test_id("before-after")
    await expect(answers).to_contain_text("before and after 30 iterations: 0 of 4 answers are right before, 4 after.")
    await expect(answers.get_by_test_id("pair")).to_have_count(len(HELD_OUT))
    pair = answers.get_by_test_id("pair").filter(has_text=HELD_OUT[0])
    await expect(pair).to_contain_text(re.compile("Before ✗ wrong, reward 0.*After ✓ right, reward 1", re.DOTALL))


async def test_samples_are_filtered_by_end_and_text(visit, gallery):
    page = await visit(gallery.url, gallery.place("samples"))
    await page.get_by_label("Wrong").check()
    await expect(page.get_by_text("Wrong responses 1 to")).to_be_visible()
    assert await rewards(page) == {"0"}
    prompt = await page.get_by_role("group", name="Prompt", exact=True).first.inner_text()
    await page.get_by_label("Text in prompt").fill(prompt.upper())
    await page.keyboard.press("Enter")
    await expect(page.get_by_text(re.compile("Wrong responses.*with “WHAT IS"))).to_be_visible()
    await expect(page.get_by_test_id("sample").filter(has_not_text=prompt)).to_have_count(0)
    await page.get_by_label("Truncated").check()
    await expect(page.get_by_text("No truncated, wrong responses with “WHAT IS")).to_be_visible()
    await page.get_by_role("button", name="Reset").click()
    await expect(page.get_by_test_id("sample")).to_have_count(16)


async def test_responses_without_a_reward_are_neither_high_nor_wrong(visit, gallery):
    """The broker filters responses of an iteration, the page those of an evaluation."""
    judged = gallery.job_ids["judged"]
    for place, number, number_silent in (("", 16, 4), ("?evaluation=4", 4, 1)):
        page = await visit(gallery.url, f"#/jobs/{judged}/samples{place}")
        samples, silent = page.get_by_test_id("sample"), page.get_by_text("reward: no opinion")
        await expect(samples).to_have_count(number)
        await expect(silent).to_have_count(number_silent)
        await page.get_by_label("Truncated").check()
        await expect(samples).to_have_count(number_silent)
        await expect(silent).to_have_count(number_silent)
        await page.get_by_label("Wrong").check()
        await expect(page.get_by_text("No truncated, wrong responses here.")).to_be_visible()
        await page.get_by_label("Truncated").uncheck()
        await page.get_by_label("Wrong").uncheck()
        await page.get_by_label("Reward from").fill("0")
        await page.keyboard.press("Enter")
        await expect(samples).to_have_count(number - number_silent)
        await expect(silent).to_have_count(0)


async def test_episode_is_truncated_where_one_turn_is(visit, gallery):
    episodes = gallery.job_ids["episodes"]
    for place, number in (("", 4), ("?evaluation=2", 1)):
        page = await visit(gallery.url, f"#/jobs/{episodes}/samples{place}")
        await page.get_by_label("Truncated").check()
        await expect(page.get_by_text(re.compile("^Truncated responses 1 to"))).to_be_visible()
        samples = page.get_by_test_id("sample")
        await expect(samples).to_have_count(number)
        await expect(samples.filter(has_text="finished by itself")).to_have_count(0)


async def test_wrong_is_below_the_limit_of_the_held_out_set(visit, gallery):
    page = await visit(gallery.url)

    async def with_own_limit(route):
        answer = await route.fetch()
        job = await answer.json()
        job["config"]["evaluation"]["sets"] = [{"num_prompts": len(HELD_OUT), "solved_at": 2.0}]
        await route.fulfill(response=answer, json=job)

    await page.route(re.compile(r"/v1/jobs/job-\w+$"), with_own_limit)
    await page.goto(f"{gallery.url}/#/jobs/{gallery.job_ids['scored']}/samples?evaluation=30&wrong=1")
    await expect(page.get_by_test_id("sample")).to_have_count(len(HELD_OUT))


async def test_pages_name_the_broker_that_does_not_answer(visit, gallery):
    """The words stand alone: no heading is above them."""
    visit.watch.expect("ERR_CONNECTION_REFUSED")
    words = "The broker does not answer. Is it running, and can this machine reach it (Failed to fetch)?"
    for name, request in (("samples", "samples"), ("timeline", "timeline")):
        page = await visit(gallery.url, gallery.place(name))
        await expect(drawn(page, name)).to_be_visible()
        await page.route(f"**/{request}?*", lambda route: route.abort("connectionrefused"))
        if name == "samples":
            await page.get_by_label("Wrong").check()
        else:
            await page.get_by_label("Iterations", exact=True).select_option("1")
        await expect(page.get_by_text(words)).to_be_visible()


async def test_answers_without_rewards_are_neither_right_nor_wrong(visit, ledger, tmp_path):
    job_id = await seed_job(ledger, "silent", num_iterations=1, content=Content(held_out=HELD_OUT[:1], is_judged=True))
    async with visit.broker(ledger, tmp_path) as broker:
        page = await visit(broker.url, f"#/jobs/{job_id}")
        await page.get_by_text("Before and after").click()
        await expect(page.get_by_test_id("before-after")).to_contain_text("No recorded answer got a reward")


async def test_samples_of_several_sources_are_filtered_by_one(visit, ledger, tmp_path):
    content = Content(sources=("sums", "differences", "sums", "differences"))
    job_id = await seed_job(ledger, "mixed", num_iterations=2, content=content)
    async with visit.broker(ledger, tmp_path) as broker:
        page = await visit(broker.url, f"#/jobs/{job_id}/samples")
        await expect(page.get_by_test_id("sample")).to_have_count(16)
        await page.get_by_label("Source").select_option("differences")
        await expect(page.get_by_text(re.compile("of iteration 1.* of source differences"))).to_be_visible()
        await expect(page.get_by_test_id("sample")).to_have_count(8)
        await expect(page.get_by_test_id("sample").first).to_contain_text("(differences)")
        await page.get_by_label("Source").select_option("")
        await expect(page.get_by_test_id("sample")).to_have_count(16)


async def test_sample_shows_parts_of_its_reward_and_its_advantage(visit, gallery):
    prompts = Content().prompts
    page = await visit(gallery.url, gallery.place("samples"))
    sample = page.get_by_test_id("sample").filter(has_text=prompts[0]).first
    await expect(sample).to_contain_text("seven plus two is nine")
    for name, value in (("form", "0.5"), ("right", "[01]"), ("advantage", r"[^\d]?0(\.\d+)?")):
        await expect(sample).to_contain_text(re.compile(rf"{name}\s*{value}"))
    await expect(sample).to_contain_text("11 tokens")


async def test_token_probabilities_are_shown_by_pointer_and_keyboard(visit, gallery):
    page = await visit(gallery.url, gallery.place("group"))
    readout = page.get_by_test_id("token-readout")
    first = page.get_by_test_id("response").first
    await first.locator("[data-index='1']").hover()
    await expect(readout).to_have_text(re.compile(r"token 2 of 11: “·plus”, id 101, probability \d+\.\d%, log probab"))
    await first.get_by_role("group", name="Tokens of response 1").focus()
    await page.keyboard.press("ArrowRight")
    await expect(readout).to_contain_text("token 3 of 11: “·two”")
    await page.keyboard.press("End")
    await expect(readout).to_contain_text("token 11 of 11: no text of its own")


async def test_episode_is_shown_turn_by_turn(visit, gallery):
    page = await visit(gallery.url, gallery.place("episodes"))
    first = page.get_by_test_id("response").first
    turns = first.get_by_test_id("turn")
    await expect(turns).to_have_count(3)
    await expect(turns.nth(0)).to_contain_text("seven·plus·two")
    await expect(turns.nth(1)).to_contain_text("5 tokens observed, not trained")
    messages = ['assistant add({"left":7,"right":2})', "tool 7 + 2 = 9"]
    await expect(turns.nth(1).locator(".message")).to_have_text(messages)
    await expect(turns.nth(2)).to_contain_text("history rewritten: shares only the beginning of turn 2")
    await turns.nth(1).locator("[data-index='0']").hover()
    await expect(page.get_by_test_id("token-readout")).to_contain_text("turn 2, token 1 of 3: “·is”")


async def test_prompt_that_the_model_saw_has_special_tokens_marked(visit, gallery):
    page = await visit(gallery.url, gallery.place("group"))
    prompt = Content().prompts[0]
    decoded = page.get_by_test_id("decoded")
    await expect(decoded).to_contain_text(f"<|im_start|>user\n{prompt}<|im_end|>")
    await expect(decoded.locator(".special")).to_have_text(["<|im_start|>", "<|im_end|>"])
    page = await visit(gallery.url, gallery.place("samples"))
    sample = page.get_by_test_id("sample").filter(has_text=prompt).first
    await sample.get_by_text("Prompt as the model saw it").click()
    await expect(sample.get_by_role("group", name="Prompt as the model saw it")).to_contain_text("<|im_start|>user")
