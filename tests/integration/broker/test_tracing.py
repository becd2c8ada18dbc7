"""Iterations as OpenTelemetry traces: a real ledger on one side, a real OTLP receiver on the other."""

import asyncio
import contextlib
import functools
import hashlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.http import trace_exporter

from onbeat.contracts.records import WeightUpdate
from onbeat.contracts.states import JobState
from onbeat.streams.keys import JobKeys
from onbeat.streams.ledger import Ledger
from services.broker.metrics import Meters
from services.broker.settings import Settings
from services.broker.tracing import exporter as tracing
from services.broker.tracing.exporter import Tracer
from tests.broker_fixtures import running_broker
from tests.conftest import free_port
from tests.integration.authority import Authority
from tests.integration.streams.test_rows import open_rows, row_groups
from tests.otlp_receiver import OK, Receiver
from tests.waiting import eventually
from tests.world import World, failed_group, make_group, tasks_for

LIMIT_S = 30.0
QUICK_S = 0.7  # less than the exporter waits before it tries again by itself


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


@pytest.fixture
def redis_url(redis_url: str) -> str:
    """Return the URL of a separate database: a tracer exports the jobs of all tests that share one."""
    return f"{redis_url}/1"


@pytest.fixture(autouse=True)
async def alone(ledger: Ledger) -> None:
    await ledger.redis.flushdb()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tracer ask an unavailable collector again at once."""
    monkeypatch.setattr(tracing, "LOOK_S", 0.02)
    monkeypatch.setattr(tracing, "RETRY_S", 0.02)


class Exporter:
    """A broker's tracer, without the broker."""

    def __init__(self, ledger: Ledger, url: str, **settings: Any) -> None:
        self.meters = Meters()
        self.tracer = Tracer(ledger, Settings(otlp_endpoint=url, **settings), self.meters)

    def count(self, outcome: str) -> float:
        return self.meters._registry.get_sample_value("onbeat_traces_total", {"outcome": outcome}) or 0.0

    @property
    def num_failures(self) -> float:
        return self.meters._registry.get_sample_value("onbeat_trace_failures_total") or 0.0


@asynccontextmanager
async def exporting(ledger: Ledger, url: str, **settings: Any) -> AsyncIterator[Exporter]:
    exporter = Exporter(ledger, url, **settings)
    exporter.tracer.start()
    try:
        yield exporter
    finally:
        await exporter.tracer.close()


until = functools.partial(eventually, timeout_s=LIMIT_S)


async def run_job(ledger: Ledger, num_iterations: int, **sections: Any) -> str:
    """Run a job without a trainer's spans, for tests of the time at which traces are exported."""
    job_id, epoch = await World(ledger).started_job(schedule={"num_iterations": num_iterations}, **sections)
    for iteration in range(num_iterations):
        await World(ledger).run_iteration(job_id, epoch, iteration)
    return job_id


def sha256_hex(text: str, digits: int) -> str:
    """Compute the hash as the document describes it."""
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


def exported(receiver: Receiver, job_id: str) -> list[int]:
    """Return the iterations whose root span came, in order of arrival."""
    return [
        span.attributes["onbeat.iteration"]
        for span in list(receiver.spans)
        if span.name == "iteration" and span.attributes["onbeat.job_id"] == job_id
    ]


# ---- what a trace holds ----------------------------------------------------------------------------------------------


