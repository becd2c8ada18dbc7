"""The endpoint of `onbeat chat` in this process: OpenAI's own client, a real tiny model, no broker and no Redis."""

import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from onbeat.config import JobConfig
from onbeat.contracts.endpoint import EndpointOrder, ServedModel
from onbeat.engines import EngineBroken
from services.rollout.chat.endpoint import create_app, find_folder, hold_port, start_engines
from services.rollout.engines.transformers_engine import TransformersEngine
from tests.rollout_fakes import FakeEngine
from tests.tiny_models import write_perturbed_weights, write_tied_model
from tests.world import job_body

HELLO = [{"role": "user", "content": "2+2="}]
SYSTEM = {"role": "system", "content": "Be brief."}


def order_of(*folders: Path) -> EndpointOrder:
    models = [
        ServedModel(name=folder.name, source=str(folder), policy_version=7 - i) for i, folder in enumerate(folders)
    ]
    return EndpointOrder(port=1, instance_id="one", models=models)


@pytest_asyncio.fixture
async def client(tmp_path: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    """Serve a model after training and the one before, of a job with a system prompt."""
    after, before = write_tied_model(tmp_path / "after"), write_tied_model(tmp_path / "before")
    write_perturbed_weights(before, after / "model.safetensors", seed=1)
    job = JobConfig.model_validate(job_body(data={"system_prompt": SYSTEM["content"]}))
    async with AsyncExitStack() as cleanup:
        served = await start_engines(order_of(after, before), job, partial(TransformersEngine), 60.0, cleanup)
        app = create_app(served, "one")
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1")
        async with openai.AsyncOpenAI(
            base_url="http://127.0.0.1/v1", api_key="none", max_retries=0, http_client=http
        ) as client:
            assert (await http.get("/readyz")).text == "one"
            assert (await http.get("/readyz", headers={"Host": "evil.example"})).status_code == 400
            yield client


async def ask(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    return await client.chat.completions.create(**{"model": "after", "messages": HELLO, "seed": 5} | fields)


async def test_models_before_and_after_answer_by_their_names(client: openai.AsyncOpenAI) -> None:
    names = [model.id async for model in client.models.list()]
    assert names == ["after", "before"]
    answers = [await ask(client, model=name, max_tokens=30) for name in names]
    assert [answer.system_fingerprint for answer in answers] == ["after@7", "before@6"]
    texts = [answer.choices[0].message.content for answer in answers]
    assert texts[0] != texts[1]


async def test_prompts_have_the_jobs_system_prompt_and_length(client: openai.AsyncOpenAI) -> None:
    answer = await ask(client)
    assert answer.usage.prompt_tokens == (await ask(client, messages=[SYSTEM, *HELLO])).usage.prompt_tokens
    other = {"role": "system", "content": "Be brief and rhyme, always."}
    assert (await ask(client, messages=[other, *HELLO])).usage.prompt_tokens > answer.usage.prompt_tokens
    assert answer.usage.completion_tokens <= 8  # rollout.max_response_tokens of the job


async def test_stream_has_the_text_of_the_whole_answer(client: openai.AsyncOpenAI) -> None:
    whole = await ask(client, max_tokens=30)
    stream = await ask(client, max_tokens=30, stream=True)
    pieces = [chunk.choices[0].delta.content async for chunk in stream]
    assert "".join(pieces) == whole.choices[0].message.content
    assert stream.response.headers["onbeat-policy-version"] == "7"


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"model": "other"}, 404, "model_not_found"),
        ({"logit_bias": {}}, 400, "unsupported_parameter"),
        ({"temperature": 9}, 400, "invalid_value"),
        ({"max_tokens": 10_000}, 400, "context_length_exceeded"),
    ],
)
async def test_wrong_requests_are_refused_as_by_the_broker(
    client: openai.AsyncOpenAI, fields: dict[str, Any], status: int, code: str
) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        await ask(client, **fields)
    assert (caught.value.status_code, caught.value.code) == (status, code)


async def test_engine_that_does_not_start_in_time_is_named(tmp_path: Path) -> None:
    model = write_tied_model(tmp_path / "model")
    engine = FakeEngine()
    engine.hangs_in.add("start")
    async with AsyncExitStack() as cleanup:
        with pytest.raises(EngineBroken, match=r"start of the engine did not end within 0 s \(ONBEAT_ENGINE_START_S\)"):
            await start_engines(order_of(model), None, partial(lambda: engine), 0.05, cleanup)


def test_missing_folder_is_named() -> None:
    with pytest.raises(ValueError, match="the model /nowhere is not there any more"):
        find_folder("/nowhere")


def test_port_is_kept_while_engines_start() -> None:
    """Others look for a port as `onbeat.local.redis_server.bind` does."""
    with hold_port(0) as listener, socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="already in use"):
            other.bind(listener.getsockname())


def test_port_of_a_server_that_just_ended_is_taken() -> None:
    with hold_port(0) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.listen()
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            listener.accept()[0].close()  # this end waits for late packets from now on
            assert client.recv(1) == b""
    hold_port(port).close()
