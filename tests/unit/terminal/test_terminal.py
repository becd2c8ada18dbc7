"""`onbeat jobs watch` and `onbeat top` in real terminals and pipes."""

import json
import os
import signal
import socket
import subprocess
import sys
import termios
import time

import pytest

from onbeat.client import AsyncClient
from onbeat.contracts.records import Finding, WorkerRecord
from onbeat.contracts.states import JobState
from onbeat.streams import keys
from onbeat.terminal.top import take_overview
from tests.broker_thread import BrokerThread
from tests.conftest import free_port
from tests.unit.terminal.screen import LIMIT_S, ROOT, Terminal
from tests.world import World

pytestmark = pytest.mark.slow


@pytest.fixture
def endless(broker: BrokerThread, trainer: None) -> str:
    """Create a job that is trained for ever and return its id."""
    return broker.create_job(name="tiny", schedule={"num_iterations": 1_000_000})


@pytest.mark.usefixtures("trainer")
def test_dumb_terminal_gets_plain_lines(job_id: str) -> None:
    with Terminal("jobs", "watch", job_id, TERM="dumb") as terminal:
        assert terminal.wait_for_end() == 0
    assert b"\x1b" not in terminal.raw
    assert b"iteration 3/3" in terminal.raw


def test_small_terminal_shows_the_essentials_and_no_line_wraps(
    broker: BrokerThread, endless: str, findings: list[Finding]
) -> None:
    sentence = "rollout-7 is silent, and " + "so on and on " * 40
    findings.append(Finding(sentence=sentence, is_problem=True, waits_for="a trainer"))
    broker.beat(*(WorkerRecord(id=f"rollout-{i}-of-a-long-name", state="generating") for i in range(40)))
    with Terminal("jobs", "watch", endless, columns=60, rows=20) as terminal:
        for text in ("tiny  RUNNING", "problem      rollout-7 is silent", "reward ", "40: 40 generating", " s elapsed"):
            terminal.wait_for(text)
        assert len(terminal.screen.lines) <= 20 + 1  # the notice about the job's state went by
        labels = [line.split()[0] for line in terminal.screen.lines if line.strip()]
        assert labels.count("reward") == labels.count("trainer") == 1  # nothing is left of earlier drawings


def test_words_and_rows_stay_whole_on_80_columns(trained: str) -> None:
    """Lists leave columns out, and sentences are wrapped: a terminal would break them in mid-word."""
    for command in (
        ("jobs", "list"),
        ("jobs", "iterations", trained),
        ("jobs", "events", trained),
        ("doctor", trained),
        ("audit", trained),
        ("jobs", "get", "no-such-job"),
    ):
        with Terminal(*command) as terminal:
            terminal.wait_for_end()
        lines = terminal.raw.decode().splitlines()
        assert max(map(len, lines)) <= 80, command
        assert len(lines) > 1, command


def test_resized_terminal_is_drawn_anew_also_without_colours(endless: str) -> None:
    with Terminal("jobs", "watch", endless, columns=100, rows=30, NO_COLOR="1") as terminal:
        terminal.wait_for("generated")
        terminal.resize(40, 12)
        before = len(terminal.raw)
        terminal.wait_until(lambda: b"\x1b[2J" in terminal.raw[before:], "the screen is not cleared")
        terminal.screen.widest = 0
        terminal.wait_until(lambda: terminal.screen.widest > 0, "nothing is drawn")
        terminal.wait_for("generated")
        assert terminal.screen.widest <= 40
    assert not [code for code in (b"[31m", b"[32m", b"[33m", b";31m", b";32m", b";33m") if code in terminal.raw]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("command", "shown", "code"), [(["jobs", "watch"], "reward", 130), (["top"], "ROLLOUT", 0)])
def test_interrupted_view_leaves_terminal_and_job_in_order(
    broker: BrokerThread, endless: str, number: signal.Signals, command: list[str], shown: str, code: int
) -> None:
    broker.beat(WorkerRecord(id="rollout-0", state="generating"))
    url = f"{broker.url}/"  # not that of the environment
    with Terminal(*command, *([endless] if "watch" in command else []), "--url", url, columns=200) as terminal:
        terminal.wait_for(shown)
        assert not terminal.screen.has_cursor
        if number == signal.SIGINT:
            terminal.press(b"\x03")
        else:
            terminal.process.send_signal(number)
        assert terminal.wait_for_end() == code
        assert terminal.screen.has_cursor
        assert not terminal.screen.is_alternate
        assert termios.tcgetattr(terminal.slave) == terminal.modes
    assert "Traceback" not in terminal.screen.text
    if code:
        assert "reward " in terminal.screen.text, "the last view stays"
        assert f"onbeat jobs watch {endless} --url {url}   comes back" in terminal.screen.text
        assert f"onbeat jobs cancel {endless} --url {url}  ends it" in terminal.screen.text
    assert broker.run(broker.ledger.jobs.state(endless)) is JobState.RUNNING


def test_broker_that_is_lost_and_returns_is_survived(broker: BrokerThread, endless: str) -> None:
    port = free_port()
    with broker.serve(port) as url:
        terminal = Terminal("jobs", "watch", endless, columns=120, ONBEAT_URL=url)
        terminal.wait_for("reward")
    with terminal:
        terminal.wait_for("broker       does not answer, trying again")
        with broker.serve(port):
            terminal.wait_for("the broker answers again")
            broker.run(broker.ledger.jobs.move(endless, JobState.CANCELLING))
            assert terminal.wait_for_end() == 1
    assert "state       CANCELLED" in "\n".join(terminal.screen.lines)