async def traced_iterations(ledger: Ledger) -> tuple[str, dict[str, float]]:
    """Two iterations of three groups in two micro-batches; the second one's moments."""
    job_id, epoch = await World(ledger).started_job(
        rollout={"num_prompts_per_iteration": 3}, schedule={"num_iterations": 2}
    )
    moments: dict[str, float] = {}
    for iteration in range(2):
        update = WeightUpdate(received_bytes=9, pull_s=0.01, apply_s=0.0, load_s=0.02, held_s=0.03)
        moments["before"] = await ledger.now()
        await ledger.versions.engine_ready(job_id, iteration, "w1", update)
        moments["ready"] = await ledger.now()
        assert await ledger.iterations.open(job_id, iteration, iteration, tasks_for(iteration, 3)) == ""
        await asyncio.sleep(0.25)  # longer than the groups' durations
        claims = await World(ledger).claim_all(job_id)
        groups = [make_group(claims[0].task), make_group(claims[1].task, "w2"), failed_group(claims[2].task)]
        for claim, group in zip(claims, groups, strict=True):
            if claim is claims[1]:
                await ledger.rollout.release(job_id, "w1", [claim.entry_id])
                (claim,) = await World(ledger).claim_all(job_id, "w2")
            await ledger.rollout.submit(job_id, claim.entry_id, group)
        now = moments["told"] = await ledger.now()
        ids = [f"{iteration}-{index}" for index in range(3)]
        for index, batch in enumerate((ids[:2], ids[2:])):
            assert await ledger.trainer.record_micro_batch(job_id, epoch, iteration, 0, index, batch) == batch
        told = [("checkpoint", now, 0.01)] * iteration
        told += [("micro_batch", now + 0.02, 0.02), ("micro_batch", now + 0.05, 0.01), ("optimizer", now + 0.07, 0.02)]
        told += [("publish", now + 0.10, 0.01), ("publish", now + 0.12, 0.01)]
        metrics: dict[str, Any] = {"spans": told, "reward_mean": 0.5, "num_training_devices": 1}
        await asyncio.sleep(0.15)
        assert await World(ledger).commit(job_id, epoch, iteration, **metrics)
    return job_id, moments


async def test_no_rollout_is_in_the_trace_of_a_supervised_iteration(ledger, receiver):
    """It is one step, however many an iteration of RL has."""
    job_id, epoch = await open_rows(World(ledger), training={"num_updates_per_iteration": 2})
    await ledger.trainer.record_rows(job_id, epoch, 0, "trainer-a", row_groups(0))
    now = await ledger.now()
    spans: Any = [("micro_batch", now, 0.01), ("optimizer", now + 0.02, 0.01)]
    assert await ledger.trainer.record_micro_batch(job_id, epoch, 0, 0, 0, ["0-0", "0-1"]) == ["0-0", "0-1"]
    await asyncio.sleep(0.1)
    assert await World(ledger).commit(job_id, epoch, 0, spans=spans)
    async with exporting(ledger, receiver.url):
        await until("it is there", lambda: exported(receiver, job_id) == [0])
    trace = receiver.traces[sha256_hex(f"{job_id}/0", 32)]
    assert "onbeat-rollout" not in {span.service for span in trace}
    of_groups = ["group", "wait_for_trainer", "micro_batch"] * 2
    assert sorted(span.name for span in trace) == sorted([*of_groups, "iteration", "optimizer"])
    batches = [span for span in trace if span.name == "micro_batch"]
    assert [(span.attributes["onbeat.update"], span.attributes["onbeat.micro_batch"]) for span in batches] == [
        (0, 0)
    ] * 2


