"""A job as it runs, over real sockets to a whole broker: what its stream sends, and its timeline."""

import asyncio
import contextlib
import itertools
import json
import socket
import ssl
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import pytest_asyncio
from redis.exceptions import ConnectionError as RedisConnectionError

from onbeat.client import AsyncClient
from onbeat.contracts.errors import ApiError
from onbeat.contracts.records import (
    Diagnosis,
    Event,
    IterationUpdate,
    JobRecord,
    PublishedWeights,
    Timeline,
    WeightUpdate,
)
from onbeat.contracts.states import IterationState, JobState
from onbeat.streams import inspection
from onbeat.streams.ledger import Ledger
from onbeat.streams.ledger.logs import AuditLog
from services.broker.views import live
from services.broker.views import timeline as timeline_module
from services.broker.views.live import JobStreams
from services.broker.views.timeline import Timelines
from tests.broker_fixtures import Broker, running_broker, serving
from tests.conftest import free_port
from tests.waiting import eventually
from tests.world import make_group

LIMIT_S = 30.0
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # reading the authorities takes its time for each client


@pytest_asyncio.fixture
async def broker(ledger: Ledger, tmp_path: Path) -> AsyncIterator[Broker]:
    async with serving(ledger, tmp_path) as broker:
        yield broker


@dataclass(frozen=True)
class Sent:
    kind: str  # "" of a comment
    data: Any
    id: str


async def listen(url: str, job_id: str, **headers: str) -> AsyncIterator[Sent]:
    """Listen by the rules of the format alone, without our client."""
    path = f"{url}/v1/jobs/{job_id}/stream"
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(httpx.AsyncClient(verify=NO_TLS, trust_env=False, timeout=LIMIT_S))
        response = await stack.enter_async_context(client.stream("GET", path, headers=headers))
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-store"
        fields: dict[str, str] = {}
        async for line in response.aiter_lines():
            if line:
                name, _, value = line.partition(": ")
                fields[name or "comment"] = value
                continue
            yield Sent(fields.get("event", ""), json.loads(fields.get("data", "null")), fields.get("id", ""))
            fields = {}


async def take(sent: list[Sent], url: str, job_id: str, **headers: str) -> list[Sent]:
    """Append all messages to `sent`."""
    async with asyncio.timeout(LIMIT_S):
        async for message in listen(url, job_id, **headers):
            sent.append(message)
    return sent


async def listen_to_end(url: str, job_id: str, **headers: str) -> list[Sent]:
    return await take([], url, job_id, **headers)


async def begin_to_listen(broker: Broker, job_id: str, **headers: str) -> asyncio.Task[list[Sent]]:
    """Begin to listen, and return after the first message."""
    sent: list[Sent] = []
    listening = asyncio.create_task(take(sent, broker.url, job_id, **headers))

    await eventually("it listens", lambda: bool(sent) or listening.done())
    return listening


async def ledger_events(ledger: Ledger, job_id: str) -> list[str]:
    return [event.id for event in await ledger.event_log.read(job_id)]


def events_of(sent: list[Sent]) -> list[str]:
    return [message.id for message in sent if message.kind == "event"]


def committed_of(sent: list[Sent]) -> dict[int, dict[str, float]]:
    """Iteration -> its point."""
    updates = [message.data for message in sent if message.kind == "iteration"]
    done = [update for update in updates if update["record"]["state"] == "COMMITTED"]
    return {update["record"]["iteration"]: update["point"] for update in done}


# ---- the stream --------------------------------------------------------------------------------------------------


