"""The session server: who is admitted, what is refused and why, and what an OpenAI client gets."""

import asyncio
import json
import resource
import ssl

import httpx
import openai
import pytest
from pydantic import ValidationError

from onbeat.contracts.completions import ChatFailed
from onbeat.engines import EngineBroken
from onbeat.environments import EpisodeOver, Outcome, Session, SessionError
from services.rollout.episodes import server as server_module
from services.rollout.episodes.bodies import MAX_OBJECTS, ChatBody, GenerateBody, parse_body
from services.rollout.episodes.server import MAX_BODY_BYTES
from tests.episode_rig import TOOL, playing, post
from tests.waiting import until

USER = {"role": "user", "content": "2+2="}


async def ask(*bodies, path="/chat/completions", **options):
    """Return the answers to these calls of one episode, which makes a good call in the end."""
    answers = []

    async def run(task, policy):
        for body in bodies:
            answers.append(await post(policy, path, **body))
        await policy.chat([USER])
        return Outcome(0.0)

    async with playing(run, **options) as rig:
        group = await rig.group()
    return answers, group


async def test_wrong_keys_are_refused_and_others_are_not_mixed():
    seen = []

    async def run(task, policy):
        for key in ("x", "Bearer", policy.key[:-1], policy.key + "x", "\xfc" * 40):
            headers = {"Authorization": f"Bearer {key}".encode("latin-1")}
            async with httpx.AsyncClient(headers=headers) as http:
                refused = await http.post(f"{policy.url}/chat/completions", json={"messages": [USER]})
            seen.append((refused.status_code, refused.json()["error"]["code"]))
        answer = await policy.chat([USER])
        return Outcome(0.0, {}, {answer["id"]: 1.0})  # an id of another episode would be refused

    async with playing(run) as rig:
        group = await rig.group(num_samples=3)
    assert set(seen) == {(401, "invalid_api_key")}
    assert [turn.reward for response in group.responses for turn in response.turns] == [1.0, 1.0, 1.0]