async def test_each_group_has_one_path_from_prompt_to_optimizer_step(ledger, receiver):
    job_id, moments = await traced_iterations(ledger)
    async with exporting(ledger, receiver.url):
        await until("both are there", lambda: exported(receiver, job_id) == [0, 1])
    assert receiver.most_often() == 1
    assert receiver.traces.keys() == {sha256_hex(f"{job_id}/{iteration}", 32) for iteration in range(2)}
    trace = receiver.traces[sha256_hex(f"{job_id}/1", 32)]
    record = await ledger.iterations.fields(job_id, 1)
    opened_at, committed_at, told = float(record["opened_at"]), float(record["committed_at"]), moments["told"]

    def span(path):
        (exported,) = [candidate for candidate in trace if candidate.id == sha256_hex(f"{job_id}/1/{path}", 16)]
        return exported

    root, optimizer = span("iteration"), span("optimizer/0")
    assert (root.name, root.parent_id, root.service, root.error) == ("iteration", "", "onbeat-broker", "")
    assert root.end == pytest.approx(committed_at, abs=1e-5)
    assert root.attributes["onbeat.policy_version"] == 1
    assert (root.attributes["onbeat.num_groups"], root.attributes["onbeat.reward_mean"]) == (3, 0.5)
    batches = {"1-0": (0.02, 0.04, 0), "1-1": (0.02, 0.04, 0), "1-2": (0.05, 0.06, 1)}
    for group_id, (batch_start, batch_end, index) in batches.items():
        group = span(f"group/{group_id}")
        assert (group.parent_id, group.name, group.service) == (root.id, "group", "onbeat-broker")
        assert group.start == pytest.approx(opened_at, abs=1e-5)
        assert group.end == optimizer.end
        children = sorted((child for child in trace if child.parent_id == group.id), key=lambda child: child.start)
        failed = group_id == "1-2"
        generated = [] if failed else ["generate", "score"]
        assert [child.name for child in children] == ["wait_for_rollout", *generated, "wait_for_trainer", "micro_batch"]
        assert children[0].start == group.start
        for child, following in pairwise(children):
            assert child.end == pytest.approx(following.start, abs=1e-5)
        batch = children[-1]
        assert (batch.start, batch.end) == pytest.approx((told + batch_start, told + batch_end), abs=1e-3)
        assert (batch.service, batch.instance) == ("onbeat-trainer", "trainer-a")
        assert batch.attributes["onbeat.micro_batch"] == index
        assert "onbeat.is_timed" not in batch.attributes
        assert batch.links == ((root.trace_id, optimizer.id),)
        assert group.error == ("reward_failed: it raised" if failed else "")
    generate, score = span("group/1-1/generate"), span("group/1-1/score")
    assert (generate.end - generate.start, score.end - score.start) == pytest.approx((0.1, 0.1), abs=1e-3)
    assert {(part.service, part.instance) for part in (generate, score)} == {("onbeat-rollout", "w2")}
    entry = (await ledger.iterations.groups(job_id, 1))["1-1"].removeprefix("accepted:")
    assert score.end == pytest.approx(int(entry.partition("-")[0]) / 1000, abs=1e-5)
    assert span("group/1-0").attributes["onbeat.response_tokens"] == 4
    steps = {step.name: step for step in trace if step.parent_id == root.id and step.service == "onbeat-trainer"}
    assert steps.keys() == {"checkpoint", "optimizer", "publish"}
    assert (steps["publish"].start, steps["publish"].end) == pytest.approx((told + 0.1, told + 0.13), abs=1e-3)
    published = (sha256_hex(f"{job_id}/0", 32), sha256_hex(f"{job_id}/0/publish", 16))
    for kind, (start, end) in {"pull": (0.04, 0.03), "load": (0.02, 0.0)}.items():
        (weight_span,) = [candidate for candidate in trace if candidate.name == kind]
        assert moments["before"] - 1e-3 <= weight_span.start + start <= moments["ready"] + 1e-3
        assert weight_span.end - weight_span.start == pytest.approx(start - end, abs=1e-3)
        assert (weight_span.instance, weight_span.parent_id, weight_span.links) == ("w1", root.id, (published,))
    assert all(root.start <= part.start <= part.end <= root.end for part in trace)
    assert len(trace) == 1 + (1 + 5) * 2 + (1 + 3) + 3 + 2
    assert not [part for part in trace if "prompt of" in repr(part) or "response 0" in repr(part)]  # texts stay here