async def test_stream_sends_each_state_and_event_once_until_the_end(broker, ledger, world):
    job_id = await world.create_job()
    listening = await begin_to_listen(broker, job_id)
    epoch = await world.start_training(job_id)
    await world.train(job_id, epoch, range(3))
    await ledger.jobs.move(job_id, JobState.SUCCEEDED)
    sent = await listening
    assert events_of(sent) == await ledger_events(ledger, job_id)
    points = committed_of(sent)
    assert [points[i]["train/loss"] for i in range(3)] == [1.0, 2.0, 3.0]
    assert [points[i]["iteration/reward_mean"] for i in range(3)] == [0.5] * 3
    states = [message.data["state"] for message in sent if message.kind == "job"]
    assert (states[0], states[-1]) == ("PENDING", "SUCCEEDED")
    assert (sent[-1].kind, sent[-1].data) == ("end", {"reason": "over"})
    for place, message in enumerate(sent):  # the states behind an event come before it
        if message.kind == "event" and message.data["kind"] == "iteration.committed":
            assert message.data["data"]["iteration"] in committed_of(sent[:place])
    assert [message.id for message in sent if message.kind != "event"] == [""] * (len(sent) - len(events_of(sent)))
    assert broker.num_watchers == 0


async def test_stream_continues_after_the_last_event_without_gaps(broker, ledger, world):
    job_id, epoch = await world.started_job(schedule={"num_iterations": 6})
    first: list[Sent] = []
    async with contextlib.aclosing(listen(broker.url, job_id)) as messages:
        training = asyncio.create_task(world.train(job_id, epoch, range(2)))
        async for message in messages:
            first.append(message)
            if len(events_of(first)) == 5:  # training goes on meanwhile
                break
    await training
    await world.train(job_id, epoch, range(2, 6))  # nobody listens
    listening = await begin_to_listen(broker, job_id, **{"Last-Event-ID": events_of(first)[-1]})
    await ledger.jobs.move(job_id, JobState.SUCCEEDED)
    second = await listening
    assert events_of(first) + events_of(second) == await ledger_events(ledger, job_id)
    assert committed_of(first).keys() | committed_of(second).keys() == set(range(6))


async def test_stream_of_a_job_that_is_over_reports_it_and_ends(broker, ledger, world):
    job_id, epoch = await world.started_job()
    await world.train(job_id, epoch, range(2))
    await ledger.jobs.move(job_id, JobState.FAILED, "out of memory")
    sent = await listen_to_end(broker.url, job_id)
    assert events_of(sent) == await ledger_events(ledger, job_id)
    assert committed_of(sent).keys() == {0, 1}
    assert sent[0].data["error"] == "out of memory"
    assert [message.kind for message in sent[-2:]] == ["explain", "end"]
    (newest,) = (await inspection.newest_events(ledger, job_id, count=1))[:1]
    resumed = await listen_to_end(broker.url, job_id, **{"Last-Event-ID": newest.id})
    assert events_of(resumed) == []
    assert resumed[-1].data == {"reason": "over"}


async def test_unforeseen_error_is_logged_and_breaks_the_stream(broker, world, monkeypatch, caplog):
    async def crash(*_):
        raise ValueError("a record that nobody has foreseen")

    monkeypatch.setattr(inspection, "look", crash)
    job_id = await world.create_job()
    with pytest.raises(httpx.RemoteProtocolError):
        await listen_to_end(broker.url, job_id)
    (logged,) = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert str(logged.__cause__) == "a record that nobody has foreseen"  # Starlette's error names its cause
    assert broker.num_watchers == 0


async def test_watchers_of_a_job_share_one_reader(broker, ledger, world, calls_of):
    """More of them than the connections to Redis that a process has at most."""
    looks = calls_of(inspection, "look")
    job_id = await world.create_job()
    listening = [asyncio.create_task(listen_to_end(broker.url, job_id)) for _ in range(150)]

    await eventually("all listen", lambda: broker.num_watchers, 150, LIMIT_S)
    clock = asyncio.get_running_loop()
    before, since = len(looks), clock.time()

    await eventually("it looks", lambda: len(looks) - before >= 4)
    assert len(looks) - before <= (clock.time() - since) / live.TICK_S + 1
    await ledger.event_log.emit(job_id, "test.hello", "hello")
    await ledger.jobs.move(job_id, JobState.CANCELLED)
    expected = await ledger_events(ledger, job_id)
    for sent in await asyncio.gather(*listening):
        assert events_of(sent) == expected


