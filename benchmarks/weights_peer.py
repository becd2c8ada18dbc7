"""A process of the weight benchmarks, and the handle that they have on it: a trainer's weight server, or a puller.

    benchmark -- one line of JSON on stdin, a command -->  weights_peer.py trainer | puller
              <-- one line of JSON on stdout, the answer --

A puller needs neither torch nor the trainer. Weights are random, in the shapes of SmolLM2-135M.
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ["OMP_NUM_THREADS"] = "1"  # processes share few cores

import grpc

from onbeat.contracts.errors import WeightsError
from onbeat.weights.client import WeightsClient
from onbeat.weights.security import PLAIN, WireSecurity, bind, create_server
from onbeat.weights.server import CHUNK_BYTES, PayloadServer
from onbeat.weights.wire import Peer
from services.rollout.puller import WeightsPuller

if TYPE_CHECKING:
    import torch

    from services.trainer.weights.store import Snapshot

JOB = "benchmark"
BARE_METHOD = "Stream"
HIDDEN, MLP, VOCABULARY, LAYERS, KV = 576, 1536, 49152, 30, 192  # SmolLM2-135M; the embedding is the head too
PULL_DEADLINE_S = 240.0
LINE_BYTES = 1 << 20

Answer = dict[str, Any]
Command = Callable[..., Awaitable[Answer]]


# ---- the handle ------------------------------------------------------------------------------------------------------


class Process:
    """A handle on a process. `prefix` is put before its command line: `taskset -c 0`, `ip netns exec NAME`."""

    def __init__(self, *arguments: str, prefix: tuple[str, ...] = ()) -> None:
        self._command = [*prefix, sys.executable, str(Path(__file__).resolve()), *arguments]
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> Answer:
        """Start the process and return its first line. It has a session of its own: Ctrl-C reaches the benchmark alone,
        which then ends it."""
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=pipe, stdout=pipe, start_new_session=True, limit=LINE_BYTES
        )
        return await self._answer(60.0)

    async def ask(self, name: str, timeout_s: float = PULL_DEADLINE_S, **arguments: object) -> Answer:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"name": name, **arguments}).encode() + b"\n")
        return await self._answer(timeout_s)

    async def _answer(self, timeout_s: float) -> Answer:
        assert self._process is not None
        assert self._process.stdout is not None
        async with asyncio.timeout(timeout_s):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(self._command)} ended")
        answer: Answer = json.loads(line)
        return answer

    async def kill(self) -> None:
        """Kill the process without a warning. It may have ended already."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


# ---- the trainer -----------------------------------------------------------------------------------------------------


class Trainer:
    """A trainer's weight server, and a bare stream of the same bytes on another port."""

    def __init__(self, host: str, security: WireSecurity) -> None:
        from services.trainer.weights.server import WeightServer  # it imports torch, which a puller does not need
        from services.trainer.weights.store import WeightStore

        self._host, self._security = host, security
        self._store = WeightStore(2)
        self._server = WeightServer(JOB, {}, self._store, security)
        self._weights: dict[str, torch.Tensor] = {}
        self._chunks: list[bytes] = []
        self._num_published = 0
        self._address = ""

    async def start(self) -> Answer:
        port = await self._server.start(self._host, 0)
        self._address = f"{self._host}:{port}"
        await self.serve(egress=1, fanout=1)
        self._bare = create_server(self._security, max_concurrent_calls=16)
        stream: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(self._stream)
        self._bare.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(JOB, {BARE_METHOD: stream}),))
        bare = bind(self._bare, self._security, f"{self._host}:0")
        await self._bare.start()
        return {"address": self._address, "bare_address": f"{self._host}:{bare}"}

    async def _stream(self, _request: bytes, _context: object) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            yield chunk

    async def serve(self, egress: int, fanout: int) -> Answer:
        """Serve with these limits, as if nothing had been pulled before."""
        from services.trainer.weights.relay_tree import Sources

        root = Peer(worker_id="trainer", address=self._address, host_id="trainer")
        self._server.sources = Sources([root], egress, fanout)
        return {}

    async def publish(self, share: float | None = None) -> Answer:
        """Publish the next version, with this share of the weights one unit in the last place away; None: all new."""
        import torch

        from services.trainer.weights.store import take_snapshot

        generator = torch.Generator().manual_seed(self._num_published)
        if share is None:
            self._weights = random_weights(generator)
        else:
            self._weights = {name: stepped(tensor, share, generator) for name, tensor in self._weights.items()}
        base: Snapshot | None = self._store.newest()
        snapshot = take_snapshot(self._num_published, self._weights.items(), base=base)
        self._store.add(snapshot)
        self._num_published += 1
        whole = memoryview(b"".join(snapshot.buffers))
        self._chunks = [bytes(whole[start : start + CHUNK_BYTES]) for start in range(0, len(whole), CHUNK_BYTES)]
        delta_bytes = None if snapshot.delta is None else snapshot.delta.plan.size_bytes
        answer = {"version": snapshot.policy_version, "full_bytes": len(whole), "delta_bytes": delta_bytes}
        return answer | {"encode_s": snapshot.encode_s}


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the shapes of the checkpoint's tensors, by name."""
    layer = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (KV, HIDDEN),
        "self_attn.v_proj": (KV, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (MLP, HIDDEN),
        "mlp.up_proj": (MLP, HIDDEN),
        "mlp.down_proj": (HIDDEN, MLP),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for index in range(LAYERS):
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes | {"model.norm.weight": (HIDDEN,)}


def random_weights(generator: "torch.Generator") -> dict[str, "torch.Tensor"]:
    import torch

    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes().items()}
    return {name: (tensor * 0.02).bfloat16() for name, tensor in made.items()}