async def test_replacing_group_waits_since_the_other_was_accepted(ledger, world, receiver):
    """0-0 has different rewards; 0-1 failed and is replaced by 0-2."""
    rollout = {"num_prompts_per_iteration": 2, "max_prompts_per_iteration": 3}
    job_id, epoch = await world.started_job(rollout=rollout)
    tasks = tasks_for(0, 3)
    assert await ledger.iterations.open(job_id, 0, 0, tasks[:2], tasks[2:]) == ""
    for make in (make_group, failed_group, make_group):
        (claim,) = await world.claim_all(job_id, count=1)
        await asyncio.sleep(0.25)  # longer than the groups' durations
        await ledger.rollout.submit(job_id, claim.entry_id, make(claim.task))
    assert await world.commit(job_id, epoch, 0)
    async with exporting(ledger, receiver.url):
        await until("it is there", lambda: exported(receiver, job_id) == [0])
    spans = {span.id: span for span in receiver.spans}
    whole, replaced, replacing = (
        spans[sha256_hex(f"{job_id}/0/{path}", 16)] for path in ("iteration", "group/0-1", "group/0-2")
    )
    accepted = (await ledger.iterations.groups(job_id, 0))["0-1"].removeprefix("accepted:")
    assert whole.attributes["onbeat.num_replaced"] == 1
    assert replaced.start == pytest.approx(float((await ledger.iterations.fields(job_id, 0))["opened_at"]), abs=1e-5)
    assert replacing.start == pytest.approx(int(accepted.partition("-")[0]) / 1000, abs=1e-5)
    (waited,) = [span for span in spans.values() if (span.name, span.parent_id) == ("wait_for_rollout", replacing.id)]
    assert waited.start == replacing.start < waited.end


async def test_late_joiner_is_in_the_trace_of_the_open_iteration(ledger, world, receiver):
    """Two iterations may have one version in the mode `bounded`: each load is in one trace."""
    bounded = {"mode": "bounded", "max_staleness": 2, "num_iterations": 9}
    job_id, epoch = await world.started_job(schedule=bounded)
    update = WeightUpdate(received_bytes=1, pull_s=0.0, apply_s=0.0, load_s=0.01)
    for iteration in range(2):
        assert await ledger.iterations.open(job_id, iteration, 0, tasks_for(iteration)) == ""
        await ledger.versions.engine_ready(job_id, 0, f"w{iteration}", update)
        await world.drain(job_id)
        assert await world.commit(job_id, epoch, iteration, is_published=False)
    async with exporting(ledger, receiver.url):
        await until("both are there", lambda: exported(receiver, job_id) == [0, 1])
    loads = {span.instance: span.trace_id for span in receiver.spans if span.name == "load"}
    assert loads == {f"w{iteration}": sha256_hex(f"{job_id}/{iteration}", 32) for iteration in range(2)}
    assert len([span for span in receiver.spans if span.name == "load"]) == 2


async def test_trainer_that_has_taken_over_is_named_from_there_on(ledger, world, receiver):
    job_id = await world.create_job()
    epoch = await world.start_training(job_id, lease_s=0.01)
    await world.run_iteration(job_id, epoch, 0)
    await asyncio.sleep(0.02)
    new_epoch = await ledger.trainer.claim_job(job_id, "trainer-b", LIMIT_S)
    assert new_epoch is not None
    await world.run_iteration(job_id, new_epoch, 1)
    async with exporting(ledger, receiver.url):
        await until("both are there", lambda: exported(receiver, job_id) == [0, 1])
    trainers = {
        iteration: {
            s.instance for s in receiver.traces[sha256_hex(f"{job_id}/{iteration}", 32)] if s.name == "micro_batch"
        }
        for iteration in range(2)
    }
    assert trainers == {0: {""}, 1: {"trainer-b"}}  # the ledger does not record the trainer before


async def test_large_iteration_goes_in_several_requests(ledger, world, receiver):
    job_id, epoch = await world.started_job(rollout={"num_prompts_per_iteration": 300})
    await ledger.iterations.open(job_id, 0, 0, tasks_for(0, 300))
    for _ in range(3):
        await world.drain(job_id)
    assert await world.commit(job_id, epoch, 0)
    async with exporting(ledger, receiver.url) as exporter:
        await until("all are there", lambda: exporter.count("exported") == 1)
    assert receiver.num_requests == 4  # 300 groups of 6 spans, and the root
    assert len({span.id for span in receiver.spans}) == len(receiver.spans) == 1801


# ---- when, and how often ---------------------------------------------------------------------------------------------


