"""Hand-written fakes of our own protocols: an engine whose tokens tell which weights made them, and a trainer."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from pathlib import Path

from blake3 import blake3
from xxhash import xxh3_128_digest

from onbeat.contracts.errors import VersionNotHeld, WeightsError
from onbeat.engines import GeneratedResponse, Sampling, VersionMismatch, VersionSpan
from onbeat.weights.client import Itinerary, ModelDescription
from onbeat.weights.host import full_plan
from onbeat.weights.wire import Manifest, PayloadKey, Peer, Plan, Tensor

TOKENS_PER_RESPONSE = 3


def weights_of(version: int) -> bytes:
    """Return the only tensor of the model, whose content is the version."""
    return version.to_bytes(8, "little", signed=True)


def manifest_of(version: int) -> Manifest:
    content = weights_of(version)
    checks = {"digest": blake3(content).digest(), "checksum": xxh3_128_digest(content)}
    return Manifest(version, (Tensor(name="version", dtype="I64", shape=[1], size_bytes=len(content), **checks),))


def read_weights(path: Path) -> int:
    return int.from_bytes(path.read_bytes()[-8:], "little", signed=True)


async def arriving(batches: Iterable[Sequence[str]]) -> AsyncIterator[Sequence[str]]:
    """Yield the names of tensors as they arrive during a load."""
    for names in batches:
        yield names
        await asyncio.sleep(0)


class FakeEngine:
    """Serves "weights" that are the version's number; responses consist of that number."""

    def __init__(self, capacity: int = 8, delay_s: float = 0.0, text: str = "4") -> None:
        self.delay_s, self.text = delay_s, text
        self.started = self.stopped = False
        self.loads: list[int] = []
        self.requests: list[tuple[int, int, Sampling]] = []  # expected version, prompt tokens, how
        self.generate_errors: list[Exception] = []  # raised by the next requests
        self.load_errors: list[Exception] = []
        self.hangs_in: set[str] = set()  # "start", "load"
        self.stamp: int | None = None  # the version that the spans claim, if not the true one
        self.may_finish = asyncio.Event()
        self.may_finish.set()
        self._capacity = capacity
        self._weights = -1
        self._version: int | None = None
        self.num_in_flight = 0

    async def start(self, model_dir: Path, policy_version: int) -> None:
        assert (model_dir / "config.json").exists()
        await self._hang_in("start")
        self._weights = read_weights(model_dir / "model.safetensors")
        self._version, self.started = policy_version, True

    async def generate(
        self, prompt_token_ids: list[int], num_samples: int, sampling: Sampling, expected_version: int
    ) -> list[GeneratedResponse]:
        if expected_version != self._version:
            raise VersionMismatch(expected_version, self._version)
        self.requests.append((expected_version, len(prompt_token_ids), sampling))
        self.num_in_flight += num_samples
        try:
            await asyncio.sleep(self.delay_s)
            await self.may_finish.wait()
        finally:
            self.num_in_flight -= num_samples
        if self.generate_errors:
            raise self.generate_errors.pop(0)
        return [self._response() for _ in range(num_samples)]

    def _response(self) -> GeneratedResponse:
        stamp = self._version if self.stamp is None else self.stamp
        span = VersionSpan(stamp, 0, TOKENS_PER_RESPONSE)
        token_ids, logprobs = [self._weights] * TOKENS_PER_RESPONSE, [-0.5] * TOKENS_PER_RESPONSE
        return GeneratedResponse(token_ids, logprobs, "stop", [span], self.text)

    async def load(self, policy_version: int, weights_file: Path, arrivals: AsyncIterator[Sequence[str]]) -> None:
        assert self.num_in_flight == 0, "load while generating"
        self._version = None
        self.loads.append(policy_version)
        assert [name async for names in arrivals for name in names] == ["version"]
        await self._hang_in("load")
        await asyncio.sleep(0.01)
        if self.load_errors:
            raise self.load_errors.pop(0)
        self._weights = read_weights(weights_file)
        self._version = policy_version

    async def _hang_in(self, step: str) -> None:
        if step in self.hangs_in:
            await asyncio.Event().wait()

    def version(self) -> int | None:
        return self._version

    def capacity(self) -> int:
        return self._capacity

    async def stop(self) -> None:
        self._version, self.stopped = None, True


class FakeTrainer:
    """Weights of a job at one address; anywhere else nobody answers."""

    def __init__(
        self,
        address: str = "trainer:1",
        files: dict[str, bytes] | None = None,
        announce: Callable[[], Awaitable[None]] | None = None,  # announces a version in the ledger, if there is one
    ) -> None:
        self.address, self._announce = address, announce
        self.files = files or {}
        self.newest = 0
        self.pulls: list[int] = []  # served
        self.refused: set[int] = set()  # versions that cannot be pulled
        self.num_watches = 0
        self.is_up = True
        self._changed = asyncio.Condition()

    def connect(self, address: str, job_id: str = "") -> "FakeSource":
        return FakeSource(self, address)

    async def publish(self, version: int) -> None:
        self.newest = version
        if self._announce is not None:
            await self._announce()
        await self._notify()

    async def break_watches(self, new_address: str) -> None:
        """Break all watches, as a trainer that restarts somewhere else does."""
        self.address = new_address
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def check(self, address: str) -> None:
        if not self.is_up or address != self.address:
            raise WeightsError(f"nobody answers at {address}")


class FakeSource:
    """See `WeightsClient`."""

    def __init__(self, trainer: FakeTrainer, address: str) -> None:
        self._trainer, self.address = trainer, address

    async def describe(self) -> ModelDescription:
        self._trainer.check(self.address)
        return ModelDescription(self._trainer.files, self._trainer.newest)

    async def itinerary(self, version: int, base_version: int | None = None) -> Itinerary:
        await asyncio.sleep(0.01)
        self._trainer.check(self.address)
        if version in self._trainer.refused or version > self._trainer.newest:
            raise VersionNotHeld(f"version {version} is not held")
        return Itinerary(manifest_of(version))

    async def locate(self, key: PayloadKey, puller: Peer, failed: Sequence[str]) -> str:
        self._trainer.check(self.address)
        return self.address

    async def pull(
        self, key: PayloadKey, offset_bytes: int = 0, slowest_s: float = 0.0
    ) -> AsyncGenerator[Plan | memoryview, None]:
        self._trainer.check(self.address)
        yield full_plan(manifest_of(key.policy_version), key.shard)
        yield memoryview(weights_of(key.policy_version))
        self._trainer.pulls.append(key.policy_version)

    async def finish(self, key: PayloadKey, worker_id: str, is_complete: bool) -> None:
        self._trainer.check(self.address)

    async def watch(self) -> AsyncIterator[int]:
        self._trainer.num_watches += 1
        seen = -1
        while True:
            self._trainer.check(self.address)
            if self._trainer.newest > seen:
                seen = self._trainer.newest
                yield seen
            else:
                async with self._trainer._changed:
                    await self._trainer._changed.wait()

    async def close(self) -> None:
        pass
