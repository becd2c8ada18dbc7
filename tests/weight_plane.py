"""A trainer and its rollouts in one process: real weight servers, real copies, real gRPC, no engine and no Redis."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

import pytest
import torch
from blake3 import blake3
from safetensors.torch import load

from onbeat.contracts.errors import WeightsError
from onbeat.weights.client import WeightsClient
from onbeat.weights.pull import Pull
from onbeat.weights.security import PLAIN, WireSecurity
from onbeat.weights.server import PayloadServer
from onbeat.weights.v1 import weights_pb2
from onbeat.weights.wire import PayloadKey, Peer, read_key
from services.rollout.puller import WeightsPuller
from services.trainer.weights import relay_tree as sources
from services.trainer.weights.relay_tree import Sources
from services.trainer.weights.server import WeightServer
from services.trainer.weights.store import Snapshot, SnapshotWriter, WeightStore, take_snapshot

JOB = "job"
MIB = 1 << 20

Tensors = dict[str, torch.Tensor]
Messages = AsyncIterator[bytes]
Fault = Callable[[Messages, PayloadKey], Messages]


def weights(seed: int, num_items: int = 300_000) -> Tensors:
    """Return weights of all dtypes, with an empty tensor and a scalar; the largest has two bytes an item."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "big": torch.randn(num_items + 5, generator=generator).bfloat16(),
        "empty": torch.zeros(0, 7),
        "half": torch.randn(num_items // 10, 3, generator=generator).half(),
        "scalar": torch.tensor(float(seed)),
        "small": torch.randn(4, 3, generator=generator),
        "empty_last": torch.zeros(3, 0, dtype=torch.bfloat16),
    }


def stepped(tensors: Tensors, seed: int, share: float = 0.01, names: Iterable[str] | None = None) -> Tensors:
    """Move about that share of the items of these tensors (default: all), as an optimizer's step does."""
    generator = torch.Generator().manual_seed(seed)
    moved = {name: tensor.clone() for name, tensor in tensors.items()}
    for name in moved if names is None else names:
        is_moved = torch.rand(moved[name].shape, generator=generator) < share
        moved[name][is_moved] = moved[name][is_moved] * 1.01 + 0.001
    return moved