async def test_resumed_job_is_traced_on(ledger, world, receiver):
    job_id, epoch = await world.started_job(schedule={"num_iterations": 2})
    await world.run_iteration(job_id, epoch, 0)
    await ledger.jobs.move(job_id, JobState.FAILED, "no disk space")
    exporter = Exporter(ledger, receiver.url)
    for _ in range(2):
        await exporter.tracer.step()
    await ledger.jobs.resume(job_id, JobState.FAILED)
    epoch = await ledger.trainer.claim_job(job_id, "trainer-b", 30.0)  # before the tracer looks again
    await world.run_iteration(job_id, epoch, 1)
    await exporter.tracer.step()
    await exporter.tracer.close()
    assert exported(receiver, job_id) == [0, 1]


async def test_two_brokers_leave_no_iteration_out(ledger, world, receiver):
    """Either may send one, and both may: it is the same trace then."""
    job_id, epoch = await world.started_job(schedule={"num_iterations": 12})
    first, second = Exporter(ledger, receiver.url), Exporter(ledger, receiver.url)
    for iteration in range(12):
        await world.run_iteration(job_id, epoch, iteration)
        await asyncio.gather(first.tracer.step(), second.tracer.step())
    await asyncio.gather(first.tracer.close(), second.tracer.close())
    assert set(exported(receiver, job_id)) == set(range(12))
    assert receiver.most_often() <= 2
    assert len(receiver.traces) == 12


async def test_job_that_cannot_be_read_keeps_no_other_one(ledger, receiver):
    odd_job = await run_job(ledger, 1)
    await ledger.redis.hset(JobKeys(odd_job).job, "next_iteration", "many")
    job_id = await run_job(ledger, 1)
    async with exporting(ledger, receiver.url):
        await until("the other one is there", lambda: exported(receiver, job_id) == [0])
    assert exported(receiver, odd_job) == []


# Spans of a trainer that is not ours
@pytest.mark.parametrize("odd", [["micro_batch", "yesterday", 1], ["publish", 1e300, 1]])
async def test_only_the_unreadable_iteration_of_a_job_has_no_trace(ledger, world, receiver, caplog, odd):
    job_id, epoch = await world.started_job()
    for iteration in range(3):
        await world.run_iteration(job_id, epoch, iteration, **({"spans": [odd]} if iteration == 1 else {}))
    async with exporting(ledger, receiver.url) as exporter:
        await until("all are counted", lambda: (exporter.count("unreadable"), exporter.count("exported")) == (1, 2))
    assert exported(receiver, job_id) == [0, 2]
    assert f"job {job_id}: iteration 1 cannot be read and has no trace: " in caplog.text


async def test_stopping_broker_exports_what_is_left(ledger, world, receiver, monkeypatch):
    monkeypatch.setattr(tracing, "LOOK_S", LIMIT_S)  # only its end makes it look again
    job_id, epoch = await world.started_job()
    await world.run_iteration(job_id, epoch, 0)
    async with exporting(ledger, receiver.url) as exporter:
        await until("the first one is there", lambda: exporter.count("exported") == 1)
        await world.run_iteration(job_id, epoch, 1)
    assert exported(receiver, job_id) == [0, 1]


async def test_commits_without_a_broker_are_traced_later_up_to_a_bound(ledger, receiver, monkeypatch):
    monkeypatch.setattr(tracing, "MAX_BEHIND", 4)
    job_id = await run_job(ledger, 6)
    for _ in range(2):
        exporter = Exporter(ledger, receiver.url)
        await exporter.tracer.step()
        await exporter.tracer.close()
        assert exported(receiver, job_id) == [2, 3, 4, 5]


async def test_job_that_was_over_long_ago_is_left_alone(ledger, receiver, monkeypatch):
    job_id = await run_job(ledger, 1)
    await ledger.jobs.move(job_id, JobState.SUCCEEDED)
    exporter = Exporter(ledger, receiver.url)
    monkeypatch.setattr(tracing, "CATCH_UP_S", -1.0)
    await exporter.tracer.step()
    await exporter.tracer.close()
    assert receiver.num_requests == 0


async def test_every_nth_iteration_is_traced(ledger, receiver):
    job_id = await run_job(ledger, 5)
    async with exporting(ledger, receiver.url, trace_every_iterations=2):
        await until("the last one is there", lambda: exported(receiver, job_id) == [0, 2, 4])
    assert await ledger.iterations.next_untraced(job_id) == 5
    assert await ledger.redis.ttl(JobKeys(job_id).traces) > 0  # a record of a deleted job does not stay


