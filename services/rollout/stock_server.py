"""`python -m services.rollout.stock_server JOB` makes a stock vLLM server, which the user started, follow a job.

Every version is pulled and verified here. Then the server loads it: the plug-in `weight_transfer` in its workers reads
this process's memory file, named in a call to the HTTP endpoints of vLLM's development mode. See docs/vllm-serve.md.

    pause (wait for responses in flight) -> start -> update -> finish -> resume
"""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Literal

import httpx
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict
from redis.exceptions import RedisError

from onbeat.errors import OnbeatError, WeightsError
from onbeat.logging import configure
from onbeat.streams.connection import RedisSettings
from onbeat.streams.ledger import Ledger
from onbeat.temporary import private_folder
from onbeat.weights.client import Peer, WeightsClient
from onbeat.weights.host import host_id
from onbeat.weights.security import WireSettings
from onbeat.weights.wire import Manifest
from services.rollout.engines.arrivals import BadWeightFile, check_weight_file, names_to_load, read_checkpoint_shapes
from services.rollout.puller import WeightsPuller

logger = logging.getLogger(__name__)

ANSWER_DEADLINE_S = 30.0
PAUSE_DEADLINE_S = 600.0  # for responses in flight to end, while others wait
LOAD_DEADLINE_S = 300.0  # for each step of a load

START_WITH = "start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config.backend onbeat_safetensors"


class Settings(WireSettings, RedisSettings, BaseSettings):
    """The settings, read from the environment with the prefix ONBEAT_."""

    model_config = SettingsConfigDict(env_prefix="ONBEAT_")

    log_format: Literal["text", "json"] = Field("text", description="text or json")


class ServerFailed(OnbeatError):
    """The server did not do what it was asked to; the message says what to do."""


class StockServer:
    """The endpoints of a vLLM server on this machine that replace its weights. They take one caller at a time."""

    def __init__(self, url: str) -> None:
        """Prepare the HTTP client. Raises ValueError for a server on another machine, which could not read the file."""
        if httpx.URL(url).host not in ("127.0.0.1", "localhost", "::1"):
            raise ValueError(f"--server is {url}; it must be on this machine, such as http://127.0.0.1:8000")
        self.url = url.rstrip("/")
        # Requests to this machine take no proxy. No connection is used twice, because vLLM closes it after an error.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.AsyncClient(base_url=self.url, trust_env=False, limits=limits)

    async def close(self) -> None:
        await self._http.aclose()

    async def check(self) -> None:
        """Check that the server can take weights. Raises ServerFailed if it cannot."""
        await self._call("GET", "/weight_info")
        try:
            await self._call("POST", "/init_weight_transfer_engine", init_info={})  # the plug-in has nothing to do
        except ServerFailed as error:
            raise ServerFailed(f"the server cannot take weights from a file; {START_WITH}: {error}") from error

    async def model_dir(self) -> Path:
        """Return the folder of the checkpoint that the server was started on, as it was named there."""
        answer = await self._call("GET", "/v1/models")
        return Path(answer.json()["data"][0]["root"])

    async def load(self, version: int, weights_file: Path, names: set[str], all_names: set[str]) -> None:
        """Serve `version`, whose tensors `names` differ from the served ones. A cancelled load is still completed.

        Raises ServerFailed.
        """
        was_paused = (await self._call("GET", "/is_paused")).json()["is_paused"]  # a program may have broken half way
        try:
            await self._call("POST", "/pause?mode=wait", PAUSE_DEADLINE_S)
        except BaseException:
            if not was_paused:
                await self._call("POST", "/resume")  # no weight has been touched
            raise
        replacing = asyncio.create_task(self._replace(version, weights_file, names, all_names))
        try:
            await asyncio.shield(replacing)
        finally:
            await asyncio.wait({replacing})

    async def _replace(self, version: int, weights_file: Path, names: set[str], all_names: set[str]) -> None:
        try:
            await self._update(version, weights_file, names)
        except ServerFailed as error:
            logger.warning("policy version %d was not loaded, now all of its tensors are: %s", version, error)
            with contextlib.suppress(ServerFailed):  # refused unless a killed process has left an update open
                await self._call("POST", "/finish_weight_update", LOAD_DEADLINE_S)
            try:
                await self._update(version, weights_file, all_names)
            except ServerFailed as twice:
                raise ServerFailed(f"restart the server, it is paused between two versions: {twice}") from twice
        await self._call("POST", "/resume")

    async def _update(self, version: int, weights_file: Path, names: set[str]) -> None:
        update = {"weights_file": str(weights_file), "names": sorted(names)}
        await self._call("POST", "/start_weight_update", LOAD_DEADLINE_S)
        await self._call("POST", "/update_weights", LOAD_DEADLINE_S, update_info=update)
        await self._call("POST", "/finish_weight_update", LOAD_DEADLINE_S, weight_version=str(version))

    async def _call(self, method: str, path: str, deadline_s: float = ANSWER_DEADLINE_S, **body: Any) -> httpx.Response:
        try:
            async with asyncio.timeout(deadline_s):
                answer = await self._http.request(method, path, json=body or None, timeout=None)
        except TimeoutError as error:
            raise ServerFailed(f"{self.url}{path} did not answer within {deadline_s:.0f} s") from error
        except httpx.TransportError as error:
            raise ServerFailed(f"no server answers at {self.url}{path}: {error or type(error).__name__}") from error
        if answer.status_code == 404:
            raise ServerFailed(f"{self.url}{path} is not there; is this vLLM? If so, {START_WITH}")
        if not answer.is_success:
            raise ServerFailed(f"{self.url}{path} answers {answer.status_code}: {answer.text[:300]}")
        return answer


