"""Environments of the package `verifiers`, which is installed in a virtual environment of its own.

Its Python and the environment's configuration come from the package that the operator installed, never from a job:

    def words() -> VerifiersEnvironment:                   # installed under `onbeat.environments`
        return VerifiersEnvironment("/opt/verifiers/bin/python", {"taskset": {"id": "words"}})
"""

import json
import logging
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Timer
from typing import Any

import httpx

from onbeat.environments.session import Session
from onbeat.environments.types import Outcome, Task

logger = logging.getLogger(__name__)

PLAYER = Path(__file__).with_name("verifiers_player.py")
TASKS_DEADLINE_S = 1800.0  # a taskset may be downloaded first
EPISODE_DEADLINE_S = 86_400.0  # the rollout ends the episode long before


class VerifiersEnvironment:
    """An environment of `verifiers`, in a process that lives as long as this one.

    `environment`: the table `[env]` of a configuration of verifiers. Raises ImportError, with the remedy, where that
    Python has no `verifiers`, and RuntimeError when the environment cannot be built.
    """

    def __init__(self, python: str, environment: Mapping[str, Any]) -> None:
        self._process = start(python, environment)
        assert self._process.stdout is not None
        ready = self._process.stdout.readline().strip()
        if not ready.startswith("/"):
            raise (ImportError if ready else RuntimeError)(ready or "verifiers cannot build the environment; see above")
        # The socket takes no proxy and no name: the host in the URL is never looked up.
        transport = httpx.AsyncHTTPTransport(uds=ready, limits=httpx.Limits(max_connections=None))
        self._http = httpx.AsyncClient(transport=transport, timeout=EPISODE_DEADLINE_S, base_url="http://player")

    async def run(self, task: Task, policy: Session) -> Outcome:
        """Play the task in the row's field `task`. When this is cancelled, so is the episode."""
        if "task" not in task.metadata:
            raise ValueError("the row has no field `task`: write the data with write_tasks, of the same module")
        asked = {"task": task.metadata["task"], "url": policy.url, "key": policy.key}
        try:
            answer = await self._http.post("/", json=asked)
        except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
            logger.error("the player of verifiers is gone: %r", error)
            os._exit(1)  # all episodes here are lost with it; a new process starts a new one
        if not answer.is_success:
            raise RuntimeError(f"verifiers cannot play the task: {answer.text[-500:]}")
        played = answer.json()
        return outcome_of(played["record"], played["answers"])


def write_tasks(python: str, environment: Mapping[str, Any], path: str, num_tasks: int) -> None:
    """Write the first tasks of an environment's taskset as data of a job: JSONL, each with its task in `task`."""
    with start(python, environment, str(num_tasks)) as process:
        assert process.stdout is not None
        deadline = Timer(TASKS_DEADLINE_S, process.kill)
        deadline.daemon = True
        deadline.start()
        rows = process.stdout.read()
        exit_code = process.wait()
        deadline.cancel()
    if exit_code == -signal.SIGKILL:
        raise RuntimeError(f"verifiers cannot load the tasks within {TASKS_DEADLINE_S:.0f} s")
    if exit_code != 0:
        raise RuntimeError(rows or "verifiers cannot load the tasks; see above")
    Path(path).write_text(rows, encoding="utf-8")


def start(python: str, environment: Mapping[str, Any], *arguments: str) -> "subprocess.Popen[str]":
    """Start a player. It ends when its stdin does, also when this process is killed: it stops its servers first."""
    command = [python, "-I", str(PLAYER), json.dumps(environment), *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)


def outcome_of(record: Mapping[str, Any], answers: Sequence[Sequence[int]]) -> Outcome:
    """Return the outcome of an episode of verifiers. Raises RuntimeError when it failed, or when the reward is not for
    exactly the calls that the session answered: `answers`, each with the tokens of its prompt and its sample."""
    traces = record.get("traces", [])
    if not record["ok"]:
        errors = [*record.get("errors", []), *(error for trace in traces for error in trace.get("errors", []))]
        raise RuntimeError(": ".join(["verifiers failed", *(f"{e['type']}: {e['message']}" for e in errors[-1:])]))
    if late := [trace["stop_condition"] for trace in traces if trace["is_timeout"]]:
        raise RuntimeError(f"verifiers stopped: {late[0]}")
    trained = [trace for trace in traces if trace["agent"]["trainable"]]
    if len(trained) != 1:
        raise RuntimeError(f"{len(trained)} agents of the environment are trained; an episode has one reward")
    trace = trained[0]
    rewards, metrics = ({n: v for n, v in trace[kind].items() if v is not None} for kind in ("rewards", "metrics"))
    if not rewards or len(rewards) < len(trace["rewards"]):
        raise RuntimeError(f"verifiers gives no reward: {trace['rewards']}")
    check_calls(trace["nodes"], answers)
    parts = {name: reward["score"] * reward["weight"] for name, reward in rewards.items()}
    return Outcome(sum(parts.values()), metrics | parts)


def check_calls(nodes: Sequence[Mapping[str, Any]], answers: Sequence[Sequence[int]]) -> None:
    """Join the messages that the policy sampled with the answers of the session, token by token. Raises RuntimeError
    when one has no partner."""
    paths: list[list[int]] = []
    for node in nodes:
        parent = node.get("parent")
        paths.append([*([] if parent is None else paths[parent]), *node["token_ids"]])
    sampled = Counter(tuple(path) for path, node in zip(paths, nodes, strict=True) if node["sampled"])
    answered = Counter(map(tuple, answers))
    if foreign := (sampled - answered).total():
        raise RuntimeError(f"{foreign} messages of the trace are no answer of the episode's session")
    if unknown := (answered - sampled).total():
        raise RuntimeError(f"{unknown} answers of the policy are not in the trace that has the reward")
