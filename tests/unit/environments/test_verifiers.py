"""Outcomes of records as verifiers 0.4.0 writes them, joined with the session's answers, and the player's process."""

import asyncio
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from onbeat.environments import Outcome, Task, verifiers
from onbeat.environments.verifiers import VerifiersEnvironment, outcome_of, write_tasks
from tests.scripted_session import ScriptedSession
from tests.waiting import wait_until

# The record has two calls with a tool between them: the first one's prompt is 1 2, its sample 3 4.
NODES = [
    {"message": {"role": "user", "content": "2 + 2 ="}, "sampled": False, "token_ids": []},
    {"parent": 0, "message": {"role": "assistant"}, "sampled": True, "token_ids": [1, 2, 3, 4]},
    {"parent": 1, "message": {"role": "tool", "content": "4"}, "sampled": False, "token_ids": []},
    {"parent": 2, "message": {"role": "assistant", "content": "4"}, "sampled": True, "token_ids": [5, 6]},
]
TRACE = {
    "agent": {"name": "agent", "trainable": True},
    "nodes": NODES,
    "rewards": {"right": {"score": 1.0, "weight": 2.0}, "short": {"score": 0.5, "weight": 1.0}},
    "metrics": {"length": 1.0, "unknown": None},
    "ok": True,
    "errors": [],
    "stop_condition": "agent_completed",
    "is_timeout": False,
}
RECORD = {"ok": True, "is_timeout": False, "errors": [], "traces": [TRACE]}
ANSWERS = [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6]]


def test_reward_is_the_weighted_sum_and_metrics_are_parts():
    judge = TRACE | {"agent": {"name": "judge", "trainable": False}, "nodes": []}
    assert outcome_of(RECORD, ANSWERS) == Outcome(2.5, {"length": 1.0, "right": 2.0, "short": 0.5})
    assert outcome_of(RECORD | {"traces": [judge, TRACE]}, ANSWERS).reward == 2.5


FORKED = [*NODES, {"message": {"role": "assistant"}, "sampled": True, "token_ids": [1, 2, 3, 4]}]


@pytest.mark.parametrize(
    ("nodes", "answers", "words"),
    [
        (FORKED, [ANSWERS[1], ANSWERS[0], ANSWERS[0]], ""),  # any order, and as many repetitions as given
        (FORKED, ANSWERS, "1 messages of the trace are no answer of the episode's session"),
        (NODES, ANSWERS[:1], "1 messages of the trace are no answer"),
        (NODES, [[1, 2, 3, 4], [1, 2, 3, 4, 5, 7]], "1 messages of the trace are no answer"),
        (NODES, [*ANSWERS, [1, 2, 9]], "1 answers of the policy are not in the trace that has the reward"),
    ],
)
def test_each_call_of_the_trace_has_its_answer_and_the_reverse(nodes, answers, words):
    with pytest.raises(RuntimeError, match=words) if words else contextlib.nullcontext():
        outcome_of(RECORD | {"traces": [TRACE | {"nodes": nodes}]}, answers)


@pytest.mark.parametrize(
    ("episode", "trace", "words"),
    [
        ({"ok": False}, {"errors": [{"type": "TaskError", "message": "gone"}]}, "verifiers failed: TaskError: gone"),
        ({"ok": False}, {}, "verifiers failed"),
        ({}, {"is_timeout": True, "stop_condition": "scoring_timeout"}, "verifiers stopped: scoring_timeout"),
        ({}, {"rewards": {}}, "gives no reward"),
        ({}, {"rewards": {"right": None}}, "gives no reward"),
        ({}, {"rewards": TRACE["rewards"] | {"judge": None}}, "gives no reward"),
        ({}, {"agent": {"name": "agent", "trainable": False}}, "0 agents of the environment are trained"),
        ({"traces": [TRACE, TRACE]}, {}, "2 agents of the environment are trained"),
    ],
)
def test_what_is_no_reward_is_a_failure(episode, trace, words):
    record = RECORD | {"traces": [TRACE | trace]} | episode
    with pytest.raises(RuntimeError, match=words):
        outcome_of(record, ANSWERS)


# ---- the process, with a player that knows no verifiers --------------------------------------------------------------

