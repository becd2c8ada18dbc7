"""vLLM is imported once, early if it can be; an engine that is stopped while it starts leaves nothing behind.

Import and build are faked.
"""

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import save_file

from onbeat.engines import EngineBroken, EngineDied
from onbeat.engines.arrivals import Arrivals
from services.rollout.engines import registry, vllm_engine
from services.rollout.engines.vllm_engine import VllmEngine


class FakeLLM:
    output_handler = None

    def __init__(self) -> None:
        self.num_shutdowns = 0
        self.errored = False
        self.dies_in = ""  # a call: its core dies before it answers

    async def update_weight_version(self, version: str) -> None:
        await self._die_in("update_weight_version")
        self.version = version

    async def resume_generation(self) -> None:
        await self._die_in("resume_generation")

    async def _die_in(self, call: str) -> None:
        if call == self.dies_in:
            self.errored = True
            await asyncio.Event().wait()

    def shutdown(self) -> None:
        self.num_shutdowns += 1


class SlowEngine(VllmEngine):
    """An engine whose build takes until `may_finish` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.is_building, self.may_finish = threading.Event(), threading.Event()
        self.llm = FakeLLM()

    def _create_llm(self, model_dir: Path) -> FakeLLM:  # type: ignore[override]
        self.is_building.set()
        assert self.may_finish.wait(10)
        return self.llm


class FakeImport:
    """It takes until `may_finish` is set."""

    def __init__(self) -> None:
        self.count = 0
        self.has_begun = threading.Event()
        self.may_finish = threading.Event()
        self.may_finish.set()
        self.error: Exception | None = None

    def __call__(self) -> None:
        self.count += 1
        self.has_begun.set()
        assert self.may_finish.wait(10)
        if self.error is not None:
            raise self.error


@pytest.fixture(autouse=True)
def importing(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeImport]:
    fake = FakeImport()
    monkeypatch.setattr(vllm_engine, "import_vllm", fake)
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.exceptions", SimpleNamespace(EngineDeadError=RuntimeError))
    monkeypatch.setattr(vllm_engine.os, "environ", dict(os.environ))
    vllm_engine.importing.cache_clear()
    yield fake
    fake.may_finish.set()
    vllm_engine.importing.cache_clear()


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    return tmp_path


async def cancel_start(engine: SlowEngine, model_dir: Path) -> None:
    """Cancel the start, as a SIGTERM or the end of the job does."""
    starting = asyncio.create_task(engine.start(model_dir, 0))
    assert await asyncio.to_thread(engine.is_building.wait, 5)
    starting.cancel()
    _, running = await asyncio.wait({starting}, timeout=1)
    assert not running, "a cancelled start waits for the build"
    assert starting.cancelled()


async def test_engine_built_after_its_start_was_cancelled_is_shut_down(model_dir: Path) -> None:
    engine = SlowEngine()
    await cancel_start(engine, model_dir)
    stopping = asyncio.create_task(engine.stop())
    await asyncio.sleep(0.05)
    assert not stopping.done()
    engine.may_finish.set()
    await asyncio.wait_for(stopping, 5)
    await engine.stop()
    assert engine.llm.num_shutdowns == 1
    assert engine.version() is None


async def test_build_that_outlasts_the_stop_ends_the_process(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "STOP_DEADLINE_S", 0.05)
    engine = SlowEngine()
    await cancel_start(engine, model_dir)
    with pytest.raises(EngineBroken, match="the engine did not stop"):
        await registry.stop_engine(engine, None, None, None)
    await registry.stop_engine(engine, EngineBroken, EngineBroken("the reason"), None)  # the reason is raised instead
    engine.may_finish.set()


async def test_start_ends_when_the_core_dies_at_its_last_call(model_dir: Path) -> None:
    engine = SlowEngine()
    engine.may_finish.set()
    engine.llm.dies_in = "update_weight_version"
    with pytest.raises(EngineDied):
        await asyncio.wait_for(engine.start(model_dir, 0), 5)


@pytest.mark.parametrize("call", ["update_weight_version", "resume_generation"])
async def test_load_ends_when_the_core_dies_at_its_last_calls(call, model_dir, monkeypatch):
    async def replace_weights(_: object, __: Path, arrived: Arrivals) -> None:
        while await arrived.take():
            pass

    async def arrivals() -> AsyncIterator[list[str]]:
        yield ["weight"]

    monkeypatch.setattr(vllm_engine, "_replace_weights", replace_weights)
    engine = SlowEngine()
    engine.may_finish.set()
    await engine.start(model_dir, 0)
    engine.llm.dies_in = call
    with pytest.raises(EngineDied):
        await asyncio.wait_for(engine.load(1, model_dir / "model.safetensors", arrivals()), 5)
    assert engine.version() is None


async def test_import_starts_before_the_model_and_the_build_waits(model_dir: Path, importing: FakeImport) -> None:
    importing.may_finish.clear()
    VllmEngine.prepare("cpu", cpu_cores="0", tensor_parallel_size=1)
    assert os.environ["OMP_PLACES"] == "{0}", "vLLM reads its environment while it is imported"
    assert await asyncio.to_thread(importing.has_begun.wait, 5)
    engine = SlowEngine()
    starting = asyncio.create_task(engine.start(model_dir, 0))
    assert not await asyncio.to_thread(engine.is_building.wait, 0.1)
    importing.may_finish.set()
    engine.may_finish.set()
    await asyncio.wait_for(starting, 5)
    assert importing.count == 1
    assert (engine.version(), engine.llm.version) == (0, "0")
    await engine.stop()
    assert engine.llm.num_shutdowns == 1


async def test_failed_import_is_reported_by_each_start_and_not_retried(model_dir: Path, importing: FakeImport) -> None:
    importing.error = ImportError("libtorch.so is not there")
    VllmEngine.prepare("cpu", cpu_cores="0", tensor_parallel_size=1)
    assert await asyncio.to_thread(importing.has_begun.wait, 5)
    for _ in range(2):
        engine = SlowEngine()
        with pytest.raises(EngineBroken, match=r"vLLM cannot be imported: ImportError: libtorch\.so is not there"):
            await engine.start(model_dir, 0)
        await engine.stop()
    assert importing.count == 1
    assert not engine.is_building.is_set()


def test_process_that_ends_by_itself_does_not_stop_the_end():
    class Ending:
        num_tries = 0

        def shutdown(self):
            self.num_tries += 1
            if self.num_tries == 1:
                raise psutil.NoSuchProcess(1)

    ending = Ending()
    vllm_engine.shut_down(ending)  # type: ignore[arg-type]
    assert ending.num_tries == 2
