import asyncio
import gc
import inspect
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from onbeat.client import AsyncClient, AsyncJobs, BrokerUnreachable, Client, Jobs
from onbeat.client.blocking import Datasets
from onbeat.client.datasets import AsyncDatasets
from onbeat.client.transport import StreamMessage, Transport, parse_answer
from onbeat.config import apply_override
from onbeat.contracts.errors import ApiError, OnbeatError, UnnamedBroker
from onbeat.contracts.records import Event, IterationUpdate, WorkerRecord
from onbeat.contracts.states import JobState
from onbeat.local.state import StackLock, create_data_dir
from onbeat.process.stacks import StackState
from tests.broker_thread import BrokerThread
from tests.world import job_body

CONFIG = job_body()


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onbeat.client.transport.RETRY_DELAYS_S", (0.01, 0.01, 0.01))


@pytest.mark.usefixtures("trainer")
async def test_job_from_creation_to_its_end(broker: BrokerThread) -> None:
    broker.beat(WorkerRecord(id="rollout-0", state="generating"))
    async with AsyncClient(broker.url) as client:
        job = await client.jobs.create(CONFIG)
        assert job.state == JobState.PENDING
        assert (await client.jobs.wait(job.id, timeout_s=30)).state == JobState.SUCCEEDED
        assert [record.iteration for record in await client.jobs.iterations(job.id, after=0)] == [1, 2]
        weights = await client.jobs.weights(job.id, after=1)
        assert [record.policy_version for record in weights] == [2, 3]
        assert weights[0].rollouts["rollout-1"].open_s == 0.2
        assert (await client.jobs.metrics(job.id))["train/loss"] == [(0, 1.5), (1, 1.25)]
        assert len(await client.jobs.samples(job.id, iteration=1, limit=2)) == 2
        assert "job.state" in {event.kind for event in await client.jobs.events(job.id)}
        assert [worker.id for worker in await client.workers()] == ["rollout-0"]
        assert [listed.id for listed in await client.jobs.list(state=JobState.SUCCEEDED)] == [job.id]
        assert [listed.id for listed in await client.jobs.list(state="succeeded")] == [job.id]
        assert await client.jobs.list(state="RUNNING") == []
        newer = await client.jobs.create(CONFIG)
        assert [listed.id for listed in await client.jobs.list(limit=1)] == [newer.id]


@pytest.mark.usefixtures("trainer")
async def test_job_that_is_longer_than_one_answer_is_read_whole(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onbeat.client.jobs.MAX_LISTED_ITERATIONS", 2)
    monkeypatch.setattr("services.broker.api.jobs.MAX_LISTED_ITERATIONS", 2)  # iterations of the curves in one answer
    held_out = {"data": CONFIG["data"], "num_prompts": 4}
    job_id = broker.create_job(schedule={"num_iterations": 5}, evaluation=held_out)
    async with AsyncClient(broker.url) as client:
        await client.jobs.wait(job_id, timeout_s=30)
        assert [record.iteration for record in await client.jobs.iterations(job_id)] == [0, 1, 2, 3, 4]
        assert [record.policy_version for record in await client.jobs.weights(job_id, after=0)] == [1, 2, 3, 4, 5]
        curves = await client.jobs.metrics(job_id, after=0)
        assert curves["iteration/reward_mean"] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
        assert curves["eval/reward_mean"] == [(5, 0.5)]
        assert curves["train/loss"] == [(1, 1.25)]


async def test_wait_gives_up_at_its_deadline(broker: BrokerThread) -> None:
    async with AsyncClient(broker.url) as client:
        with pytest.raises(TimeoutError, match="still PENDING after"):
            await client.jobs.wait(broker.create_job(), timeout_s=0.1)


def test_both_faces_have_the_same_methods() -> None:
    def public(face: type) -> set[str]:
        return {name for name, _ in inspect.getmembers(face) if not name.startswith("_")}

    assert (public(AsyncJobs), public(AsyncDatasets)) == (public(Jobs), public(Datasets))
    methods = public(Client) - {"base_url", "close"}
    assert public(AsyncClient) - public(Transport) - {"jobs", "datasets"} == methods
    faces = [(Jobs, AsyncJobs, name) for name in public(Jobs) - {"stream"}]
    faces += [(Datasets, AsyncDatasets, name) for name in public(Datasets)]
    faces += [(Client, AsyncClient, name) for name in methods]
    for blocking, asynchronous, name in faces:
        ours, theirs = getattr(blocking, name), getattr(asynchronous, name)
        assert inspect.signature(ours) == inspect.signature(theirs)
        assert ours.__doc__ == theirs.__doc__


@pytest.mark.usefixtures("trainer")
async def test_blocking_client_works_inside_a_running_event_loop(broker: BrokerThread) -> None:
    client = Client(broker.url)
    kinds = {type(update) for update in client.jobs.stream(broker.create_job())}
    assert {Event, IterationUpdate} <= kinds
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="this client is closed"):
        client.jobs.list()