async def test_iteration_whose_groups_are_gone_is_left_out(ledger, world, receiver):
    job_id, epoch = await world.started_job()
    for iteration in range(3):
        await world.run_iteration(job_id, epoch, iteration)
    await ledger.trainer.checkpointed(job_id, epoch, 0, 4, "/c")
    assert await ledger.iterations.trim(job_id, 0, 0)
    async with exporting(ledger, receiver.url) as exporter:
        await until("all are counted", lambda: (exporter.count("missed"), exporter.count("exported")) == (1, 2))
    assert exported(receiver, job_id) == [1, 2]


# ---- collectors that do not do what they should ----------------------------------------------------------------------


async def test_collector_that_was_away_gets_what_it_missed(ledger, world, caplog, quick):
    port = free_port()
    job_id, epoch = await world.started_job()
    async with exporting(ledger, f"http://127.0.0.1:{port}", otlp_timeout_s=QUICK_S) as exporter:
        for iteration in range(3):
            await world.run_iteration(job_id, epoch, iteration)
        await until("it was tried again", lambda: exporter.num_failures >= 3)
        assert await ledger.iterations.next_untraced(job_id) == 0
        warnings = {line.getMessage().split(" for ")[0] for line in caplog.records if line.levelno >= logging.WARNING}
        assert warnings == {f"no traces to http://127.0.0.1:{port}/v1/traces"}
        assert "Connection refused" in caplog.text
        with Receiver(port=port) as receiver:
            await until("all are there", lambda: exported(receiver, job_id) == [0, 1, 2])
            await until("all are counted", lambda: exporter.count("exported") == 3)
            assert receiver.most_often() == 1


@pytest.mark.parametrize("status", [429, 503])
async def test_collector_that_is_busy_is_asked_again(ledger, quick, status):
    answers = iter([(status, b""), (status, b"")])
    job_id = await run_job(ledger, 1)
    with Receiver(answer=lambda _: next(answers, (200, OK))) as receiver:
        async with exporting(ledger, receiver.url, otlp_timeout_s=QUICK_S) as exporter:
            await until("it is there", lambda: exported(receiver, job_id) == [0])
            assert exporter.num_failures >= 2


@pytest.mark.parametrize("status", [302, 400, 500])
async def test_trace_refused_by_a_collector_is_counted_and_not_resent(ledger, status):
    answers = iter([(status, b"no")])
    job_id = await run_job(ledger, 2)
    with Receiver(answer=lambda _: next(answers, (200, OK))) as receiver:
        async with exporting(ledger, receiver.url) as exporter:
            await until("the second one is there", lambda: exported(receiver, job_id) == [1])
        assert (exporter.count("refused"), exporter.count("exported"), exporter.num_failures) == (1, 1, 0)
        assert receiver.num_requests == 2


async def test_trace_too_large_for_a_request_is_refused(ledger, monkeypatch):
    monkeypatch.setattr(trace_exporter, "_DEFAULT_MAX_REQUEST_SIZE", 100)
    await run_job(ledger, 1)
    with Receiver() as receiver:
        async with exporting(ledger, receiver.url) as exporter:
            await until("it is counted", lambda: exporter.count("refused") == 1)
        assert (exporter.num_failures, receiver.num_requests) == (0, 0)


async def test_silent_collector_delays_neither_the_broker_nor_its_end(ledger, tmp_path):
    job_id = await run_job(ledger, 1)

    def sleep(_):
        time.sleep(LIMIT_S)
        return 200, OK

    with Receiver(answer=sleep) as receiver:
        settings = {"otlp_endpoint": receiver.url, "otlp_timeout_s": 0.2}
        async with running_broker(ledger, tmp_path, **settings) as broker:
            failures = 0.0
            deadline = time.monotonic() + LIMIT_S
            while failures < 1:
                assert time.monotonic() < deadline, "no deadline has passed"
                asked_at = time.monotonic()
                assert (await broker.get(f"/v1/jobs/{job_id}")).status_code == 200
                assert time.monotonic() - asked_at < 5
                lines = (await broker.get("/metrics")).text.splitlines()
                (line,) = [line for line in lines if line.startswith("onbeat_trace_failures_total")]
                failures = float(line.split()[1])
            ended_at = time.monotonic()
        assert time.monotonic() - ended_at < tracing.CLOSE_S + 5
    assert await ledger.iterations.next_untraced(job_id) == 0