PLAYER = """
import asyncio, json, os, sys, tempfile
from pathlib import Path
from aiohttp import web

async def play(request):
    task = (await request.json())["task"]
    Path(task["place"]).write_text("begun")
    try:
        await asyncio.sleep(task["nap_s"])
    finally:
        Path(task["place"]).write_text("over")
    if "record" not in task:
        raise web.HTTPUnprocessableEntity(text="no such task")
    return web.json_response({"record": task["record"], "answers": task["answers"]})

async def serve(folder):
    app = web.Application()
    app.router.add_post("/", play)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.UnixSite(runner, folder + "/socket").start()
    print(folder + "/socket", flush=True)
    await asyncio.to_thread(os.read, 0, 1)

config = json.loads(sys.argv[1])
if "broken" in config:
    sys.exit("no such taskset")
elif len(sys.argv) > 2:
    print(json.dumps({"prompt": config["prompt"], "task": int(sys.argv[2])}))
else:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(serve(folder))
"""


@pytest.fixture
def player(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "player.py").write_text(PLAYER)
    monkeypatch.setattr(verifiers, "PLAYER", tmp_path / "player.py")


def task_of(place: Path, nap_s: float = 0.0, **fields: Any) -> Task:
    return Task([], "", metadata={"task": {"place": str(place), "nap_s": nap_s} | fields})


@pytest.mark.usefixtures("player")
async def test_episode_is_played_by_a_process_that_ends_with_its_stdin(tmp_path, monkeypatch):
    environment = VerifiersEnvironment(sys.executable, {})
    task = task_of(tmp_path / "place", record=RECORD, answers=ANSWERS)
    assert (await environment.run(task, ScriptedSession())).reward == 2.5
    with pytest.raises(RuntimeError, match="verifiers cannot play the task: no such task"):
        await environment.run(task_of(tmp_path / "place"), ScriptedSession())
    with pytest.raises(ValueError, match="the row has no field `task`: write the data with write_tasks"):
        await environment.run(Task([], ""), ScriptedSession())
    environment._process.stdin.close()
    assert await asyncio.to_thread(environment._process.wait, 30) == 0
    monkeypatch.setattr(verifiers.os, "_exit", sys.exit)  # so that a new process starts a new player
    with pytest.raises(SystemExit):
        await environment.run(task, ScriptedSession())


@pytest.mark.usefixtures("player")
async def test_cancelled_episode_is_cancelled_in_the_process(tmp_path):
    environment = VerifiersEnvironment(sys.executable, {})
    place = tmp_path / "place"
    playing = asyncio.create_task(environment.run(task_of(place, nap_s=3600.0), ScriptedSession()))
    await asyncio.to_thread(wait_until, lambda: place.exists() and place.read_text() == "begun", "it has begun")
    playing.cancel()
    await asyncio.to_thread(wait_until, lambda: place.read_text() == "over", "it is over")


@pytest.mark.usefixtures("player")
def test_tasks_become_rows_of_data(tmp_path):
    write_tasks(sys.executable, {"prompt": "2 + 2 ="}, str(tmp_path / "tasks.jsonl"), 7)
    assert json.loads((tmp_path / "tasks.jsonl").read_text()) == {"prompt": "2 + 2 =", "task": 7}
    with pytest.raises(RuntimeError, match="cannot load the tasks"):
        write_tasks(sys.executable, {"broken": True}, str(tmp_path / "tasks.jsonl"), 7)


def test_tasks_that_never_come_are_given_up(tmp_path, monkeypatch):
    (tmp_path / "player.py").write_text("import time; time.sleep(3600)")
    monkeypatch.setattr(verifiers, "PLAYER", tmp_path / "player.py")
    monkeypatch.setattr(verifiers, "TASKS_DEADLINE_S", 0.2)
    with pytest.raises(RuntimeError, match="cannot load the tasks within 0 s"):
        write_tasks(sys.executable, {}, str(tmp_path / "tasks.jsonl"), 7)


def test_environment_that_cannot_be_built_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ImportError, match=r"^verifiers is not installed .*: /.* -m pip install verifiers uv"):
        VerifiersEnvironment(sys.executable, {})
    (tmp_path / "player.py").write_text("raise SystemExit('no such taskset')")
    monkeypatch.setattr(verifiers, "PLAYER", tmp_path / "player.py")
    with pytest.raises(RuntimeError, match="verifiers cannot build the environment"):
        VerifiersEnvironment(sys.executable, {})