def stepped(tensor: "torch.Tensor", share: float, generator: "torch.Generator") -> "torch.Tensor":
    import torch

    chance = torch.rand(tensor.shape, generator=generator)
    up_or_down = (chance < share).short() - 2 * (chance < share / 2).short()
    return (tensor.view(torch.int16) + up_or_down).view(torch.bfloat16)


# ---- a puller --------------------------------------------------------------------------------------------------------


class Puller:
    """A host with its copy of the weights and, unless a pull asks for none, a relay."""

    def __init__(self, worker_id: str, host: str, trainer: str, security: WireSecurity = PLAIN) -> None:
        async def find_trainer() -> str:
            return trainer

        peer = Peer(worker_id=worker_id, host_id=worker_id)
        self._host = host
        self.puller = WeightsPuller(lambda source: WeightsClient(source, JOB, security), find_trainer, peer)
        self._relay = PayloadServer(JOB, self.puller)
        self._address = ""

    async def start(self) -> Answer:
        self._address = f"{self._host}:{await self._relay.start(self._host, 0)}"
        return {"address": self._address}

    async def pull(self, version: int, is_full: bool, is_relay: bool) -> Answer:
        """Pull a version. `is_full`: without a copy to build on. `done_at` is on the machine's monotonic clock."""
        if is_full and self.puller.host is not None:
            self.puller.host.begin("the benchmark starts over")
        self.puller.serve_at(self._address if is_relay else "")
        pull = self.puller.start(version, PULL_DEADLINE_S)
        try:
            await pull.complete()
        except WeightsError as error:
            return {"error": str(error)}
        return {"done_at": time.monotonic(), **vars(pull.stats)}


# ---- the process -----------------------------------------------------------------------------------------------------


async def obey(peer: Trainer | Puller) -> None:
    """Obey commands until stdin ends, as it does when the benchmark is killed."""
    say(await peer.start())
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        say(await getattr(peer, command.pop("name"))(**command))


def say(answer: Answer) -> None:
    print(json.dumps(answer), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("role", choices=["trainer", "puller"])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--tls", type=Path, help="of a trainer: folder with cert.pem and key.pem")
    parser.add_argument("--trainer", help="of a puller: address of the trainer")
    parser.add_argument("--worker-id", default="puller")
    options = parser.parse_args()

    async def run() -> None:  # servers and channels need a running loop
        if options.role == "trainer":
            folder = options.tls
            security = WireSecurity(tls_cert=folder / "cert.pem", tls_key=folder / "key.pem") if folder else PLAIN
            await obey(Trainer(options.host, security))
        else:
            await obey(Puller(options.worker_id, options.host, options.trainer))

    asyncio.run(run())
    os._exit(0)  # servers and maps go with the process


if __name__ == "__main__":
    main()