async def test_connections_without_a_request_or_beyond_the_limit_end(monkeypatch):
    monkeypatch.setattr(server_module, "FIRST_REQUEST_S", 0.3)
    ends = []

    async def run(task, policy):
        await policy.chat([USER])  # it keeps its connection
        number = len(rig.server._server.server_state.connections)
        monkeypatch.setattr(server_module, "MAX_SHARE", (number + 1.5) / resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        port = httpx.URL(policy.url).port
        pairs = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        async with httpx.AsyncClient() as other:  # silent connections keep none out that asks
            assert (await other.get(f"{policy.url}/models")).status_code == 401
        for wait_s in (0.2, 10.0):  # connections beyond the limit end at once, the silent one later
            reads = [asyncio.create_task(reader.read()) for reader, _ in pairs]
            done, _ = await asyncio.wait(reads, timeout=wait_s) if reads else (set(), set())
            ends.append(len(done))
            pairs = [pair for pair, read in zip(pairs, reads, strict=True) if not read.done()]
            for read in reads:
                read.cancel() if not read.done() else read.exception()
            await asyncio.sleep(0)
        await policy.chat([USER])
        return Outcome(0.0)

    async with playing(run) as rig:
        await rig.group(num_samples=1)
    assert ends == [3, 0]  # the oldest ends for each that comes, the last one for `other`


async def test_request_without_a_key_keeps_no_connection():
    async def run(task, policy):
        port = httpx.URL(policy.url).port
        for line in ("GET /v1/models", "GET /nothing", "PUT /v1/models", "GET /v1/models/", "OPTIONS *"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"{line} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            answer = await asyncio.wait_for(reader.read(), timeout=5.0)  # until the server hangs up
            seen.append(int(answer.split()[1]))
            writer.close()
        await policy.chat([USER])
        return Outcome(0.0)

    seen: list[int] = []
    async with playing(run) as rig:
        await rig.group()
    assert seen == [401, 404, 405, 404, 404]


async def test_session_server_that_ends_by_itself_ends_the_process():
    async def run(task, policy):
        rig.server._serving.cancel()
        raise RuntimeError("the session does not answer")

    async with playing(run) as rig:
        with pytest.raises(EngineBroken, match="the HTTP server of sessions has ended by itself"):
            await rig.group()


async def test_session_takes_no_proxy_and_reads_no_certificates(monkeypatch):
    """The URL is one of this machine, and reading certificates takes longer than a call."""
    monkeypatch.setattr(ssl, "create_default_context", lambda *_, **__: 1 / 0)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")

    async def run(task, policy):
        await policy.chat([USER])
        return Outcome(0.0)

    async with playing(run) as rig:
        await rig.group()
    assert len(rig.engine.seen) == 1


async def test_calls_beyond_the_last_turn_are_refused():
    async def run(task, policy):
        await asyncio.gather(*(policy.chat([USER]) for _ in range(3)))
        with pytest.raises(EpisodeOver, match="all 3 calls of this episode are used"):
            await policy.chat([USER])
        return Outcome(0.0)

    async with playing(run) as rig:
        group = await rig.group(max_turns=3)
    assert len(group.responses[0].turns) == 3


async def test_context_lowers_the_answer_and_then_ends_the_episode():
    fits, full = {"role": "user", "content": "2+2=" + "x" * 54}, {"role": "user", "content": "x" * 80}
    long = {"role": "user", "content": "x" * 100_000}
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    answers, group = await ask(*({"messages": [m]} for m in (fits, full, long)), template=template, context=60)
    assert answers[0].json()["usage"] == {"prompt_tokens": 58, "completion_tokens": 2, "total_tokens": 60}
    assert answers[0].json()["choices"][0]["finish_reason"] == "length"
    assert [answer.status_code for answer in answers[1:]] == [400, 400]
    assert {answer.json()["error"]["code"] for answer in answers[1:]} == {"context_length_exceeded"}
    assert group.responses[0].turns[0].finish_reason == "length"


async def test_tool_may_return_odd_text_but_no_more_than_a_body_holds():
    async def run(task, policy):
        await policy.chat([USER, {"role": "user", "content": "a file named \udcff.txt"}])
        with pytest.raises(EpisodeOver, match=f"the body has more than {MAX_BODY_BYTES} bytes"):
            await policy.chat([USER, {"role": "tool", "content": "x" * (MAX_BODY_BYTES + 1)}])
        return Outcome(0.5)

    async with playing(run) as rig:
        group = await rig.group()
    assert group.responses[0].reward == 0.5
    assert json.loads(group.responses[0].turns[0].messages_json)[-1]["content"] == "a file named ?.txt"


MANY = (MAX_OBJECTS // 2 + 1) * 2


@pytest.mark.parametrize(
    "field",
    [
        b'"tools": [%s]' % b",".join([b'{"type":"function","function":{"name":"f"}}'] * (MANY // 2)),
        b'"messages": [%s]' % b",".join([b'{ "role": "user", "content": "a"}'] * MANY),
        b'"messages": [{"role": "user", "content": [%s]}]' % b",".join([b'{"type": "text", "text": "a"}'] * MANY),
        b'"messages": [{"role": "user", "content": "a"}], "x": [%s]' % b",".join([b"[]"] * MANY),
        b'"messages": [{"role": "user", "content": "a"}], "x": [%s]' % b",".join([b"{\n}"] * MANY),
    ],
)
def test_body_of_very_many_objects_is_refused_unchecked(field, monkeypatch):
    monkeypatch.setattr(ChatBody, "model_validate_json", None)
    with pytest.raises(ChatFailed, match=f"more than {MAX_OBJECTS} messages, parts, tools, calls and lists"):
        parse_body(ChatBody, b'{"model": "job", %s}' % field)


def test_braces_and_quotes_in_a_text_are_no_objects():
    text = 'if (x[0]) { "a" } ' * MANY
    assert (
        parse_body(ChatBody, json.dumps({"messages": [USER | {"content": text}]}).encode()).messages[0].content == text
    )


@pytest.mark.parametrize("field", ["description", "arguments"])
async def test_tools_and_calls_that_cannot_fit_are_not_tokenised(field):
    described = {"name": "add", "description": "x" * 100_000}
    called = {"function": {"name": "add", "arguments": json.dumps({"a": "x" * 100_000})}}
    body = {
        "description": {"messages": [USER], "tools": [{"type": "function", "function": described}]},
        "arguments": {"messages": [USER, {"role": "assistant", "tool_calls": [called]}, USER]},
    }[field]
    (answer,), _ = await ask(body, context=100)
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "characters, the context has 100 tokens" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatBody, {"messages": [1] * 9}),
        (ChatBody, {"messages": [USER], "tools": [1] * 9}),
        (ChatBody, {"messages": [{"role": "assistant", "tool_calls": [1] * 9}]}),
        (GenerateBody, {"token_ids": ["one"] * 9}),
    ],
)
def test_of_many_wrong_items_only_the_first_is_an_error(kind, body):
    """A body holds a million of them, and each error a kilobyte."""
    with pytest.raises(ValidationError) as wrong:
        kind.model_validate(body)
    assert wrong.value.error_count() == 1


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "wizard", "content": ""}]}, "messages.0.role"),
        ({"messages": [USER, {"role": "user", "content": 5}]}, "messages.1.content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content.list[TextPart].0.type: Input should be 'text'",
        ),
        ({"messages": [USER], "tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
        ({"messages": [USER], "temperature": 0.7}, "temperature"),
        ({"messages": [USER], "top_p": 0.9}, "top_p"),
        ({"messages": [USER], "seed": 1}, "seed"),
        ({"messages": [USER], "stop": ["\n"]}, "stop"),
        ({"messages": [USER], "n": 2}, "n"),
        ({"messages": [USER], "stream": "later"}, "stream"),
        ({"messages": [USER], "tool_choice": "required"}, "tool_choice"),
        ({"messages": [USER], "max_tokens": 257}, "max_tokens"),
        ({"messages": [USER], "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": [USER], "thinking": True}, "thinking"),
    ],
)
async def test_refusals_name_the_field(body, field):
    (answer,), group = await ask(body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["message"].startswith(field)
    assert len(group.responses[0].turns) == 1  # a refused call leaves none


async def test_bodies_that_are_no_json_or_too_deep_are_refused():
    answers = []

    async def run(task, policy):
        deep = b'{"messages": [{"role": "user", "content": "", "x": ' + b"[" * 10_000 + b"]" * 10_000 + b"}]}"
        half = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
        for content in (b"", b"{", b"[]", b"\xff", half, deep):
            answers.append(await policy._http.post(f"{policy.url}/chat/completions", content=content))
        await policy.chat([USER])
        return Outcome(0.0)

    async with playing(run) as rig:
        await rig.group()
    assert {(answer.status_code, answer.json()["error"]["code"]) for answer in answers} == {(400, "invalid_request")}


async def test_neutral_options_of_clients_are_taken():
    body = {"messages": [USER], "model": "gpt-5", "temperature": 0.5, "top_p": 1.0, "n": 1, "stream": False}
    (answer,), _ = await ask(body | {"user": "me", "stop": None, "tool_choice": "auto", "presence_penalty": 0})
    assert answer.status_code == 200


async def test_openai_client_plays_an_episode_with_tools():
    seen = []

    async def run(task, policy):
        client = openai.AsyncOpenAI(base_url=policy.url, api_key=policy.key)
        models = await client.models.list()
        first = await client.chat.completions.create(
            model=models.data[0].id, messages=task.messages, tools=[TOOL], logprobs=True
        )
        choice = first.choices[0]
        (call,) = choice.message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": "4"}
        history = [*task.messages, choice.message.model_dump(exclude_none=True), result]
        second = await client.chat.completions.create(model="policy", messages=history, tools=[TOOL])
        seen.extend([choice, second.choices[0]])
        await client.close()
        return Outcome(1.0)

    text = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
    async with playing(run, text, "It is 4.") as rig:
        group = await rig.group()
    first, second = seen
    assert (first.finish_reason, first.message.tool_calls[0].function.arguments) == ("tool_calls", '{"a": 2}')
    assert [entry.token for entry in first.logprobs.content] == [f"token_id:{token}" for token in rig.engine.seen[0][1]]
    assert (second.finish_reason, second.message.content) == ("stop", "It is 4.")
    assert group.responses[0].turns[1].parent == 0  # the history was extended
    assert json.loads(group.responses[0].turns[1].messages_json)[0]["content"] == "4"
    assert group.responses[0].turns[0].messages_json == "[]"  # nothing but the task's prompt


async def test_openai_client_that_streams_gets_the_same_in_one_chunk():
    chunks = []

    async def run(task, policy):
        client = openai.AsyncOpenAI(base_url=policy.url, api_key=policy.key)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        async for chunk in await client.chat.completions.create(
            model="policy", messages=[USER], tools=[TOOL], **options
        ):
            chunks.append(chunk)
        await client.close()
        return Outcome(1.0)

    async with playing(run, 'So: <tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>') as rig:
        await rig.group()
    answer, usage = chunks
    (choice,) = answer.choices
    (call,) = choice.delta.tool_calls
    assert (choice.delta.role, choice.delta.content, choice.finish_reason) == ("assistant", "So:", "tool_calls")
    assert (call.index, call.function.name, call.function.arguments) == (0, "add", '{"a": 2}')
    assert (usage.choices, usage.usage.completion_tokens) == ([], len(rig.engine.seen[0][1]))


async def test_tokens_in_and_out():
    answers = []

    async def run(task, policy):
        url = policy.url.removesuffix("/v1") + "/inference/v1/generate"
        for body in (
            {"token_ids": [5, 6], "sampling_params": {"logprobs": 1, "max_tokens": 2, "temperature": 0.5}},
            {"token_ids": [5, 600], "sampling_params": {}},
            {"token_ids": [-1], "sampling_params": {}},
            {"token_ids": [5], "sampling_params": {"top_k": 3}},
            {"token_ids": []},
        ):
            answers.append(await policy._http.post(url, json=body))
        return Outcome(0.0)

    async with playing(run, "12345") as rig:
        group = await rig.group()
    assert [answer.status_code for answer in answers] == [200, 400, 400, 400, 400]
    choice = answers[0].json()["choices"][0]
    sampled = rig.engine.seen[0][1]
    assert (choice["token_ids"], choice["finish_reason"]) == (sampled, "length")
    assert [(token["token_id"], token["logprob"]) for token in choice["logprobs"]["content"]] == [
        (token_id, -0.5) for token_id in sampled
    ]
    assert list(group.prompt_token_ids) == [5, 6]
    assert rig.paths(group) == [[([5, 6], sampled)]]


async def test_client_that_hangs_up_cancels_its_generation():
    async def run(task, policy):
        rig.engine.may_finish.clear()
        calling = asyncio.create_task(policy.chat([USER]))
        await until(lambda: rig.engine.num_running)
        calling.cancel()
        await until(lambda: not rig.engine.num_running)
        rig.engine.may_finish.set()
        await policy.chat([USER])
        return Outcome(0.0)

    async with playing(run) as rig:
        group = await rig.group(max_turns=1)  # cancelled calls do not count
    assert rig.engine.num_cancelled == 1
    assert len(group.responses[0].turns) == 1


async def test_session_ends_with_its_outcome_while_others_play():
    late: list[Session] = []
    may_end = asyncio.Event()

    async def run(task, policy):
        await policy.chat([USER])
        if late:
            await may_end.wait()
        else:
            late.append(Session(policy.url, policy.key))
        return Outcome(0.0)

    async with playing(run) as rig:
        producing = asyncio.create_task(rig.group(num_samples=2))
        await until(lambda: late)
        await asyncio.sleep(0.1)
        with pytest.raises(SessionError, match="its episode has ended"):
            await late[0].chat([USER])
        may_end.set()
        group = await producing
        await late[0].close()
    assert [len(response.turns) for response in group.responses] == [1, 1]


async def test_refused_messages_have_the_reason_of_the_template():
    template = "{{ raise_exception('no rules on sundays') if messages[0].role == 'system' }}{{ messages[0].content }}"
    (answer,), _ = await ask({"messages": [{"role": "system", "content": "x"}]}, template=template)
    assert answer.json()["error"]["code"] == "invalid_messages"
    assert "no rules on sundays" in answer.json()["error"]["message"]