async def test_waiting_job_is_explained_now_and_then(broker, world, monkeypatch):
    monkeypatch.setattr(live, "EXPLAIN_S", 1.0)
    explained: list[float] = []
    diagnose_job = live.diagnose_job

    async def noting(*args):
        explained.append(asyncio.get_running_loop().time())
        return await diagnose_job(*args)

    monkeypatch.setattr(live, "diagnose_job", noting)
    job_id, num_sent = await world.create_job(pool="nobody-there"), 0
    async with asyncio.timeout(LIMIT_S), contextlib.aclosing(listen(broker.url, job_id)) as messages:
        async for message in messages:
            if message.kind == "explain":
                assert "trainer of pool nobody-there" in message.data["findings"][0]["waits_for"]
                num_sent += 1
            if num_sent == 3:
                break
    assert all(later - earlier > 0.9 for earlier, later in itertools.pairwise(explained))


async def test_silent_stream_has_a_heart(broker, world, monkeypatch):
    monkeypatch.setattr(live, "STREAM_HEARTBEAT_S", 0.1)
    job_id = await world.create_job()
    async with asyncio.timeout(LIMIT_S), contextlib.aclosing(listen(broker.url, job_id)) as messages:
        async for message in messages:
            if message.kind == "":  # a comment
                return
    raise AssertionError("it ended without")


async def test_long_stream_is_to_be_asked_for_again(broker, world, monkeypatch):
    monkeypatch.setattr(live, "MAX_STREAM_S", 0.5)
    sent = await listen_to_end(broker.url, await world.create_job())
    assert sent[-1].data == {"reason": "renew"}


async def test_stopping_broker_ends_its_streams(ledger, world, tmp_path):
    job_id = await world.create_job()
    async with serving(ledger, tmp_path) as broker:
        listening = await begin_to_listen(broker, job_id)
        broker.server.should_exit = True
        async with asyncio.timeout(4.0):  # a limit below the server's own deadline
            assert (await listening)[-1].data == {"reason": "stopping"}


async def test_deleted_job_ends_its_stream(broker, ledger, world):
    job_id = await world.create_job()
    listening = await begin_to_listen(broker, job_id)
    await ledger.redis.delete(inspection.JobKeys(job_id).job)
    assert (await listening)[-1].data == {"reason": "over"}


async def add_old_events(ledger: Ledger, job_id: str, count: int) -> None:
    pipeline = ledger.redis.pipeline()
    for number in range(count):
        fields = {"kind": "job.warning", "message": str(number), "data": "{}", "time": 1}
        pipeline.xadd(inspection.JobKeys(job_id).events, fields)
    await pipeline.execute()