def size_of(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class Spoiling:
    """Mixed into a server: the next pulls pass through `faults`, one fault each."""

    faults: list[Fault]
    pulled: list[tuple[PayloadKey, int]]  # payloads with their offsets

    async def Pull(self, request, context):
        key = read_key(request.key)
        self.pulled.append((key, request.offset_bytes))
        messages = super().Pull(request, context)
        if self.faults:
            messages = self.faults.pop(0)(messages, key)
        async for message in messages:
            yield message


class SpoilingTrainer(Spoiling, WeightServer):
    spoil_manifest: Callable[[weights_pb2.GetManifestResponse], None] = staticmethod(lambda answer: None)
    located: list[str]  # workers that were told a source

    async def GetManifest(self, request, context):
        answer = await super().GetManifest(request, context)
        self.spoil_manifest(answer)
        return answer

    async def Locate(self, request, context):
        answer = await super().Locate(request, context)
        self.located.append(request.puller.worker_id)
        return answer


class SpoilingRelay(Spoiling, PayloadServer):
    pass


class Trainer:
    """A trainer and its weights by version; a restart has another address unless a port is given, and no deltas."""

    def __init__(self, egress: int, security: WireSecurity, max_calls: int) -> None:
        self.address, self.tensors = "", dict[int, Tensors]()
        self._egress, self._security, self._max_calls = egress, security, max_calls
        self.store = WeightStore()
        self.server = self._create_server()
        self._published: Snapshot | None = None

    def _create_server(self) -> SpoilingTrainer:
        server = SpoilingTrainer(JOB, {"config.json": b"{}"}, self.store, self._security, self._max_calls)
        server.faults, server.pulled, server.located = [], [], []
        return server

    async def start(self, port: int = 0) -> None:
        port = await self.server.start("127.0.0.1", port)
        self.address = f"127.0.0.1:{port}"
        root = Peer(address=self.address, host_id="trainer's host")
        self.server.sources = Sources([root], self._egress)

    async def restart(self, port: int = 0) -> None:
        await self.server.stop()
        self.store, self._published = WeightStore(), None
        self.server = self._create_server()
        await self.start(port)

    async def publish(self, version: int, tensors: Tensors) -> Snapshot:
        self.tensors[version] = tensors
        return await self._serve(take_snapshot(version, tensors.items(), base=self._published))

    async def publish_in_place(self, version: int, live: Tensors) -> Snapshot:
        """Serve these tensors themselves, until `withdraw` of the store."""
        self.tensors[version] = {name: tensor.clone() for name, tensor in live.items()}
        writer = SnapshotWriter(version, self._published, is_in_place=True)
        for name, tensor in live.items():
            writer.put(name, tensor)
        return await self._serve(writer.finish())

    async def _serve(self, snapshot: Snapshot) -> Snapshot:
        self.store.add(snapshot)
        self._published = snapshot
        await self.server.announce()
        return snapshot


class Rollout:
    def __init__(self, plane: "Plane", puller: WeightsPuller, server: SpoilingRelay | None) -> None:
        self.plane, self.puller, self.server = plane, puller, server
        self.early: list[str] = []  # tensors that were called final and were not

    def start(self, version: int, deadline_s: float = 5.0) -> Pull:
        """Start a pull; every tensor that it calls final is compared with its digest at once."""
        pull = self.puller.start(version, deadline_s)
        announce = pull.announce

        def checked(final: Iterable[int] = ()) -> None:
            final = list(final)
            self._check(pull, final)
            announce(final)

        pull.announce = checked  # type: ignore[method-assign]
        return pull

    async def pull(self, version: int, deadline_s: float = 5.0) -> Pull:
        """Over, and as it has to be: the trainer's bits, or an error that leaves no version. The trainer has heard."""
        pull = self.start(version, deadline_s)
        await self.see_through(pull)
        async with asyncio.timeout(5.0):
            await asyncio.gather(*self.puller.connections._background)
        return pull

    async def see_through(self, pull: Pull) -> None:
        try:
            await pull.complete()
        except WeightsError:
            assert self.puller.host is None or self.version != pull.version
            raise
        finally:
            self._check(pull, pull.final)
            assert not self.early
        self.assert_holds(pull.version)

    def _check(self, pull: Pull, final: Iterable[int]) -> None:
        for index in final:
            assert self.puller.host is not None
            assert pull.manifest is not None
            tensor = pull.manifest.tensors[index]
            if blake3(self.puller.host.tensor(index)).digest() != tensor.digest:
                self.early.append(tensor.name)

    @property
    def version(self) -> int | None:
        return None if self.puller.host is None else self.puller.host.version

    def assert_holds(self, version: int) -> None:
        """Assert that the file for engines has the trainer's bits, as any safetensors reader sees it."""
        assert self.version == version
        received, expected = load(self.puller.host.path.read_bytes()), self.plane.trainer.tensors[version]
        assert received.keys() == expected.keys()
        for name, tensor in expected.items():
            assert (received[name].dtype, received[name].shape) == (tensor.dtype, tensor.shape)
            assert bits(received[name]) == bits(tensor), name

    async def leave(self) -> None:
        """Stop like a killed process, without a word to anyone."""
        if self.server is not None:
            await self.server.stop()
        await self.puller.close()
        self.puller.host = None


class Plane:
    """`egress` as in `Sources`. Ends with its context."""

    def __init__(self, egress: int = 1, security: WireSecurity = PLAIN, max_calls: int = 1024) -> None:
        self._security = security
        self.trainer = Trainer(egress, security, max_calls)
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> "Plane":
        await self.trainer.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
        await self.trainer.server.stop()

    async def join(self, worker_id: str, host: str = "", zone: str = "", is_relay: bool = True) -> Rollout:
        """Add a rollout, on its own host unless one is named."""

        async def find_trainer() -> str:
            return self.trainer.address

        peer = Peer(worker_id=worker_id, host_id=host or f"host of {worker_id}", zone=zone)
        puller = WeightsPuller(lambda address: WeightsClient(address, JOB, self._security), find_trainer, peer)
        server = None
        if is_relay:
            server = SpoilingRelay(JOB, puller, self._security)
            server.faults, server.pulled = [], []
            puller.serve_at(f"127.0.0.1:{await server.start('127.0.0.1', 0)}")
            self._stack.push_async_callback(server.stop)
        self._stack.push_async_callback(puller.close)
        return Rollout(self, puller, server)


@contextlib.contextmanager
def hosts_apart() -> Iterator[None]:
    """Let this machine play several hosts: its loopback addresses are good on all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "is_ambiguous", lambda address: False)
        yield
