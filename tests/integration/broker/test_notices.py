"""Notices to the operator: a real ledger on one side, a real program and a real HTTP server on the other."""

import asyncio
import json
import logging
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from onbeat.contracts.records import Finding
from onbeat.contracts.states import JobState
from onbeat.streams.keys import JobKeys
from onbeat.streams.ledger import Ledger
from services.broker import notices
from services.broker.notices import Notifier
from services.broker.settings import Settings
from tests.broker_fixtures import running_broker
from tests.waiting import eventually
from tests.world import World


class Hook:
    """A webhook that keeps what it is sent, and answers with `statuses`, the last of them for ever."""

    def __init__(self) -> None:
        self.statuses, self.bodies = [200], list[dict[str, Any]]()
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                hook.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(hook.statuses.pop(0) if len(hook.statuses) > 1 else hook.statuses[0])
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/secret-path"


@pytest.fixture
def hook() -> Iterator[Hook]:
    hook = Hook()
    thread = threading.Thread(target=hook.server.serve_forever, args=[0.02])
    thread.start()
    yield hook
    hook.server.shutdown()
    thread.join()
    hook.server.server_close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "LOOK_S", 0.02)
    monkeypatch.setattr(notices, "RETRY_S", 0.01)


@pytest.fixture(scope="module")
def redis_url(redis_url: str) -> str:
    """Return the URL of a separate database: a notifier tells of the jobs of all tests that share one."""
    return f"{redis_url}/2"


def of_job(bodies: list[dict[str, Any]], job_id: str) -> list[tuple[str, str]]:
    return [(body["kind"], body["message"]) for body in bodies if body["job_id"] == job_id]


async def test_end_of_a_job_reaches_command_and_webhook_once(
    ledger: Ledger, world: World, hook: Hook, tmp_path: Path
) -> None:
    kept, program = tmp_path / "notices", tmp_path / "keep it.py"
    program.write_text("import sys; open(sys.argv[1], 'a').write(sys.stdin.read())", "utf-8")
    settings = {
        "notify_command": f"{sys.executable} '{program}' {kept}",
        "notify_url": hook.url,
        "redis_url": "redis://:password@127.0.0.1",
    }
    job_id, epoch = await world.started_job()
    await world.run_iteration(job_id, epoch, 0, reward_mean=0.25)
    async with running_broker(ledger, tmp_path, **settings):
        second = Notifier(ledger, Settings(data_dir=tmp_path, **settings))  # another broker has it
        await ledger.jobs.move(job_id, JobState.FAILED, "the disk is gone")
        await asyncio.gather(second.look(), second.look())
        await eventually("the command has run", lambda: kept.exists() and kept.read_text("utf-8").endswith("\n"))
        await eventually("the webhook was called", lambda: of_job(hook.bodies, job_id))
    await second.close()
    (line,) = kept.read_text("utf-8").splitlines()
    assert json.loads(line) == hook.bodies[0]
    assert of_job(hook.bodies, job_id) == [("job.failed", "FAILED after 1 of 3 iterations: the disk is gone")]
    assert {name: hook.bodies[0][name] for name in ("name", "state", "next_iteration", "reward_mean")} == {
        "name": "test",
        "state": "FAILED",
        "next_iteration": 1,
        "reward_mean": 0.25,
    }


async def test_record_that_cannot_be_read_costs_its_own_notice_alone(
    ledger: Ledger, world: World, hook: Hook, caplog: pytest.LogCaptureFixture
) -> None:
    odd, sound = await world.create_job(), await world.create_job()
    await ledger.redis.hset(JobKeys(odd).job, "next_iteration", "many")
    for job_id in (odd, sound):
        await ledger.jobs.move(job_id, JobState.CANCELLED)
    notifier = Notifier(ledger, Settings(notify_url=hook.url))
    await notifier.look()
    await notifier.close()
    assert [kind for kind, _ in of_job(hook.bodies, sound)] == ["job.cancelled"]
    assert of_job(hook.bodies, odd) == []
    assert f"no notice of job {odd}: its record cannot be read" in caplog.text


async def test_first_lasting_problem_is_sent_once(
    ledger: Ledger, world: World, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, _ = await world.started_job()
    findings = [Finding(sentence="it is just starting", is_problem=True, since_s=3.0), Finding(sentence="all is well")]

    async def explain(_: Ledger, about: str) -> list[Finding]:
        return findings if about == job_id else []

    monkeypatch.setattr(notices, "explain_job", explain)
    monkeypatch.setattr(notices, "EXPLAIN_S", 0.0)
    notifier = Notifier(ledger, Settings(notify_url=hook.url))
    await notifier.look()
    findings += [Finding(sentence="it learns nothing", is_problem=True), Finding(sentence="more", is_problem=True)]
    await notifier.look()
    await notifier.look()
    await notifier.close()
    assert of_job(hook.bodies, job_id) == [("job.problem", "it learns nothing")]


async def test_failed_deliveries_are_bounded_and_hurt_no_job(
    ledger: Ledger, world: World, hook: Hook, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="services.broker.notices")
    hook.statuses = [503, 503, 200]
    slow = f"{sys.executable} -c 'import time; time.sleep(60)'"
    broken = f"""{sys.executable} -c 'import sys; sys.exit("no such channel")'"""
    cases = {
        "is delivered": {"notify_url": hook.url},
        "is given up after 4 tries: the command exited with 1: no such channel": {"notify_command": broken},
        "is given up after 4 tries: no end within 0.2 s": {"notify_command": slow, "notify_timeout_s": 0.2},
        "is given up after 4 tries: 127.0.0.1 did not answer (ConnectError)": {"notify_url": "http://127.0.0.1:1/x"},
    }
    for said, settings in cases.items():
        job_id, _ = await world.started_job()
        notifier = Notifier(ledger, Settings(**settings))
        await ledger.jobs.move(job_id, JobState.FAILED, "for a test")
        await notifier.close()
        assert f"notice job.failed of job {job_id} {said}" in caplog.text
    assert len(hook.bodies) == 3
    hook.statuses = [404]
    job_id, _ = await world.started_job()
    await ledger.jobs.move(job_id, JobState.FAILED, "for a test")
    await Notifier(ledger, Settings(notify_url=hook.url)).close()
    assert f"{job_id} is given up after 1 tries: 127.0.0.1 answered 404" in caplog.text
    assert "secret-path" not in caplog.text


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"notify_command": "no-such-program --now"}, "there is no program 'no-such-program' here; give its path"),
        ({"notify_command": "echo 'half"}, "No closing quotation; quote its words as for a shell"),
        ({"notify_url": "chat.example/hook"}, "is no address with http:// or https:// and a host"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason.replace("(", r"\(")):
        Settings(**settings)