async def test_broker_answers_while_a_hundred_streams_begin(broker, ledger, world):
    """All with the oldest of many events, and they take nothing."""
    job_id = await world.create_job()
    await add_old_events(ledger, job_id, 5000)
    async with contextlib.AsyncExitStack() as stack:
        address = "127.0.0.1", int(broker.url.rsplit(":")[-1])
        for _ in range(100):
            _, writer = await asyncio.open_connection(*address)
            stack.callback(writer.close)
            writer.write(f"GET /v1/jobs/{job_id}/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        async with httpx.AsyncClient(base_url=broker.url, trust_env=False, timeout=LIMIT_S) as client:
            assert (await client.get("/livez")).status_code == 200
        await eventually("all listen", lambda: broker.num_watchers == 100)


async def test_others_get_a_turn_after_each_piece_of_a_stream(ledger, world):
    job_id = await world.create_job()
    await add_old_events(ledger, job_id, 5000)
    await ledger.jobs.move(job_id, JobState.CANCELLED)
    streams, num_turns = JobStreams(ledger, is_stopping=lambda: False, max_watchers=100), 0

    async def take_turns() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    async def take() -> list[int]:
        return [num_turns async for piece in streams.stream(job_id, "0") if b"event: event" in piece]

    others = asyncio.create_task(take_turns())
    for turns in await asyncio.gather(*(take() for _ in range(100))):
        assert len(turns) > 1
        assert len(set(turns)) == len(turns)
    others.cancel()
    await streams.close()


async def test_event_is_encoded_once_and_not_sent_by_itself(ledger, world, monkeypatch):
    job_id = await world.create_job()
    await add_old_events(ledger, job_id, 1000)
    await ledger.jobs.move(job_id, JobState.CANCELLED)
    encoded: list[str] = []
    encode = live.encode

    def count(kind, data, event_id=None):
        encoded.append(kind)
        return encode(kind, data, event_id)

    monkeypatch.setattr(live, "encode", count)
    streams = JobStreams(ledger, is_stopping=lambda: False, max_watchers=50)

    async def take() -> list[bytes]:
        return [piece async for piece in streams.stream(job_id, "0")]

    answers = await asyncio.gather(*(take() for _ in range(20)))
    assert encoded.count("event") == 1000 + 2  # the job's creation and its end
    for pieces in answers:
        assert b"".join(pieces).count(b"event: event") == encoded.count("event")
        assert len(pieces) < 10
    await streams.close()


# ---- refusals ----------------------------------------------------------------------------------------------------


async def test_impossible_streams_are_refused_before_they_begin(broker, world):
    async with httpx.AsyncClient(base_url=broker.url, trust_env=False) as client:
        assert (await client.get("/v1/jobs/nobody/stream")).status_code == 404
        job_id = await world.create_job()
        for after in ("now", "\u0663", "1-\u0664"):  # digits that are none to Redis
            for path in ("stream", "events"):
                assert (await client.get(f"/v1/jobs/{job_id}/{path}", params={"after": after})).status_code == 422
        headers = {"Last-Event-ID": "yesterday"}
        assert (await client.get(f"/v1/jobs/{job_id}/stream", headers=headers)).status_code == 422
    async with AsyncClient(broker.url) as client:
        with pytest.raises(ApiError, match="404"):
            await anext(client.jobs.stream("nobody"))
    assert broker.num_watchers == 0


async def test_record_that_cannot_be_read_is_named_in_the_answer(broker, ledger, world):
    job_id = await world.create_job()
    await ledger.redis.hset(inspection.JobKeys(job_id).job, "num_opened", "many")
    async with httpx.AsyncClient(base_url=broker.url, trust_env=False) as client:
        answer = await client.get(f"/v1/jobs/{job_id}/iterations")
    assert answer.status_code == 500
    job = inspection.JobKeys(job_id).job
    assert f'the field num_opened of {job} in Redis is "many": input should be a valid' in answer.json()["detail"]


async def test_streams_leave_room_for_other_requests(ledger, world, tmp_path):
    job_id = await world.create_job()
    async with serving(ledger, tmp_path, max_connections=4) as broker:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(2):
                messages = await stack.enter_async_context(contextlib.aclosing(listen(broker.url, job_id)))
                await anext(messages)
            async with httpx.AsyncClient(base_url=broker.url, trust_env=False) as client:
                refused = await client.get(f"/v1/jobs/{job_id}/stream")
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
                assert (await client.get(f"/v1/jobs/{job_id}")).status_code == 200

        await eventually("those who left are forgotten", lambda: broker.num_watchers == 0)


async def test_watcher_that_takes_nothing_is_hung_up_on(ledger, world, tmp_path, monkeypatch):
    monkeypatch.setattr(live, "TICK_S", 0.05)
    job_id = await world.create_job()
    async with serving(ledger, tmp_path, stall_s=1.0) as broker:
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect(("127.0.0.1", int(broker.url.rsplit(":")[-1])))
            reader.sendall(f"GET /v1/jobs/{job_id}/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            sent: list[Sent] = []  # messages for a quick client
            listening = asyncio.create_task(take(sent, broker.url, job_id))

            await eventually("both listen", lambda: broker.num_watchers == 2)

            async with asyncio.timeout(LIMIT_S):
                while (broker.num_watchers, len(broker.server.server_state.connections)) != (1, 1):
                    for _ in range(50):
                        await ledger.event_log.emit(job_id, "test.long", "x" * 20_000)
                    (newest,) = await inspection.newest_events(ledger, job_id, count=1)
                    await eventually("it has taken all", lambda last=newest.id: events_of(sent)[-1:] == [last])
            await ledger.jobs.move(job_id, JobState.CANCELLED)
            await asyncio.wait_for(listening, LIMIT_S)
            assert sent[-1].data == {"reason": "over"}


async def test_watcher_that_is_slow_misses_nothing(ledger, world, monkeypatch):
    monkeypatch.setattr(live, "TICK_S", 0.01)
    job_id = await world.create_job()
    streams = JobStreams(ledger, is_stopping=lambda: False, max_watchers=5)
    stream = streams.stream(job_id, "0")
    bodies = [await anext(stream)]
    for _ in range(live.EVENTS_AT_ONCE + 50):  # more than one page
        await ledger.event_log.emit(job_id, "test.quick", "")
    await ledger.jobs.move(job_id, JobState.CANCELLED)
    async with asyncio.timeout(LIMIT_S):
        bodies += [body async for body in stream]
    assert b'"over"' in bodies[-1]
    lines = [line for body in bodies for line in body.decode().split("\n")]
    ids = [line.removeprefix("id: ") for line in lines if line.startswith("id: ")]
    every: list[str] = []
    while page := await ledger.event_log.read(job_id, every[-1] if every else "0"):
        every += [event.id for event in page]
    assert ids == every
    await streams.close()


async def test_question_is_read_once_for_all_who_ask_it(monkeypatch):
    shared, num_reads, now_s = live.Shared(), 0, 0.0
    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: now_s))

    async def read():
        nonlocal num_reads
        num_reads += 1
        await asyncio.sleep(0.05)
        return num_reads

    assert await asyncio.gather(*(shared.answer("a", 0.1, read) for _ in range(5))) == [1] * 5
    with pytest.raises(asyncio.TimeoutError):  # one who leaves takes the answer from nobody
        await asyncio.wait_for(shared.answer("b", 0.1, read), 0.01)
    assert await shared.answer("b", 0.1, read) == 2
    now_s += 0.15
    assert await shared.answer("a", 0.1, read) == 3
    await shared.close()


