"""`python -I verifiers_player.py ENVIRONMENT` plays episodes for onbeat.environments.verifiers, until its stdin ends.

It runs where the package `verifiers` is installed and Onbeat is not, so it imports nothing of Onbeat. ENVIRONMENT is
JSON: the table `[env]` of a configuration of verifiers. The first line on stdout is the path of a socket, or says why
there is none. With a number as a second argument it prints that many tasks instead.

    POST /  {"task": {...}, "url": "http://...", "key": "..."}
    200     {"record": an episode of verifiers as it is stored, "answers": the tokens of each call of the policy}
"""

import asyncio
import itertools
import json
import os
import signal
import sys
import tempfile
import threading
import time
from typing import Any, TextIO

try:
    from aiohttp import web
    from verifiers.v1.clients import ModelContext
    from verifiers.v1.clients.eval import EvalClient
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.env import Env
    from verifiers.v1.errors import ProviderError
    from verifiers.v1.types import Response, TurnTokens
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config
except ImportError as missing:
    sys.stdout.write(f"verifiers is not installed ({missing}): {sys.executable} -m pip install verifiers uv")
    sys.exit(1)

END_S = 10.0  # time to stop the servers of tools when stdin has ended
MAX_TASK_BYTES = 64 << 20


class SessionClient(EvalClient):  # type: ignore[misc]  # verifiers is installed beside Onbeat, not with it
    """A client of one episode's session. The session renders the prompts and keeps the tokens, which this client puts
    into the trace; verifiers' own client for training would render them itself, for the model families it knows."""

    def __init__(self, config: TrainClientConfig) -> None:
        super().__init__(config)
        self.answers: list[list[int]] = []  # prompt and sample of each call

    async def get_response(self, dialect: Any, body: dict[str, Any], *args: Any, **kwargs: Any) -> Response:
        body = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
        try:
            response = await super().get_response(dialect, body | {"return_token_ids": True}, *args, **kwargs)
        except ProviderError as error:
            if "no_turns_left" in str(error):
                kwargs["turn"].trace.stop("max_turns")  # then the episode gets its reward
            raise
        assert response.raw is not None
        prompt, sampled = response.raw["prompt_token_ids"], response.raw["choices"][0]["token_ids"]
        response.tokens = TurnTokens(prompt_ids=prompt, completion_ids=sampled)
        self.answers.append([*prompt, *sampled])
        return response


class Player:
    """An environment of verifiers whose servers are up."""

    def __init__(self, environment: Env[Any]) -> None:
        self._environment = environment
        self._numbers = itertools.count()

    async def play(self, request: web.Request) -> web.Response:
        asked = await request.json()
        key_name = f"ONBEAT_API_KEY_{next(self._numbers)}"  # programs of harnesses do not inherit such a variable
        os.environ[key_name] = asked["key"]
        config = TrainClientConfig(base_url=asked["url"], api_key_var=key_name)
        client = SessionClient(config)
        server: Any = self._environment._interception
        server.clients[config.model_dump_json()] = client  # where it looks before it makes one of its own
        try:
            (slot,) = self._environment.slots(self._task_of(asked["task"]))
            episode = await self._environment.run_slot(slot, ModelContext("policy", config))
            return web.json_response({"record": episode.to_record(), "answers": client.answers})
        finally:
            del server.clients[config.model_dump_json()], os.environ[key_name]
            await client.close()

    def _task_of(self, data: dict[str, Any]) -> Any:
        kind, options = type(self._environment.taskset).task_type(), self._environment.config.taskset.task
        try:
            return kind(kind.data_type().model_validate(data), options)
        except ValueError as error:
            raise web.HTTPUnprocessableEntity(text=str(error)) from error


async def serve(environment: Env[Any], ready: TextIO) -> None:
    is_over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, is_over.set)
    app = web.Application(client_max_size=MAX_TASK_BYTES)
    app.router.add_post("/", Player(environment).play)
    runner = web.AppRunner(app, handler_cancellation=True)  # a client that hangs up has given up the episode
    async with environment.serving():
        await runner.setup()
        with tempfile.TemporaryDirectory() as folder:
            await web.UnixSite(runner, f"{folder}/socket").start()
            print(f"{folder}/socket", file=ready, flush=True)
            await is_over.wait()
            await runner.cleanup()


def print_tasks(environment: Env[Any], num_tasks: int, out: TextIO) -> None:
    for task in environment.taskset.take(num_tasks):
        data = task.data
        row = {"prompt": data.prompt_text or data.name or "Begin.", "answer": ""}
        print(json.dumps(row | {"task": data.model_dump(mode="json")}), file=out)


def end_with_stdin() -> None:
    os.read(0, 1)  # nothing comes, and then the end
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_S)
    os._exit(1)


def main(config: str, *num_tasks: str) -> None:
    threading.Thread(target=end_with_stdin, daemon=True).start()
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])  # uv
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of others is not for the parent
    environment = load_environment(resolve_env_config(json.loads(config) | {"interception": {"type": "server"}}))
    if num_tasks:
        print_tasks(environment, int(num_tasks[0]), out)
    else:
        asyncio.run(serve(environment, out))


if __name__ == "__main__":
    main(*sys.argv[1:])