async def test_audit_may_take_longer_than_other_answers(broker: BrokerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = broker.create_job()
    async with AsyncClient(broker.url, timeout_s=0.2) as client:
        broker.wire.delay_s = 0.5
        with pytest.raises(BrokerUnreachable, match=r"silent for 0\.2 s"):
            await client.jobs.get(job_id)
        assert (await client.jobs.audit(job_id)).is_clean
        monkeypatch.setattr("onbeat.client.jobs.AUDIT_S", 0.1)
        with pytest.raises(BrokerUnreachable, match=r"silent for 0\.1 s"):
            await client.jobs.audit(job_id)


def test_answer_of_another_version_is_an_error_of_ours(broker: BrokerThread) -> None:
    job_id = broker.create_job()
    with Client(broker.url) as client:
        broker.wire.change = (b'"PENDING"', b'"SNOOZES"')
        told = r"answer is no JobRecord \(state: Input should be 'PENDING'.*\); client and broker may be of"
        for ask in (client.jobs.get, lambda _: client.jobs.list(), lambda job_id: next(client.jobs.stream(job_id))):
            with pytest.raises(OnbeatError, match=told):
                ask(job_id)
        broker.wire.change = (b'"sentence"', b'"verdicts"')
        with pytest.raises(OnbeatError, match=r"no Diagnosis \(findings\.0\.sentence: Field required\)"):
            client.doctor()


async def test_stream_of_no_broker_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    async def messages(*_: Any) -> AsyncGenerator[StreamMessage]:
        yield StreamMessage("job", "<html>", "")

    async with AsyncClient("http://127.0.0.1:1") as client:
        monkeypatch.setattr(client, "messages", messages)
        with pytest.raises(OnbeatError, match=r"answer is no JobRecord \(all of it: Invalid JSON"):
            await anext(client.jobs.stream("job-1"))


def test_closing_a_client_ends_waits_of_other_threads_with_error() -> None:
    said: list[str] = []

    def ask() -> None:
        try:
            client.jobs.wait("job-1")
        except RuntimeError as error:
            said.append(str(error))

    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = Client(f"http://127.0.0.1:{silent.getsockname()[1]}")
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        silent.settimeout(10)
        with silent.accept()[0]:  # it has asked, and gets no answer
            client.close()
            thread.join(10)
    assert said == ["this client was closed by another thread before the answer came"]


def test_loop_over_a_stream_may_be_left_and_its_client_closed(broker: BrokerThread) -> None:
    with Client(broker.url) as client:
        updates = client.jobs.stream(broker.create_job())
        next(updates)
    updates.close()  # type: ignore[attr-defined]


def test_stream_that_the_loop_thread_collects_blocks_no_call(broker: BrokerThread) -> None:
    client = Client(broker.url)
    updates = client.jobs.stream(broker.create_job())
    next(updates)
    cycle: list[Any] = [updates]  # as a traceback is one: only the garbage collector ends it
    cycle.append(cycle)
    del updates, cycle

    async def collect() -> None:
        gc.collect()

    asker = threading.Thread(target=lambda: client._thread.run(collect()), daemon=True)
    asker.start()
    asker.join(10)
    assert not asker.is_alive()
    client.close()


def test_environment_names_the_broker_and_its_key_stays_there(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONBEAT_API_KEY", "secret")
    with Client() as client:
        client.jobs.list()
        assert (client.base_url, broker.wire.authorization) == (broker.url, "Bearer secret")
    with Client(broker.url) as client:
        client.jobs.list()
    assert broker.wire.authorization is None


def test_client_finds_the_broker_that_commands_find(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ONBEAT_URL")
    monkeypatch.delenv("ONBEAT_DATA_DIR", raising=False)
    assert AsyncClient().base_url == "http://127.0.0.1:8800"
    monkeypatch.setattr("onbeat.process.brokers.DEFAULT_URL", broker.url)
    monkeypatch.setenv("ONBEAT_API_KEY", "secret")
    with Client() as client:  # the default address
        assert client.jobs.list() == []
        with pytest.raises(UnnamedBroker, match=r"(?s)start one with `onbeat up`.*export ONBEAT_URL=http"):
            client.jobs.create(CONFIG)
    assert f"reading from {broker.url}, the stack of {broker.folder.resolve()}, run by user" in caplog.text
    assert broker.wire.authorization is None
    monkeypatch.setattr("onbeat.process.brokers.DEFAULT_URL", "http://127.0.0.1:1")
    create_data_dir(tmp_path / ".onbeat")
    lock = StackLock(tmp_path / ".onbeat")
    lock.write(StackState(1, "up", broker.url, "", 0.0))
    with Client() as client:  # the running stack of this folder
        assert client.jobs.get(client.jobs.create(CONFIG).id).state == JobState.PENDING
    lock.release()
    is_open = [True]
    records = SimpleNamespace(url=broker.url, close=is_open.clear)
    monkeypatch.setattr("onbeat.client.transport.OpenRecords", lambda _: records)
    (tmp_path / ".onbeat" / "redis").mkdir()
    with Client() as client:  # the records of this folder
        (job,) = client.jobs.list()
        with pytest.raises(UnnamedBroker, match="no stack runs in"):
            client.jobs.cancel(job.id)
        assert is_open
    assert not is_open


async def test_stream_survives_breaks_and_is_given_up_after_many(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(reason: str) -> list[StreamMessage]:
        return [StreamMessage("end", json.dumps({"reason": reason}), "")]

    class Script(Transport):
        """A broker whose streams tell what is written here, one list a connection."""

        def __init__(self, *connections: list[StreamMessage]) -> None:
            super().__init__("http://127.0.0.1:9")
            self.connections = list(connections)
            self.cursors: list[str] = []

        async def messages(self, path: str, after: str) -> AsyncGenerator[StreamMessage]:
            self.cursors.append(after)
            for message in self.connections.pop(0):
                yield message

    monkeypatch.setattr("onbeat.client.jobs.STREAM_DELAYS_S", (0.0, 0.0))
    monkeypatch.setattr("onbeat.client.jobs.STREAM_RENEWAL_S", 0.0)
    broken: list[StreamMessage] = []  # a connection that breaks off without a word
    events = [Event(id=f"{i}-0", time=i, kind="test") for i in range(1, 6)]
    told = [[StreamMessage("event", event.model_dump_json(), event.id)] for event in events]
    others = [broken, ended("renew"), broken, ended("stopping"), ended("slow"), broken]
    script = Script(broken, broken, *told, *others, ended("over"))
    assert [update async for update in AsyncJobs(script).stream("job")] == events
    assert script.cursors == ["0", "0", "0", *(event.id for event in events), *["5-0"] * len(others)]
    with pytest.raises(BrokerUnreachable, match="breaks off"):
        async for _ in AsyncJobs(Script(told[0], broken, broken)).stream("job"):
            pass


async def test_refusal_names_every_wrong_field(broker: BrokerThread) -> None:
    async with AsyncClient(broker.url) as client:
        with pytest.raises(ApiError) as caught:
            await client.jobs.create(job_body(model={"path": "bundled:no-such-model"}, data={"path": "no-such-file"}))
    assert caught.value.status == 422
    assert all(field in str(caught.value) for field in ("model.path: ", "data.path: "))


@pytest.mark.parametrize("schedule", ["5", "{earlier_ends = [1]}", "{earlier_ends = [1], num_iterations = 'many'}"])
async def test_fork_leaves_a_wrong_schedule_to_the_broker(monkeypatch: pytest.MonkeyPatch, schedule: str) -> None:
    sent: list[Any] = []

    async def answer(*_: Any, json: Any = None, **__: Any) -> dict[str, Any]:
        sent.append(json)
        numbers = {"created_at": 1.0, "num_iterations": 3, "next_iteration": 0}
        return {"id": "job-1", "name": "tiny", "pool": "default", "state": "RUNNING", "config": CONFIG, **numbers}

    monkeypatch.setattr(Transport, "request", answer)
    async with AsyncClient() as client:
        await client.jobs.fork("job-1", 2, [f"schedule={schedule}"])
    assert sent[-1]["schedule"] == apply_override({}, f"schedule={schedule}")["schedule"]


async def test_busy_broker_is_asked_again_a_few_times_unless_to_move(broker: BrokerThread) -> None:
    broker.wire.failures = [503, 502]
    async with AsyncClient(broker.url) as client:
        job = await client.jobs.create(CONFIG)
        assert broker.wire.requests == [("POST", "/v1/jobs")] * 3
        assert [listed.id for listed in await client.jobs.list()] == [job.id]
        broker.wire.failures = [503, 503]
        with pytest.raises(BrokerUnreachable, match="503"):
            await client.jobs.cancel(job.id)
        assert broker.wire.failures == [503]


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_answer_that_may_pass_is_no_refusal_and_keeps_its_words(broker: BrokerThread, status: int) -> None:
    wire = broker.wire
    async with AsyncClient(broker.url) as client:
        wire.failures = [status] * 4
        with pytest.raises(BrokerUnreachable, match=rf"cannot do this now: not now \({status}\)$") as caught:
            await client.jobs.list()
        assert (caught.value.status, wire.failures) == (status, [])
        wire.failures = [status]
        with pytest.raises(BrokerUnreachable, match=rf"not now \({status}\)$"):
            await anext(client.messages("/v1/jobs/job-1/stream", "0"))
        wire.failures = [500]
        with pytest.raises(ApiError, match=r"not now \(500\)"):
            await client.jobs.list()


def test_answer_that_is_no_problem_document_keeps_its_words() -> None:
    with pytest.raises(ApiError, match=r"Service Unavailable \(503\): .*policy moved"):
        parse_answer(httpx.Response(503, json={"error": {"message": "policy moved"}}))


@pytest.mark.parametrize(
    ("body", "coding", "words"),
    [(b"{}", "identity", "no 'jobs'"), (b"[]", "identity", "no 'jobs'"), (b"garbage", "gzip", "no answer")],
)
async def test_answer_of_another_server_is_an_error_in_words(body: bytes, coding: str, words: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Encoding: {coding}\r\nConnection: close\r\n\r\n".encode() + body)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        client = AsyncClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(OnbeatError, match=words):
            await client.jobs.list()
        await client.close()


async def test_unreachable_broker_is_named_with_a_remedy() -> None:
    started = time.monotonic()
    async with AsyncClient("http://127.0.0.1:9") as client:
        with pytest.raises(BrokerUnreachable, match=r"http://127\.0\.0\.1:9 .*onbeat up.*--url"):
            await client.jobs.list()
    assert time.monotonic() - started < 10  # nobody waits 15 s for an answer


async def test_broker_that_takes_no_connection_is_given_up_soon() -> None:
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for waiting in (first, second):  # further ones are dropped, as by a firewall
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        async with AsyncClient(f"http://127.0.0.1:{full.getsockname()[1]}", timeout_s=0.5) as client:
            async with asyncio.timeout(10):
                with pytest.raises(BrokerUnreachable, match="ConnectTimeout"):
                    await client.jobs.create(CONFIG)  # the answer may take two minutes


@pytest.mark.parametrize("url", ["localhost:8800", "ftp://x", "http://", "http://x:y", "http://x:99999"])
def test_wrong_url_is_refused_before_anything_is_sent(url: str) -> None:
    with pytest.raises(ValueError, match="URL"):
        AsyncClient(url)


@pytest.mark.parametrize("no_job", ["examples/quickstart.toml", Path("job.toml"), [CONFIG], None])
async def test_what_is_no_job_is_refused_before_it_is_sent(no_job: Any) -> None:
    async with AsyncClient() as client:
        for send in (client.jobs.create, client.jobs.validate):
            with pytest.raises(TypeError, match=rf"not a {type(no_job).__name__}; JobConfig\.from_file reads"):
                await send(no_job)


async def test_job_id_cannot_leave_its_path() -> None:
    async with AsyncClient() as client:
        with pytest.raises(ValueError, match="not a job id"):
            await client.jobs.get("../workers")


@pytest.mark.parametrize("name", ["../jobs/job-1", "a.jsonl?x", "a.jsonl#x", "a%2Ejsonl", "a/b"])
async def test_name_of_a_data_file_cannot_name_anything_else(broker: BrokerThread, name: str) -> None:
    asked = name.replace("?", "%3F").replace("#", "%23")  # as the path of a request is quoted again
    async with AsyncClient(broker.url) as client:
        with pytest.raises(ApiError):
            await client.datasets.delete(name)
        assert broker.wire.requests == [("DELETE", f"/v1/datasets/{asked}")]
        with pytest.raises(ValueError, match="not the name of a data file"):
            await client.datasets.delete("..")