async def test_error_is_no_answer_for_those_who_ask_later():
    shared = live.Shared()

    async def fail():
        raise RedisConnectionError("away")

    async def read():
        return 7

    with pytest.raises(RedisConnectionError):
        await shared.answer("a", 60.0, fail)
    assert await shared.answer("a", 60.0, read) == 7
    await shared.close()


# ---- the client --------------------------------------------------------------------------------------------------


async def test_client_streams_typed_records_until_the_job_is_over(broker, ledger, world):
    job_id = await world.create_job()

    async def collect():
        async with AsyncClient(broker.url) as client:
            return [update async for update in client.jobs.stream(job_id)]

    collecting = asyncio.create_task(collect())
    await world.train(job_id, await world.start_training(job_id), range(3))
    await ledger.jobs.move(job_id, JobState.SUCCEEDED)
    updates = await asyncio.wait_for(collecting, LIMIT_S)
    assert [u.id for u in updates if isinstance(u, Event)] == await ledger_events(ledger, job_id)
    assert [u for u in updates if isinstance(u, JobRecord)][-1].state is JobState.SUCCEEDED
    last = [u for u in updates if isinstance(u, IterationUpdate)][-1]
    assert (last.record.state, last.point["train/loss"]) == (IterationState.COMMITTED, 3.0)
    assert {type(u) for u in updates} <= {Event, JobRecord, IterationUpdate, Diagnosis}


