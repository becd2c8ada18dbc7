"""A stock vLLM server on a tiny model follows real weight servers, through the program that users start beside it."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import redis as sync_redis
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from onbeat.streams.keys import JobKeys
from onbeat.weights.security import PLAIN
from services.rollout import stock_server
from services.rollout.engines.arrivals import read_shapes
from services.rollout.stock_server import ServerFailed, StockServer
from tests.conftest import free_port
from tests.integration.tiny_models import write_perturbed_weights, write_tied_model, write_untied_model
from tests.weight_plane import JOB, Tensors, Trainer

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = [(7 * index) % 251 for index in range(300)]  # over several blocks of the prefix cache
NUM_TOKENS = 16
ATTENTION = "model.layers.1.self_attn."  # vLLM fuses three of its tensors
START_DEADLINE_S = 120.0
ANSWER_DEADLINE_S = 20.0

Probe = tuple[list[int], list[float]]  # token ids and their logprobs


@dataclass
class Served:
    """The vLLM server; `first` is what it samples with the weights that it was started on."""

    url: str
    model_dir: Path
    http: httpx.AsyncClient
    first: Probe

    async def probe(self) -> Probe:
        body = {"model": "policy", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "min_tokens": NUM_TOKENS, "seed": 0}
        options = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": 0, "return_token_ids": True}
        answer = await self.http.post("/v1/completions", json=body | options)
        assert answer.is_success, answer.text
        choice = answer.json()["choices"][0]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    async def version(self) -> str:
        return (await self.http.get("/weight_info")).json()["weight_version"]

    async def is_paused(self) -> bool:
        return (await self.http.get("/is_paused")).json()["is_paused"]

    async def gap(self, tensors: Tensors) -> float:
        """Mean distance of its logprobs from those of a plain float32 model with these weights."""
        token_ids, logprobs = await self.probe()
        model = AutoModelForCausalLM.from_pretrained(self.model_dir, dtype=torch.float32)
        model.load_state_dict(tensors, strict=False)
        with torch.inference_mode():
            logits = model(torch.tensor([PROMPT + token_ids])).logits[0, len(PROMPT) - 1 : -1]
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(token_ids)[:, None])[:, 0]
        return float((torch.tensor(logprobs) - expected).abs().mean())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """Started as docs/vllm-serve.md says."""
    folder = tmp_path_factory.mktemp("served")
    model_dir = write_tied_model(folder / "model")
    url = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_dir)]
    command += ["--host", "127.0.0.1", "--port", url.rpartition(":")[2], "--served-model-name", "policy"]
    command += ["--weight-transfer-config.backend", "onbeat_safetensors", "--no-enable-chunked-prefill"]
    command += ["--kv-cache-memory-bytes", str(256 << 20)]
    settings = {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1", "TORCH_COMPILE_DISABLE": "1"}
    settings |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    log = open(folder / "log", "wb")  # noqa: SIM115, ASYNC230
    process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log, env=os.environ | settings)
    try:
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=ANSWER_DEADLINE_S) as http:
            await until_healthy(http, process, folder / "log")
            server = Served(url, model_dir, http, ([], []))
            server.first = await server.probe()
            yield server
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), ANSWER_DEADLINE_S)
        log.close()


async def until_healthy(http: httpx.AsyncClient, process: asyncio.subprocess.Process, log: Path) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            if (await http.get("/health")).is_success:
                return
        is_starting = process.returncode is None and time.monotonic() < deadline
        assert is_starting, log.read_text()[-2000:]  # noqa: ASYNC240
        await asyncio.sleep(0.2)


@pytest_asyncio.fixture(loop_scope="module")
async def trainer() -> AsyncIterator[Trainer]:
    trainer = Trainer(1, 1, PLAIN, 64)
    await trainer.start()
    yield trainer
    await trainer.server.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def stock(served: Served) -> AsyncIterator[StockServer]:
    server = StockServer(served.url)
    yield server
    await server.close()


class Follower:
    """The program as users start it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []

    async def read_until(self, text: str) -> str:
        """The next line of the log that has this text."""
        assert self.process.stderr is not None
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            while line := (await self.process.stderr.readline()).decode():
                self.lines.append(line)
                if text in line:
                    return line
        raise AssertionError(f"no {text!r} in {''.join(self.lines)}")

    async def end(self) -> int:
        return await asyncio.wait_for(self.process.wait(), ANSWER_DEADLINE_S)