@asynccontextmanager
async def trickling() -> AsyncIterator[str]:
    """Serve an answer one byte at a time, for ever: no single read takes long."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.01)

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


async def test_collector_that_sends_single_bytes_meets_the_deadline(ledger):
    await run_job(ledger, 1)
    async with trickling() as url, exporting(ledger, url, otlp_timeout_s=0.3) as exporter:
        await until("it is given up", lambda: exporter.num_failures == 1)


async def test_key_of_the_collector_is_sent(ledger, receiver, tmp_path):
    path = tmp_path / "headers"
    path.write_text("Authorization=Bearer abc=\n\nX-Scope-OrgID = team\n")
    await run_job(ledger, 1)
    async with exporting(ledger, receiver.url, otlp_headers_file=path):
        await until("it is there", lambda: bool(receiver.spans))
    headers = {name.lower(): value for name, value in receiver.headers[0].items()}
    assert (headers["authorization"], headers["x-scope-orgid"]) == ("Bearer abc=", "team")


async def test_certificate_of_the_collector_is_checked(ledger, tmp_path):
    authority, stranger = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    certificate, key = authority.issue("127.0.0.1")
    job_id = await run_job(ledger, 1)
    with Receiver(certificate=certificate, key=key) as receiver:
        for wrong in ({}, {"otlp_tls_ca": stranger.cert}):
            async with exporting(ledger, receiver.url, otlp_timeout_s=QUICK_S, **wrong) as exporter:
                await until("it is not trusted", lambda exporter=exporter: exporter.num_failures >= 1)
        assert receiver.num_requests == 0
        async with exporting(ledger, receiver.url, otlp_tls_ca=authority.cert):
            await until("it is there", lambda: exported(receiver, job_id) == [0])


# ---- off, and settings -----------------------------------------------------------------------------------------------


NOT_INSTALLED = """
import sys
sys.modules["opentelemetry"] = None
from services.broker.__main__ import main
sys.exit(main())
"""


def test_broker_says_which_package_is_missing():
    environment = os.environ | {"ONBEAT_OTLP_ENDPOINT": "http://127.0.0.1:4318"}
    command = [sys.executable, "-c", NOT_INSTALLED]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert ended.returncode == 2
    assert "ONBEAT_OTLP_ENDPOINT is set, but opentelemetry-exporter-otlp-proto-http is not installed" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "endpoint",
    ["collector:4318", "ftp://c", "http://", "http://u:p@c:4318", "http://c:x", "http://c?a=b", "http://c:0"],
)
def test_endpoint_that_is_no_address_is_refused(endpoint):
    with pytest.raises(ValueError, match="ONBEAT_OTLP_ENDPOINT is not like http://collector:4318"):
        Settings(otlp_endpoint=endpoint)


@pytest.mark.parametrize("content", ["Authorization: secret", "A=", "A B=secret", "A=se\x00cret"])
def test_broken_headers_are_refused_without_telling_them(tmp_path, content):
    path = tmp_path / "headers"
    path.write_text(f"X-First=1\n{content}\n")
    with pytest.raises(ValueError, match="line 2 is not like name=value") as caught:
        Settings(otlp_endpoint="http://c:4318", otlp_headers_file=path)
    assert "cret" not in str(caught.value)


def test_files_that_are_not_there_are_named(tmp_path):
    for name in ("otlp_headers_file", "otlp_tls_ca"):
        with pytest.raises(ValueError, match=f"ONBEAT_{name.upper()}={tmp_path / 'none'}"):
            Settings(otlp_endpoint="https://c:4318", **{name: tmp_path / "none"})