ODD_TEXT = "a\u2028b\x85c\u2029d\x0be\rf"  # ends of lines to str.splitlines(), and to nobody else


async def test_client_returns_all_events_however_many_they_are(broker, ledger, world):
    job_id = await world.create_job()
    for number in range(live.EVENTS_AT_ONCE + 1):
        await ledger.event_log.emit(job_id, "job.warning", str(number))
    async with AsyncClient(broker.url) as client:
        events = await client.jobs.events(job_id)
        assert [event.message for event in events[1:]] == [str(number) for number in range(live.EVENTS_AT_ONCE + 1)]
        assert await client.jobs.events(job_id, events[-2].id) == events[-1:]


async def test_odd_ends_of_lines_are_escaped_in_messages(broker, ledger, world):
    job_id = await world.create_job()
    await ledger.event_log.emit(job_id, "test.odd", ODD_TEXT)
    await ledger.jobs.move(job_id, JobState.CANCELLED)
    sent = await listen_to_end(broker.url, job_id)  # this reader takes them for ends of lines
    assert [m.data["message"] for m in sent if m.kind == "event" and m.data["kind"] == "test.odd"] == [ODD_TEXT]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
async def test_client_takes_lines_by_the_rules_of_the_format(end):
    """The client works with any broker, and with lines that come in arbitrary pieces."""
    event = Event(id="1-0", time=1.0, kind="test.odd", message=ODD_TEXT, data={})
    lines = ["event: event", f"data: {event.model_dump_json()}", "id: 1-0", ""]
    lines += ["event: end", 'data: {"reason":"over"}', ""]
    head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head.encode())
        for byte in "".join(line + end for line in lines).encode():
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", port := free_port())
    async with server, asyncio.timeout(LIMIT_S), AsyncClient(f"http://127.0.0.1:{port}") as client:
        assert [update async for update in client.jobs.stream("job")] == [event]


# ---- the timeline ------------------------------------------------------------------------------------------------


async def get_timeline(broker: Broker, job_id: str, iterations: int = 5) -> Any:
    async with AsyncClient(broker.url) as client:
        return await client.jobs.timeline(job_id, iterations)