@pytest.mark.parametrize(("harm", "reason"), [("refuse", "not now (401)"), ("delete", "there is no job")])
def test_refused_question_ends_the_watch_with_an_error(
    broker: BrokerThread, endless: str, harm: str, reason: str
) -> None:
    with Terminal("jobs", "watch", endless, columns=120) as terminal:
        terminal.wait_for("reward")
        if harm == "refuse":
            broker.wire.failures = [401]
        else:
            broker.run(broker.ledger.redis.flushall())
        assert terminal.wait_for_end() == 1
    assert reason in terminal.screen.text


# ---- top ---------------------------------------------------------------------------------------------------------


def test_top_once_and_in_a_pipe_is_one_plain_table_or_json(broker: BrokerThread) -> None:
    def in_pipe(*arguments: str, **env: str) -> str:
        command = [sys.executable, "-m", "onbeat.cli", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | env, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr
        return done.stdout

    job_id, _ = broker.run(World(broker.ledger).started_job(name="tiny"))
    broker.beat(WorkerRecord(id="rollout-10", state="idle"), WorkerRecord(id="rollout-9", state="idle"))
    broker.beat(WorkerRecord(id="rollout-2", state="generating", job_id=job_id), ago_s=100.0)
    out = in_pipe("top")
    assert "\x1b" not in out
    lines = [line.split() for line in out.splitlines()]
    assert lines[1][:4] == [job_id, "tiny", "default", "RUNNING"]
    assert [line[0] for line in lines[4:7]] == ["rollout-2", "rollout-9", "rollout-10"]
    assert lines[4][2:4] == ["silent", job_id]
    with Terminal("top", "--once") as terminal:
        assert terminal.wait_for_end() == 0
    assert b"\x1b" not in terminal.raw
    assert b"rollout-10" in terminal.raw
    (pool,) = json.loads(in_pipe("top", "--json"))["pools"]
    assert [worker["id"] for worker in pool["workers"]] == ["rollout-10", "rollout-2", "rollout-9"]


def test_top_fits_a_small_terminal_and_counts_what_it_cuts(broker: BrokerThread, job_id: str) -> None:
    broker.beat(*(WorkerRecord(id=f"rollout-{i}", state="generating", job_id=job_id) for i in range(1200)))
    with Terminal("top", columns=60, rows=20) as terminal:
        terminal.wait_for("more rollouts")
        assert terminal.screen.is_alternate
        rows = [line for line in terminal.screen.text.splitlines() if line.startswith("rollout-")]
        assert f"and {1200 - len(rows):,} more rollouts" in terminal.screen.text
        assert [row.split()[0] for row in rows] == [f"rollout-{i}" for i in range(len(rows))]
        assert len(terminal.screen.lines) <= 20
        broker.run(broker.ledger.redis.delete(keys.workers("default")))
        terminal.wait_for("no rollouts")  # it is refreshed
        terminal.press(b"q")
        assert terminal.wait_for_end() == 0
        assert terminal.screen.has_cursor
        assert not terminal.screen.is_alternate
        assert termios.tcgetattr(terminal.slave) == terminal.modes


def test_top_says_that_the_broker_hangs_and_takes_keys_meanwhile(broker: BrokerThread) -> None:
    broker.beat(WorkerRecord(id="rollout-0", state="generating"))
    port = free_port()
    with broker.serve(port) as url:
        terminal = Terminal("top", columns=120, ONBEAT_URL=url)
        terminal.wait_for("rollout-0")
    with terminal, socket.create_server(("127.0.0.1", port)):  # takes questions, and answers none
        terminal.wait_for("the broker does not answer since")
        pressed_at = time.monotonic()
        terminal.press(b"q")
        assert terminal.wait_for_end() == 0
        assert time.monotonic() - pressed_at < 10  # a question is given up after 15 s, and asked again
        assert termios.tcgetattr(terminal.slave) == terminal.modes


async def test_top_asks_for_the_jobs_once_and_finds_old_ones_too(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    oldest, *others = [broker.create_job() for _ in range(4)]
    async with AsyncClient(broker.url) as client:
        for job_id in others:
            await client.jobs.cancel(job_id)
        for num_newest, num_questions in ((5, 1), (4, 5), (2, 5)):
            monkeypatch.setattr("onbeat.client.active.NUM_NEWEST", num_newest)
            broker.wire.requests.clear()
            assert [job.id for job in (await take_overview(client)).jobs] == [oldest]
            assert broker.wire.requests.count(("GET", "/v1/jobs")) == num_questions


def test_ctrl_d_ends_a_chat_with_a_whole_line(job_id: str) -> None:
    with Terminal("chat", job_id) as terminal:
        terminal.wait_for("> ")
        terminal.press(b"\x04")
        assert terminal.wait_for_end() == 0
    assert terminal.screen.lines == ["> ", ""]


def test_ctrl_c_ends_a_chat_that_waits_for_a_line(job_id: str) -> None:
    with Terminal("chat", job_id) as terminal:
        terminal.wait_for("> ")
        time.sleep(0.5)  # Python loses a signal between the prompt and the reading
        terminal.press(b"\x03")
        assert terminal.wait_for_end() == 130
    assert "Traceback" not in terminal.screen.text