async def keep_up(server: StockServer, puller: WeightsPuller, model_dir: Path) -> None:
    """Load announced versions, for ever; also an older one, where a restarted trainer begins again.

    Raises ServerFailed, and BadWeightFile before the server is touched.
    """
    shapes = read_checkpoint_shapes(model_dir)
    is_tied = bool(json.loads((model_dir / "config.json").read_text()).get("tie_word_embeddings", False))
    served: Manifest | None = None
    while True:
        version = await puller.announcements.wait()
        if version is None:
            continue
        try:
            pull = await puller.obtain(version)
            await pull.complete()
        except WeightsError as error:
            logger.warning("policy version %d is not to be had, waiting for the next: %s", version, error)
            continue
        manifest, host, started = await pull.known(), puller.host, time.monotonic()
        if served is not None and manifest.digest == served.digest:
            puller.mark_read(pull)
            continue
        assert host is not None, "there is a copy where there is a manifest"
        try:
            all_names = check_weight_file(host.path, shapes, is_tied=is_tied)
        except BadWeightFile as error:
            raise BadWeightFile(f"the server's model, {model_dir}, is not the job's: {error}") from error
        names = names_to_load(served, manifest)
        with puller.reading():
            await server.load(version, host.path, names, all_names)
        puller.mark_read(pull)
        served = manifest
        pulled = f"pulled {pull.stats.received_bytes / 1e6:.1f} MB in {pull.stats.pull_s:.2f} s"
        loaded = f"loaded {len(names)} of {len(all_names)} tensors in {time.monotonic() - started:.2f} s"
        logger.info("%s serves policy version %d: %s, %s", server.url, version, pulled, loaded)


async def follow(options: argparse.Namespace, settings: Settings) -> None:
    """Follow the job until SIGTERM or SIGINT; the server goes on serving what it has. Raises what `main` reports."""
    stopping, security = asyncio.Event(), settings.wire_security()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stopping.set)
    async with contextlib.AsyncExitStack() as cleanup:
        server = StockServer(options.server)
        cleanup.push_async_callback(server.close)
        await server.check()
        model_dir = options.model or await server.model_dir()
        if not (model_dir / "config.json").is_file():
            raise ValueError(f"the server's model is {model_dir}, no folder here; name its checkpoint with --model")
        ledger = Ledger(settings.connect_redis())  # it connects on first use
        cleanup.push_async_callback(ledger.redis.aclose)
        folder = cleanup.enter_context(private_folder("onbeat-weights-"))

        def connect_weights(address: str) -> WeightsClient:
            return WeightsClient(address, options.job, security)

        async def find_address() -> str:
            return options.weights or await address_in_job(ledger, options.job)

        peer = Peer(f"stock-server-{socket.gethostname()}-{os.getpid()}", host_id=host_id())  # it serves no others
        puller = WeightsPuller(connect_weights, find_address, peer, folder)
        cleanup.push_async_callback(puller.close)
        logger.info("%s is to serve job %s with the model %s", server.url, options.job, model_dir)
        await first_of(stopping.wait(), puller.announcements.follow(), keep_up(server, puller, model_dir))


async def first_of(*work: Awaitable[Any]) -> None:
    """Wait until one ends, then cancel the others and wait for them. Raises what the first raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in done:
        task.result()


async def address_in_job(ledger: Ledger, job_id: str) -> str:
    """Return the address of the weights as it is now: a restarted trainer has another one."""
    fields = await ledger.jobs.fields(job_id)
    if "weights_address" not in fields:
        raise WeightsError(f"job {job_id} has no weights yet; try again when its trainer has published the first")
    return fields["weights_address"]


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m services.rollout.stock_server", description=__doc__.split("\n")[0])
    parser.add_argument("job", metavar="JOB", help="id of the job")
    parser.add_argument("--server", default="http://127.0.0.1:8000", help="the vLLM server; default: %(default)s")
    parser.add_argument("--weights", metavar="HOST:PORT", help="of the trainer; default: asked of ONBEAT_REDIS_URL")
    parser.add_argument("--model", type=Path, metavar="DIR", help="checkpoint of the server; default: asked of it")
    return parser.parse_args()


def main() -> int:
    options = read_options()
    try:
        settings = Settings()
        configure(settings.log_format)
        asyncio.run(follow(options, settings))
        return 0
    except RedisError as error:
        logger.error("the job's Redis (ONBEAT_REDIS_URL) cannot be reached, --weights does without: %s", error)
    except (OnbeatError, BadWeightFile, httpx.InvalidURL, ValueError) as error:
        logger.error("%s", error)
    return 1


if __name__ == "__main__":
    sys.exit(main())