async def test_timeline_puts_groups_weights_and_training_on_one_clock(broker, ledger, world):
    async def records(broker: Broker, job_id: str) -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=broker.url, trust_env=False) as client:
            return list((await client.get(f"/v1/jobs/{job_id}/iterations")).json()["iterations"])

    job_id = await world.create_job()
    nothing = await get_timeline(broker, job_id)
    assert (nothing.iterations, nothing.lanes, nothing.spans) == ([], [], [])
    epoch = await world.start_training(job_id)
    await world.wait_open(job_id, 0)
    opened_at = float((await ledger.iterations.fields(job_id, 0))["opened_at"])
    update = WeightUpdate(received_bytes=9, pull_s=0.04, apply_s=0.01, load_s=0.03, held_s=0.02)
    await asyncio.sleep(0.1)
    await ledger.versions.engine_ready(job_id, 0, "w1", update)
    ready_at = next(e.time for e in await ledger.event_log.read(job_id) if e.kind == "worker.updated")
    await asyncio.sleep(0.5)
    first, second = await ledger.rollout.claim(job_id, "w1", 10, 30)
    group = make_group(first.task)
    group.timings.generate_s, group.timings.score_s = 0.3, 0.1
    await ledger.rollout.submit(job_id, first.entry_id, group)
    accepted_at = int((await ledger.iterations.groups(job_id, 0))["0-0"].removeprefix("accepted:").split("-")[0]) / 1000
    open_one = await get_timeline(broker, job_id)  # accepted groups show before the rest
    of_groups = {(s.lane, s.kind, s.group_id) for s in open_one.spans if s.group_id}
    assert of_groups == {("w1", "generate", "0-0"), ("w1", "score", "0-0")}
    failed = make_group(second.task)
    failed.timings.generate_s, failed.timings.score_s = 0.0, 0.0
    await ledger.rollout.submit(job_id, second.entry_id, failed)
    begin = opened_at + 0.1
    spans = [("micro_batch", begin, 0.1), ("micro_batch", begin + 0.102, 0.1), ("optimizer", begin + 0.3, 0.05)]
    await world.commit(job_id, epoch, 0, spans=spans, reward_mean=0.5)
    committed_at = float((await ledger.iterations.fields(job_id, 0))["committed_at"])
    timeline = await get_timeline(broker, job_id, 1)
    if timeline.iterations == [1]:  # the next one is open already
        timeline = await get_timeline(broker, job_id, 2)
    spans = {(s.lane, s.kind, s.group_id or round(s.start - begin, 3)): s for s in timeline.spans}
    generate, score = spans["w1", "generate", "0-0"], spans["w1", "score", "0-0"]
    assert (generate.start, generate.end) == pytest.approx((accepted_at - 0.4, accepted_at - 0.1))
    assert (score.start, score.end) == pytest.approx((accepted_at - 0.1, accepted_at))
    (load,) = [s for s in timeline.spans if s.kind == "load"]
    (pull,) = [s for s in timeline.spans if s.kind == "pull"]
    assert (load.lane, load.start, load.end) == ("w1", pytest.approx(ready_at - 0.03), pytest.approx(ready_at))
    assert (pull.start, pull.end) == pytest.approx((ready_at - 0.06, ready_at - 0.02))
    trainer = [(s.kind, s.start - begin, s.end - begin) for s in timeline.spans if s.lane == "trainer"]
    assert trainer == [  # the 2 ms between the micro-batches are not waiting
        ("wait", pytest.approx(-0.1, abs=1e-3), pytest.approx(0.0, abs=1e-3)),
        ("micro_batch", pytest.approx(0.0, abs=1e-3), pytest.approx(0.1, abs=1e-3)),
        ("micro_batch", pytest.approx(0.102, abs=1e-3), pytest.approx(0.202, abs=1e-3)),
        ("wait", pytest.approx(0.202, abs=1e-3), pytest.approx(0.3, abs=1e-3)),
        ("optimizer", pytest.approx(0.3, abs=1e-3), pytest.approx(0.35, abs=1e-3)),
    ]
    idle = {lane.id: lane.idle_frac for lane in timeline.lanes}
    assert list(idle) == ["trainer", "w1"]
    assert idle["trainer"] == pytest.approx(1 - 0.25 / (committed_at - opened_at), abs=1e-3)
    assert idle["w1"] == pytest.approx(1 - 0.3 / (timeline.end - timeline.start), abs=1e-3)
    (record,) = [r for r in (await records(broker, job_id)) if r["iteration"] == 0]
    assert record["metrics"] == {}  # spans are no metric
    assert (record["reward_mean"], record["state"]) == (0.5, "COMMITTED")
    both_s = sum(end - start for start, end in timeline.both_work)
    assert both_s == pytest.approx(record["overlap_frac"] * 0.3, abs=2e-3)
    assert 0.0 <= record["overlap_frac"] <= 0.67  # two micro-batches of 0.1 s at most
    assert timeline.overlap.startswith("during ")


