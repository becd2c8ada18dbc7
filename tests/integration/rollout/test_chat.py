"""Talking to a policy while it trains: OpenAI's client, a real broker and Redis, rollouts with a real tiny model."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from prometheus_client import REGISTRY

from onbeat.contracts.completions import CompletionRequest
from onbeat.contracts.states import JobState
from onbeat.engines import ChatSampling, Sampling
from onbeat.process.api_keys import Role
from onbeat.streams.chat import Chats, Reply
from onbeat.streams.keys import JobKeys
from onbeat.streams.ledger import Ledger
from services.broker.chat import desk as broker_chats
from services.rollout.chat import server as rollout_chat
from tests.broker_fixtures import Keys
from tests.integration.rollout.chat_rig import HELLO, ChatRig, PacedEngine, chatting
from tests.rollout_fakes import FakeEngine

LIMIT_S = 60.0
LONG = 400  # tokens that nobody waits for


@pytest_asyncio.fixture
async def rig(ledger: Ledger, tmp_path: Path) -> AsyncIterator[ChatRig]:
    async with chatting(ledger, tmp_path, chat_take_s=50.0) as rig:
        yield rig


@pytest_asyncio.fixture
async def impatient(ledger: Ledger, tmp_path: Path) -> AsyncIterator[ChatRig]:
    """Run a broker that waits only 3 s for a rollout."""
    async with chatting(ledger, tmp_path, chat_take_s=3.0) as rig:
        yield rig


async def start(rig: ChatRig, engine: Any = None, **settings: Any) -> Any:
    """Start a rollout that serves the job."""
    engine = engine or PacedEngine()
    rig.start_worker(engine, **settings)
    await rig.until_serving()
    return engine


async def refused(rig: ChatRig, status: int, code: str, **fields: Any) -> str:
    """Assert that a chat is refused with this status and code, and return the message."""
    with pytest.raises(openai.APIStatusError) as caught:
        await rig.ask(**fields)
    assert (caught.value.status_code, caught.value.code) == (status, code), caught.value
    return str(caught.value.body["message"])  # type: ignore[index]


# ---- answers -------------------------------------------------------------------------------------------------------


async def test_official_client_gets_the_sampled_text_with_true_counts(rig: ChatRig) -> None:
    engine = await start(rig)

    def ask() -> Any:
        with openai.OpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == [rig.job_id]
            return client.chat.completions.with_raw_response.create(**rig.request(temperature=0.7, n=2))

    raw = await asyncio.to_thread(ask)
    completion = raw.parse()
    assert raw.headers["onbeat-policy-version"] == "0"
    assert completion.system_fingerprint == f"{rig.job_id}@0"
    assert completion.model == rig.job_id
    encoded = rig.prompt_token_ids()
    assert completion.usage.prompt_tokens == len(encoded)
    expected = [(await engine.generate(encoded, 1, Sampling(12, 0.7, 5 + index), 0))[0] for index in range(2)]
    assert [choice.message.content for choice in completion.choices] == [response.text for response in expected]
    assert [choice.finish_reason for choice in completion.choices] == [choice.finish_reason for choice in expected]
    assert completion.usage.completion_tokens == sum(len(response.token_ids) for response in expected)
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + completion.usage.completion_tokens


async def test_streamed_pieces_are_the_whole_answer(rig: ChatRig) -> None:
    await start(rig)
    whole = await rig.ask(n=3, max_tokens=40)
    assert len({choice.message.content for choice in whole.choices}) == 3
    texts, reasons, roles, usages = ["", "", ""], [None] * 3, [0] * 3, []
    async with rig.client() as client:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        stream = await client.chat.completions.create(**rig.request(n=3, max_tokens=40), **options)
        assert stream.response.headers["onbeat-policy-version"] == "0"
        async for chunk in stream:
            assert chunk.system_fingerprint == f"{rig.job_id}@0"
            usages.append(chunk.usage)
            for choice in chunk.choices:
                assert reasons[choice.index] is None
                texts[choice.index] += choice.delta.content
                roles[choice.index] += choice.delta.role == "assistant"
                reasons[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert roles == [1, 1, 1]
    assert len(usages) > 10
    assert usages[-1] == whole.usage
    assert set(usages[:-1]) == {None}


async def test_stream_is_events_of_one_line_and_a_last_word(rig: ChatRig) -> None:
    await start(rig)
    async with httpx.AsyncClient(trust_env=False, timeout=LIMIT_S) as client:
        answer = await client.post(f"{rig.url}/v1/chat/completions", json=rig.request(stream=True))
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, last, end = answer.text.split("\n\n")
    assert all(event.startswith("data: {") and "\n" not in event for event in events)
    assert (last, end) == ("data: [DONE]", "")


async def test_answer_ends_before_a_stop_string_with_tokens_counted(rig: ChatRig) -> None:
    engine = await start(rig, PacedEngine(is_endless=True))
    text = (await rig.ask(max_tokens=40)).choices[0].message.content
    stop = text[10:13]
    engine.num_tokens = 0
    ended = await rig.ask(max_tokens=40, stop=["never there", stop])
    assert ended.choices[0].message.content == text[: text.index(stop)]
    assert ended.choices[0].finish_reason == "stop"
    assert ended.usage.completion_tokens == engine.num_tokens < 40


async def test_temperature_0_is_greedy_and_a_low_top_p_nearly(rig: ChatRig) -> None:
    await start(rig)

    async def answers(**options: Any) -> set[str]:
        return {(await rig.ask(seed=seed, **options)).choices[0].message.content for seed in range(3)}

    greedy, low, free = await answers(temperature=0), await answers(top_p=1e-6), await answers()
    assert len(greedy) == 1
    assert low == greedy
    assert len(free) == 3


async def test_text_parts_and_roles_reach_the_chat_template(rig: ChatRig) -> None:
    await start(rig)
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2="}]
    assert (await rig.ask(messages=[{"role": "user", "content": parts}])).usage == (await rig.ask()).usage
    without_limit = await rig.ask(max_tokens=openai.NOT_GIVEN, stop="never there")
    assert without_limit.usage.completion_tokens <= 16  # as long as a response of the job
    more = [{"role": "system", "content": "Be brief."}, *HELLO, {"role": "assistant", "content": "4"}, *HELLO]
    assert (await rig.ask(messages=more)).usage.prompt_tokens > 2 * (await rig.ask()).usage.prompt_tokens


async def test_job_is_found_by_its_name_while_no_other_has_it(rig: ChatRig) -> None:
    await start(rig)
    name = (await rig.ledger.jobs.fields(rig.job_id))["name"]
    assert (await rig.ask(model=name)).model == rig.job_id
    first = rig.job_id
    await rig.start_job()
    message = await refused(rig, 400, "ambiguous_model", model=name)
    assert first in message
    assert rig.job_id in message


async def test_engine_that_cannot_stream_answers_in_one_piece(rig: ChatRig) -> None:
    await start(rig, FakeEngineOnFiles(text="it is 4"))
    async with rig.client() as client:
        stream = await client.chat.completions.create(**rig.request(stop="is"), stream=True)
        chunks = [chunk.choices[0] async for chunk in stream]
    assert [(chunk.delta.content, chunk.finish_reason) for chunk in chunks] == [("it ", "stop")]
    assert (await rig.ask()).usage.completion_tokens == 3
    message = await refused(rig, 400, "refused_by_engine", top_p=0.5)
    assert "top_p" in message


class FakeEngineOnFiles(FakeEngine):
    """Also on a real model."""

    async def start(self, model_dir: Path, policy_version: int) -> None:
        self._version = policy_version


# ---- beside training -----------------------------------------------------------------------------------------------


async def test_load_waits_for_a_stream_only_for_the_grace_period(rig: ChatRig) -> None:
    await start(rig, PacedEngine(0.05, is_endless=True), chat_grace_s=0.5)
    async with rig.client() as client:
        stream = await client.chat.completions.create(**rig.request(max_tokens=LONG), stream=True)
        await anext(stream)
        await rig.open(0, rig.task(0, 0))
        await rig.drained(0)
        published = time.monotonic()
        await rig.commit(0)
        with pytest.raises(openai.APIError, match=r"moved on from version 0 to 1 .* ask again") as caught:
            assert {chunk.system_fingerprint async for chunk in stream} == set()
        assert 0.5 <= time.monotonic() - published < 8.0  # 20 s are what its tokens take
        assert caught.value.code == "policy_moved"
        await rig.until_serving(1)
        assert time.monotonic() - published < 8.0


async def test_unstreamed_answer_is_restarted_on_the_new_version(rig: ChatRig) -> None:
    engine = await start(rig, PacedEngine(0.05, is_endless=True), chat_grace_s=0.0)
    asking = asyncio.create_task(rig.ask(n=2, max_tokens=40))
    await rig.until(lambda: engine.num_tokens > 4)
    await rig.train(0)
    await rig.until_serving(1)
    engine.pace_s = 0.0
    answer = await asking
    assert answer.system_fingerprint == f"{rig.job_id}@1"
    again = await rig.ask(n=2, max_tokens=40)
    assert [choice.message.content for choice in answer.choices] == [choice.message.content for choice in again.choices]
    assert answer.usage == again.usage  # nothing of the first try counts


async def test_rapid_version_changes_end_a_chat_after_some_tries(rig: ChatRig, monkeypatch) -> None:
    monkeypatch.setattr(rollout_chat, "MAX_STARTS", 2)
    engine = await start(rig, PacedEngine(0.05, is_endless=True), chat_grace_s=0.0)
    asking = asyncio.create_task(refused(rig, 503, "policy_moved", max_tokens=LONG))
    for iteration in range(2):
        begun = engine.num_tokens
        await rig.until(lambda begun=begun: engine.num_tokens > begun)
        await rig.train(iteration)
        await rig.until_serving(iteration + 1)
    message = await asking
    assert "moved on from version 1 to 2" in message
    assert "for fewer tokens" in message


async def test_groups_are_generated_while_chats_fill_their_slots(rig: ChatRig) -> None:
    engine = await start(rig, PacedEngine(0.05, is_endless=True))
    asking = [asyncio.create_task(rig.ask(max_tokens=LONG)) for _ in range(2)]
    await rig.until(lambda: engine.num_in_flight == 2)
    await rig.open(0, *(rig.task(0, index) for index in range(4)))
    assert len(await rig.drained(0, timeout_s=15)) == 4
    assert not any(task.done() for task in asking)
    for task in asking:
        task.cancel()


async def test_chats_never_exceed_the_engines_slots(rig: ChatRig) -> None:
    engine = await start(rig, PacedEngine(0.005, is_endless=True), chat_slots=2)
    asking = [asyncio.create_task(rig.ask(n=4, seed=seed)) for seed in range(3)]
    most = 0
    while not all(task.done() for task in asking):
        most = max(most, engine.num_in_flight)
        await asyncio.sleep(0.001)
    assert most == 2
    assert [len(task.result().choices) for task in asking] == [4, 4, 4]


async def test_job_keeps_no_trace_of_a_chat(rig: ChatRig) -> None:
    async def contents(rig: ChatRig) -> dict[bytes, bytes]:
        """Return every key of the job, except the empty queue of chats, which goes by itself."""
        job = JobKeys(rig.job_id)
        redis = rig.ledger.redis
        assert await redis.xlen(job.chats) == 0
        all_keys = [key async for key in redis.scan_iter(f"onbeat:{{{rig.job_id}}}:*", count=10_000)]
        return {key: await redis.dump(key) for key in all_keys if key != job.chats.encode()}

    await start(rig)
    before = await contents(rig)
    tokens_before = REGISTRY.get_sample_value("onbeat_rollout_response_tokens_total")
    await rig.ask()
    async with rig.client() as client:
        async for _ in await client.chat.completions.create(**rig.request(), stream=True):
            pass
    await refused(rig, 400, "invalid_value", max_tokens=100_000)
    await rig.until(lambda: contents(rig), before)
    assert REGISTRY.get_sample_value("onbeat_rollout_response_tokens_total") == tokens_before
    record = await rig.record()
    assert record is not None
    assert record.tokens_per_s == 0.0


# ---- ends ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_streaming", [True, False])
async def test_client_that_hangs_up_frees_the_slot(rig: ChatRig, is_streaming: bool) -> None:
    engine = await start(rig, PacedEngine(0.05, is_endless=True), chat_slots=1)
    async with rig.client() as client:
        if is_streaming:
            stream = await client.chat.completions.create(**rig.request(max_tokens=LONG), stream=True)
            await anext(stream)
            await stream.close()
        else:
            asking = asyncio.create_task(client.chat.completions.create(**rig.request(max_tokens=LONG)))
            await rig.until(lambda: engine.num_in_flight == 1)
            asking.cancel()
        await rig.until(lambda: engine.num_in_flight == 0, timeout_s=8)  # 20 s are what its tokens take
    engine.pace_s = 0.0
    assert (await rig.ask()).usage.completion_tokens == 12


async def test_client_that_hangs_up_before_its_turn_is_not_answered(rig: ChatRig) -> None:
    engine = await start(rig, PacedEngine(0.02, is_endless=True), chat_slots=1)
    first = asyncio.create_task(rig.ask(max_tokens=100))
    await rig.until(lambda: engine.num_in_flight == 1)
    second = asyncio.create_task(rig.ask(max_tokens=LONG))
    num_waiting = partial(rig.ledger.redis.xlen, JobKeys(rig.job_id).chats)
    await rig.until(num_waiting, 1)
    second.cancel()
    await rig.until(num_waiting, 0)
    assert (await first).usage.completion_tokens == engine.num_tokens == 100


async def test_rollout_that_stops_says_so(rig: ChatRig) -> None:
    engine = await start(rig, PacedEngine(0.05, is_endless=True))
    asking = asyncio.create_task(refused(rig, 503, "rollout_left", max_tokens=LONG))
    await rig.until(lambda: engine.num_in_flight == 1)
    rig.running[0][0].stop()
    message = await asking
    assert "w0 leaves the job" in message
    await asyncio.wait_for(rig.running[0][1], LIMIT_S)


async def test_engine_error_ends_the_chat_and_not_the_rollout(rig: ChatRig) -> None:
    engine = await start(rig, FakeEngineOnFiles())
    for _ in range(6):  # one more than errors of groups would take
        engine.generate_errors = [RuntimeError("out of memory")]
        message = await refused(rig, 500, "engine_failed")
        assert "RuntimeError: out of memory" in message
    assert (await rig.ask()).choices[0].message.content == "4"


async def test_rollout_without_slots_takes_no_chats(impatient: ChatRig) -> None:
    await start(impatient, chat_slots=0)
    message = await refused(impatient, 503, "no_rollout")
    assert "ONBEAT_CHAT_SLOTS=0" in message


# ---- no rollout, or one that only seems to be one -------------------------------------------------------------------


async def test_pending_job_is_refused_at_once(rig: ChatRig) -> None:
    config = json.loads((await rig.ledger.jobs.fields(rig.job_id))["config"])
    await rig.ledger.jobs.create(f"{rig.job_id}-b", config, 10, 0)
    started = time.monotonic()
    message = await refused(rig, 503, "no_rollout", model=f"{rig.job_id}-b")
    assert f"is PENDING: it has no policy yet; `onbeat doctor {rig.job_id}-b`" in message
    assert time.monotonic() - started < 25.0  # it is not even asked


async def test_paused_job_answers_if_it_has_a_rollout_or_says_why_not(impatient: ChatRig) -> None:
    rig = impatient
    await start(rig)
    await rig.ledger.jobs.move(rig.job_id, JobState.PAUSED)
    assert (await rig.ask()).usage.completion_tokens == 12
    await rig.stop()
    message = await refused(rig, 503, "no_rollout")
    assert f"no rollout of job {rig.job_id}, which is PAUSED, took it within 3 s" in message
    assert await rig.ledger.redis.xlen(JobKeys(rig.job_id).chats) == 0


async def test_unknown_and_finished_jobs_are_no_models(rig: ChatRig) -> None:
    await refused(rig, 404, "model_not_found", model="gpt-5")
    await rig.ledger.jobs.move(rig.job_id, JobState.SUCCEEDED)
    message = await refused(rig, 404, "model_not_found")
    assert "is SUCCEEDED" in message
    async with rig.client() as client:
        assert (await client.models.list()).data == []


async def test_full_queue_is_429_and_those_who_wait_are_answered(ledger: Ledger, tmp_path: Path) -> None:
    async with chatting(ledger, tmp_path, chat_queue=2, chat_take_s=50.0) as rig:
        asking = [asyncio.create_task(rig.ask(seed=seed)) for seed in range(2)]
        num_waiting = partial(ledger.redis.xlen, JobKeys(rig.job_id).chats)
        await rig.until(num_waiting, 2)
        with pytest.raises(openai.RateLimitError, match="2 chats wait for the rollouts") as caught:
            await rig.ask()
        assert caught.value.code == "queue_full"
        assert caught.value.response.headers["retry-after"] == "5"
        assert await num_waiting() == 2
        await start(rig)
        assert [answer.usage.completion_tokens for answer in await asyncio.gather(*asking)] == [12, 12]


async def test_rollout_that_falls_silent_is_not_waited_for(rig: ChatRig, monkeypatch) -> None:
    monkeypatch.setattr(broker_chats, "ROLLOUT_SILENT_S", 1.5)
    chats = Chats(rig.ledger.redis, rig.job_id)
    asking = asyncio.create_task(refused(rig, 503, "rollout_silent"))
    while (taken := await chats.take(1.0)) is None:
        pass
    assert await chats.say(taken[0], Reply())
    await asking
    assert not await chats.say(taken[0], Reply())


async def test_answer_that_takes_too_long_is_504_and_wanted_no_more(ledger: Ledger, tmp_path: Path) -> None:
    async with chatting(ledger, tmp_path, chat_answer_s=1.0) as rig:
        engine = await start(rig, PacedEngine(0.05, is_endless=True))
        message = await refused(rig, 504, "timeout", max_tokens=LONG)
        assert "ONBEAT_CHAT_ANSWER_S" in message
        await rig.until(lambda: engine.num_in_flight == 0, timeout_s=5)


async def test_broker_that_stops_ends_its_chats(ledger: Ledger, tmp_path: Path) -> None:
    async with chatting(ledger, tmp_path) as rig:
        engine = await start(rig, PacedEngine(0.05, is_endless=True))
        asking = asyncio.create_task(refused(rig, 503, "broker_stopping", max_tokens=LONG))
        await rig.until(lambda: engine.num_in_flight == 1)
        assert rig.server is not None
        rig.server.should_exit = True
        await asking
        await rig.until(lambda: engine.num_in_flight == 0, timeout_s=5)


async def test_request_whose_broker_has_died_is_forgotten(rig: ChatRig) -> None:
    chats, job = Chats(rig.ledger.redis, rig.job_id), JobKeys(rig.job_id)
    request = CompletionRequest.model_validate(rig.request())
    await rig.ledger.redis.xadd(job.chats, {"request": "{}"}, id="1-1")  # decades ago
    assert await chats.ask("chatcmpl-1", request, max_waiting=1)
    assert 0 < await rig.ledger.redis.ttl(job.chat("chatcmpl-1")) <= 30
    assert 0 < await rig.ledger.redis.ttl(job.chats) <= 60
    await rig.ledger.redis.unlink(job.chat("chatcmpl-1"))  # the lifetime of the answer has passed
    assert await chats.take(1.0) is None
    assert not await chats.say("chatcmpl-1", Reply(policy_version=0, body="4"))
    assert await chats.ask("chatcmpl-2", request, max_waiting=1)
    assert await chats.take(1.0) == ("chatcmpl-2", request)


async def test_each_request_is_taken_by_one_rollout(rig: ChatRig) -> None:
    chats, request = Chats(rig.ledger.redis, rig.job_id), CompletionRequest.model_validate(rig.request())
    for number in range(20):
        await chats.ask(f"chatcmpl-{number}", request, max_waiting=20)
    taken_ids: list[str] = []

    async def take() -> None:
        while len(taken_ids) < 20:
            if (taken := await chats.take(0.05)) is not None:
                taken_ids.append(taken[0])

    await asyncio.gather(*(take() for _ in range(5)))
    assert sorted(taken_ids) == sorted(f"chatcmpl-{number}" for number in range(20))


# ---- refusals ------------------------------------------------------------------------------------------------------


async def test_what_is_not_supported_is_refused_by_name(rig: ChatRig) -> None:
    invalid: list[tuple[dict[str, Any], str | None, str]] = [
        ({"n": 9}, "n", "less than or equal to 8"),
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"stop": ""}, None, "at least 1 character"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "tool", "content": "4"}]}, "messages.0.role", "'system', 'user'"),
        ({"max_tokens": 5000}, "max_tokens", "at most 4096"),
        ({"max_completion_tokens": 5000}, "max_tokens", "at most 4096"),
    ]
    unsupported: list[tuple[dict[str, Any], str, str]] = [
        ({"extra_body": {"tools": []}}, "tools", "tools is not supported here, leave it out"),
        ({"logprobs": True}, "logprobs", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
    ]
    for code, refusals in (("unsupported_parameter", unsupported), ("invalid_value", invalid)):
        for fields, param, message in refusals:
            with pytest.raises(openai.BadRequestError, match=message) as caught:
                await rig.ask(**fields)
            assert (caught.value.code, caught.value.type) == (code, "invalid_request_error")
            assert param in (None, caught.value.param)


async def test_half_a_surrogate_pair_is_refused_by_name(rig: ChatRig) -> None:
    """JSON can name it, and UTF-8 cannot hold it."""
    message = '"messages": [{"role": "user", "content": "hello"}]'
    wrong = message.replace('"hello"', r'"\ud800"'), message.replace('"hello"', r'[{"type": "text", "text": "\udfff"}]')
    async with httpx.AsyncClient(trust_env=False) as client:
        for fields in (*wrong, message + r', "user": "\ud800"'):
            body = f'{{"model": "job", {fields}}}'.encode()
            headers = {"Content-Type": "application/json"}
            answer = await client.post(f"{rig.url}/v1/chat/completions", content=body, headers=headers)
            assert answer.status_code == 400, answer.text
            assert "has half a surrogate pair, which is no text" in answer.json()["error"]["message"]


async def test_messages_that_do_not_fit_are_refused_with_the_numbers(rig: ChatRig) -> None:
    engine = await start(rig)
    for messages, max_tokens in [
        ([{"role": "user", "content": "x" * 600}], 12),
        ([{"role": "user", "content": "x" * 500_000}], 12),  # not even tokenised
        (HELLO, 500),
        ([{"role": "user", "content": "x" * 493}], openai.NOT_GIVEN),
    ]:
        message = await refused(rig, 400, "context_length_exceeded", messages=messages, max_tokens=max_tokens)
        assert "the context has 512 tokens" in message
    assert engine.num_tokens == 0


async def test_malformed_json_is_an_error_of_openais_shape(rig: ChatRig) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        for body in (b"{", b"[]", b"", b'{"model": "\\ud800", "messages": [{"role": "user", "content": "x"}]}'):
            answer = await client.post(f"{rig.url}/v1/chat/completions", content=body)
            assert answer.status_code == 400, answer.text
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_talking_takes_a_submitters_key_and_the_list_a_readers(ledger, tmp_path, caplog):
    caplog.set_level(logging.INFO, "onbeat.access")
    keys = Keys(tmp_path / "keys.json")
    async with chatting(ledger, tmp_path, api_keys_file=keys.path) as rig:
        await start(rig)
        async with rig.client(keys.by_role[Role.READ]) as reader:
            assert [model.id for model in (await reader.models.list()).data] == [rig.job_id]
            with pytest.raises(openai.PermissionDeniedError) as caught:
                await reader.chat.completions.create(**rig.request())
            assert "of role submit" in caught.value.response.json()["detail"]
        async with rig.client("wrong") as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.chat.completions.create(**rig.request())
        async with rig.client(keys.by_role[Role.SUBMIT]) as submitter:
            assert (await submitter.chat.completions.create(**rig.request())).usage.completion_tokens == 12
        (noted,) = [record.message for record in caplog.records if "status=200" in record.message]
        assert f"route=/v1/chat/completions status=200 job_id={rig.job_id} " in noted


# ---- the engine's part ---------------------------------------------------------------------------------------------


async def test_reference_engine_streams_characters_and_frees_its_slot(tmp_path: Path) -> None:
    from tests.tiny_models import write_tied_model

    engine = PacedEngine(is_endless=True)
    await engine.start(write_tied_model(tmp_path / "model"), 3)
    drawn = iter(engine._tokenizer("aé漢字字")["input_ids"])  # a token is a byte; of the last one two are missing
    engine._draw_next = lambda draft: next(drawn)  # type: ignore[method-assign]
    pieces = [piece.text async for piece in engine.stream([1], ChatSampling(10, 1.0, 0), 3)]
    assert pieces == ["a", "", "é", "", "", "漢", "", "", "字", "\ufffd"]
    stream = engine.stream([1], ChatSampling(10, 1.0, 0), 3)
    drawn = iter(engine._tokenizer("abc")["input_ids"])
    assert (await anext(stream)).text == "a"
    assert engine.num_in_flight == 1
    await stream.aclose()
    assert engine.num_in_flight == 0