@contextlib.asynccontextmanager
async def following(server: str, *options: str, **env: str) -> AsyncIterator[Follower]:
    command = [sys.executable, "-m", "services.rollout.stock_server", JOB, "--server", server, *options]
    process = await asyncio.create_subprocess_exec(*command, stderr=PIPE, env={**os.environ, **env})
    try:
        yield Follower(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def perturbed(served: Served, folder: Path, seed: int) -> Tensors:
    return load_file(write_perturbed_weights(served.model_dir, folder / f"{seed}.safetensors", seed))


def moved(tensors: Tensors, prefix: str) -> Tensors:
    """As after a step that moved only these tensors, and far."""
    return {name: tensor * 4 if name.startswith(prefix) else tensor for name, tensor in tensors.items()}


async def load(server: StockServer, version: int, weights_file: Path, names: set[str] | None = None) -> None:
    all_names = set(read_shapes(weights_file))
    await server.load(version, weights_file, names or all_names, all_names)


# ---- the program -----------------------------------------------------------------------------------------------------


async def test_server_serves_each_version_and_keeps_the_last_one(
    served: Served, trainer: Trainer, tmp_path: Path
) -> None:
    first = load_file(served.model_dir / "model.safetensors")
    second = perturbed(served, tmp_path, seed=1)
    third = moved(second, ATTENTION + "q_proj")
    await trainer.publish(1, second)
    async with following(served.url, "--weights", trainer.address) as follower:
        await follower.read_until("serves policy version 1")
        assert await served.version() == "1"
        assert await served.gap(second) < 0.05

        await trainer.publish(2, third)
        line = await follower.read_until("serves policy version 2")
        assert f"loaded {sum(name.startswith(ATTENTION) for name in third)} of {len(third)} tensors" in line
        assert await served.gap(third) < 0.05
        assert await served.gap(second) > 0.1, "the versions are told apart"

        await trainer.publish(3, first)
        await follower.read_until("serves policy version 3")
        assert await served.probe() == served.first, "bit for bit as it was started"

        follower.process.send_signal(signal.SIGTERM)
        assert await follower.end() == 0
    assert (await served.version(), await served.is_paused()) == ("3", False)
    assert await served.probe() == served.first


async def test_weights_of_another_model_leave_the_server_as_it_is(
    served: Served, trainer: Trainer, tmp_path: Path
) -> None:
    before, version = await served.probe(), await served.version()
    await trainer.publish(7, load_file(write_untied_model(tmp_path / "other") / "model.safetensors"))
    async with following(served.url, "--weights", trainer.address) as follower:
        line = await follower.read_until("ERROR")
        assert f"the server's model, {served.model_dir}, is not the job's" in line
        assert await follower.end() == 1
    assert (await served.version(), await served.is_paused()) == (version, False)
    assert await served.probe() == before


async def test_a_trainer_that_moved_is_found_again_through_redis(
    served: Served, trainer: Trainer, redis_url: str, tmp_path: Path
) -> None:
    with sync_redis.Redis.from_url(redis_url) as client:
        job = JobKeys(JOB).job
        client.hset(job, mapping={"state": "RUNNING", "weights_address": trainer.address})
        await trainer.publish(4, perturbed(served, tmp_path, seed=4))
        async with following(served.url, ONBEAT_REDIS_URL=redis_url) as follower:
            await follower.read_until("serves policy version 4")
            await trainer.restart()
            await trainer.publish(5, perturbed(served, tmp_path, seed=5))
            await asyncio.sleep(1)  # in which the old address is tried again and again
            client.hset(job, "weights_address", trainer.address)
            await follower.read_until("serves policy version 5")
            assert sum("no word from the weights server" in line for line in follower.lines) == 1
            follower.process.send_signal(signal.SIGINT)
            assert await follower.end() == 0
        client.delete(job)
    assert await served.gap(trainer.tensors[5]) < 0.05


async def test_what_cannot_work_is_said_in_a_sentence(tmp_path: Path) -> None:
    class NotFound(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.WriteTransport)
            transport.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    nobody = f"http://127.0.0.1:{free_port()}"
    not_in_dev_mode = await asyncio.get_running_loop().create_server(NotFound, "127.0.0.1", 0)
    port = not_in_dev_mode.sockets[0].getsockname()[1]
    sentences = {nobody: "no server answers at", f"http://127.0.0.1:{port}": "start it with VLLM_SERVER_DEV_MODE=1"}
    async with not_in_dev_mode:
        for url, sentence in sentences.items():
            server = StockServer(url)
            with pytest.raises(ServerFailed, match=sentence):
                await server.check()
            await server.close()
    with pytest.raises(ValueError, match="must be on this machine"):
        StockServer("http://192.0.2.1:8000")


# ---- loads that fail -------------------------------------------------------------------------------------------------


async def test_a_load_that_fails_half_way_is_followed_by_a_whole_one(
    served: Served, stock: StockServer, tmp_path: Path
) -> None:
    weights_file = write_perturbed_weights(served.model_dir, tmp_path / "weights.safetensors", seed=8)
    await load(stock, 8, weights_file, {"model.embed_tokens.weight", "no.such.tensor"})
    assert (await served.version(), await served.is_paused()) == ("8", False)
    assert await served.gap(load_file(weights_file)) < 0.05


async def test_an_update_that_a_killed_program_left_open_is_closed(
    served: Served, stock: StockServer, tmp_path: Path
) -> None:
    weights_file = write_perturbed_weights(served.model_dir, tmp_path / "weights.safetensors", seed=9)
    part = {"weights_file": str(weights_file), "names": ["model.layers.0.self_attn.q_proj.weight"]}
    for path, body in (("/pause", None), ("/start_weight_update", None), ("/update_weights", {"update_info": part})):
        assert (await served.http.post(path, json=body)).is_success
    await load(stock, 9, weights_file)
    assert (await served.version(), await served.is_paused()) == ("9", False)
    assert await served.gap(load_file(weights_file)) < 0.05


async def test_nothing_is_generated_after_a_load_beyond_repair(
    served: Served, stock: StockServer, tmp_path: Path
) -> None:
    version = await served.version()
    with pytest.raises(ServerFailed, match=r"paused between two versions.*No such file"):
        await stock.load(10, tmp_path / "missing.safetensors", {"model.norm.weight"}, {"model.norm.weight"})
    assert (await served.version(), await served.is_paused()) == (version, True)
    waiting = asyncio.create_task(served.probe())
    await asyncio.sleep(0.5)  # many times what a probe takes
    assert not waiting.done()
    weights_file = write_perturbed_weights(served.model_dir, tmp_path / "weights.safetensors", seed=10)
    await load(stock, 10, weights_file)
    assert await waiting == await served.probe()
    assert await served.gap(load_file(weights_file)) < 0.05


class NoticedServer(StockServer):
    """Says when tensors are about to be loaded."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.is_updating = asyncio.Event()

    async def _call(self, method: str, path: str, *deadline: float, **body: Any) -> httpx.Response:
        if path == "/update_weights":
            self.is_updating.set()
        return await super()._call(method, path, *deadline, **body)


async def test_a_load_that_is_cancelled_still_ends_whole(served: Served, tmp_path: Path) -> None:
    weights_file = write_perturbed_weights(served.model_dir, tmp_path / "weights.safetensors", seed=11)
    server = NoticedServer(served.url)
    loading = asyncio.create_task(load(server, 11, weights_file))
    await asyncio.wait_for(server.is_updating.wait(), ANSWER_DEADLINE_S)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    await server.close()
    assert (await served.version(), await served.is_paused()) == ("11", False)
    assert await served.gap(load_file(weights_file)) < 0.05


async def test_server_that_never_becomes_idle_keeps_its_version(
    served: Served, stock: StockServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stock_server, "PAUSE_DEADLINE_S", 0.2)
    before, version = await served.probe(), await served.version()
    busy = {"model": "policy", "prompt": [1, 2, 3], "n": 60, "max_tokens": 500, "min_tokens": 500, "ignore_eos": True}
    working = asyncio.create_task(served.http.post("/v1/completions", json=busy))
    await asyncio.sleep(1)
    with pytest.raises(ServerFailed, match="did not answer within"):
        await load(stock, 12, served.model_dir / "model.safetensors")
    assert (await working).json()["usage"]["completion_tokens"] == 60 * 500
    assert (await served.version(), await served.is_paused()) == (version, False)
    assert await served.probe() == before