async def test_timeline_shows_the_pull_of_the_next_weights(broker, ledger, world):
    """A rollout may serve the next version before the iteration that made it is committed."""
    job_id, epoch = await world.started_job()
    await world.wait_open(job_id, 0)
    published = PublishedWeights(full_bytes=10, delta_bytes=9, encode_s=0.1, publish_s=0.1)
    await ledger.versions.announce(job_id, epoch, 1, "127.0.0.1:1", "d", published)
    await asyncio.sleep(0.1)  # the timeline begins with the iteration
    update = WeightUpdate(received_bytes=9, pull_s=0.04, apply_s=0.01, load_s=0.03, held_s=0.02)
    await ledger.versions.engine_ready(job_id, 1, "w1", update)
    timeline = await get_timeline(broker, job_id)
    assert sorted((s.lane, s.kind, s.iteration) for s in timeline.spans) == [("w1", "load", 1), ("w1", "pull", 1)]


async def test_timeline_of_a_job_that_reports_less(broker, ledger, world):
    """An older trainer and older rollouts report less; the groups have their place in the timeline all the same."""
    job_id, epoch = await world.started_job()
    await world.wait_open(job_id, 0)
    update = WeightUpdate(received_bytes=9, pull_s=0.1, apply_s=0.1, load_s=0.1)
    await ledger.versions.engine_ready(job_id, 0, "w1", update)
    await world.train(job_id, epoch, range(3), rollout_s=0.25)
    await ledger.jobs.move(job_id, JobState.SUCCEEDED)
    timeline = await get_timeline(broker, job_id, 2)
    assert timeline.iterations == [1, 2]
    assert {s.kind for s in timeline.spans if s.iteration > 0} == {"generate", "score"}
    assert timeline.lanes[0].idle_frac is None


async def test_timeline_reads_each_group_once(broker, world, monkeypatch):
    job_id, epoch = await world.started_job()
    await world.train(job_id, epoch, range(3), rollout_s=0.25)
    first = await get_timeline(broker, job_id)

    async def never(*_):
        raise AssertionError("read again")

    monkeypatch.setattr(AuditLog, "rollouts", never)
    assert (await get_timeline(broker, job_id)).spans == first.spans
    assert len([s for s in first.spans if s.kind == "generate"]) == 6


async def test_timeline_is_built_and_serialized_off_the_event_loop(ledger, world, tmp_path, monkeypatch):
    """It may have tens of thousands of spans, and takes its time."""
    threads: list[int] = []

    def noted(call):
        def note(*args, **options):
            threads.append(threading.get_ident())
            return call(*args, **options)

        return note

    monkeypatch.setattr(timeline_module, "put_together", noted(timeline_module.put_together))
    monkeypatch.setattr(Timeline, "model_dump_json", noted(Timeline.model_dump_json))
    async with running_broker(ledger, tmp_path) as client:
        job_id, epoch = await world.started_job()
        await world.train(job_id, epoch, range(1), rollout_s=0.0)
        answer = await client.get(f"/v1/jobs/{job_id}/timeline")
    assert Timeline.model_validate_json(answer.content).iterations[:1] == [0]
    assert len(threads) == 2
    assert threading.get_ident() not in threads


async def test_timeline_shows_a_group_that_is_accepted_while_it_reads(broker, ledger, world, monkeypatch):
    job_id, _ = await world.started_job()
    await world.wait_open(job_id, 0)
    await asyncio.sleep(0.3)  # then the groups' spans lie within the window
    first, *late = await ledger.rollout.claim(job_id, "w1", 10, 30)
    await ledger.rollout.submit(job_id, first.entry_id, make_group(first.task))
    list_entries = ledger.iterations.accepted_entries

    async def list_before_the_last_one(*place):
        listed = await list_entries(*place)
        while late:
            claim = late.pop()
            await ledger.rollout.submit(job_id, claim.entry_id, make_group(claim.task))
        return listed

    monkeypatch.setattr(ledger.iterations, "accepted_entries", list_before_the_last_one)
    timelines = Timelines(ledger)
    await timelines.read(job_id, 1)
    shown = (await timelines.read(job_id, 1)).spans
    assert sorted(s.group_id for s in shown if s.kind == "generate") == ["0-0", "0-1"]  # one span for each group
