"""A pull of a 135M-parameter model's weights, until they are verified in the host's memory, against a bare gRPC stream.

The server is a process on one core; the puller is this process on another and then, once more, on both: a puller hashes
in threads. The bare stream sends the same bytes in messages of the same size, through the same kind of server and
channel to the same cores, and they are only counted. All kinds alternate, round by round, each when the machine is
idle; figures are medians over the rounds. GB/s counts the bytes of the weights, also for a delta, which stands for
them.

    full         everything, into memory that the process has had before
    first        the same in a new process: the system hands out and clears every page meanwhile
    delta        from the version before, with a share of the weights changed
    full, tls    over TLS, against the bare stream over TLS
    hash         BLAKE3 of all weights in memory, by one thread: how a pull checks what a relay sent
    checksum     XXH3-128 of the same, by one thread: how it checks what the trainer sent
    copy         copying the same, by one thread
"""

import asyncio
import os
import statistics
import subprocess
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from blake3 import blake3
from grpc.aio import UnaryStreamMultiCallable
from harness import command_line, save, seconds, start, temporary_folder
from weights_peer import BARE_METHOD, JOB, Answer, Process, Puller
from xxhash import xxh3_128_digest

from onbeat.weights.security import PLAIN, WireSecurity, create_channel

SERVER_CORE, PULLER_CORE = 0, 1
ROUNDS = 9
SHARES = (0.01, 0.04)  # shares of the weights that change
GOAL = 0.6  # share of the bare stream's speed, for a full pull
WAIT_S, MAX_WAITS, QUIET = 0.5, 60, 0.9  # a measurement waits until this share of the machine is idle

Rounds = dict[str, list[float]]  # seconds of each kind


async def timed(host: Puller, version: int, is_full: bool = False) -> tuple[float, Answer]:
    """Return the seconds until the version is here, as a delta if the previous one is here, and the puller's answer."""
    started = time.monotonic()
    answer = await host.pull(version, is_full, is_relay=False)
    assert answer.get("faults") == [], answer
    return answer["done_at"] - started, answer


class BareStream:
    def __init__(self, address: str, security: WireSecurity = PLAIN) -> None:
        channel = create_channel(address, security)
        self._call: UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(f"/{JOB}/{BARE_METHOD}")

    async def pull(self, size_bytes: int) -> float:
        started = time.perf_counter()
        received = 0
        async for message in self._call(b""):
            received += len(message)
        assert received == size_bytes
        return time.perf_counter() - started


def make_certificate(folder: Path) -> None:
    """Write cert.pem, which is its own authority, and key.pem."""
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=onbeat", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run(command, check=True, capture_output=True)


async def wait_until_quiet() -> None:
    """Wait until other processes hardly use the machine, but no longer than MAX_WAITS * WAIT_S."""
    for _ in range(MAX_WAITS):
        before = idle_ticks()
        await asyncio.sleep(WAIT_S)
        ticks = WAIT_S * os.sysconf("SC_CLK_TCK") * (os.cpu_count() or 1)
        if idle_ticks() - before >= QUIET * ticks:
            return


def idle_ticks() -> int:
    """Return the idle ticks of all cores since the start of the system."""
    return int(Path("/proc/stat").read_text().split()[4])


async def measure(stack: AsyncExitStack, folder: Path) -> dict[str, Any]:
    async def start(*arguments: str) -> tuple[Process, dict[str, Any]]:
        process = Process(*arguments, prefix=("taskset", "-c", str(SERVER_CORE)))
        stack.push_async_callback(process.kill)
        return process, await process.start()

    make_certificate(folder)
    trainer, plain = await start("trainer")
    tls_trainer, tls = await start("trainer", "--tls", str(folder))
    security = WireSecurity(tls_ca=folder / "cert.pem")
    place = ("bench", "127.0.0.1", plain["address"])
    host, tls_host = Puller(*place), Puller("bench", "127.0.0.1", tls["address"], security)
    stream, tls_stream = BareStream(plain["bare_address"]), BareStream(tls["bare_address"], security)

    published = await trainer.ask("publish")
    version = published["version"]
    await tls_trainer.ask("publish")
    await timed(host, version)
    target = memoryview(bytearray(published["full_bytes"]))
    rounds: Rounds = {}
    sizes: dict[str, int] = {}
    for number in range(1 + ROUNDS):
        taken: dict[str, float] = {}
        for share in SHARES:
            published = await trainer.ask("publish", share=share)
            version = published["version"]
            name = f"delta {share:.0%}"
            await wait_until_quiet()
            taken[name], answer = await timed(host, version)
            sizes[name], taken[f"apply {name}"] = answer["received_bytes"], answer["apply_s"]
            assert sizes[name] == published["delta_bytes"]
        full_bytes = published["full_bytes"]
        await wait_until_quiet()
        taken["bare"] = await stream.pull(full_bytes)
        taken["full"], answer = await timed(host, version, is_full=True)
        sizes["full"] = answer["received_bytes"]
        fresh = Puller(*place)  # new memory, as in a new process
        taken["first"], _ = await timed(fresh, version)
        await fresh.puller.close()
        await wait_until_quiet()
        taken["bare, tls"] = await tls_stream.pull(full_bytes)
        taken["full, tls"], _ = await timed(tls_host, 0, is_full=True)
        assert host.puller.host is not None
        held = host.puller.host.data
        taken["hash"] = seconds(lambda held=held: blake3(held).digest())
        taken["checksum"] = seconds(lambda held=held: xxh3_128_digest(held))
        taken["copy"] = seconds(lambda held=held: target.__setitem__(slice(None), held))
        if number > 0:  # the first warms up
            for name, value in taken.items():
                rounds.setdefault(name, []).append(value)
    return summary(rounds, sizes, full_bytes)


def summary(rounds: Rounds, sizes: dict[str, int], full_bytes: int) -> dict[str, Any]:
    def ratio(name: str, to: str) -> float:
        return statistics.median(a / b for a, b in zip(rounds[to], rounds[name], strict=True))

    kinds = {}
    for name, values in rounds.items():
        median = statistics.median(values)
        kinds[name] = {"median_s": median, "min_s": min(values), "max_s": max(values)}
        kinds[name]["gb_per_s"] = full_bytes / median / 1e9
        if name in sizes:
            kinds[name]["received_bytes"] = sizes[name]
    ratios = {
        "full_to_bare": ratio("full", "bare"),
        "first_to_bare": ratio("first", "bare"),
        "tls_full_to_tls_bare": ratio("full, tls", "bare, tls"),
        "tls_full_to_full": ratio("full, tls", "full"),
        "fastest_full_to_fastest_bare": min(rounds["bare"]) / min(rounds["full"]),
        "bound_on_one_core": bound_on_one_core(rounds),
    }
    return {
        "full_bytes": full_bytes,
        "rounds": ROUNDS,
        "cores": {"server": SERVER_CORE, "puller": sorted(os.sched_getaffinity(0))},
        "load_average": os.getloadavg(),
        "kinds": kinds,
        "ratios": ratios,
        "goal": f"full_to_bare >= {GOAL}",
        "is_met": ratios["full_to_bare"] >= GOAL,
    }


def bound_on_one_core(rounds: Rounds) -> float:
    """Return the bound of full to bare, where receiving, copying and checking take turns."""
    bare, copy, checksum = (min(rounds[name]) for name in ("bare", "copy", "checksum"))
    return bare / (bare + copy + checksum)


async def run() -> dict[str, Any]:
    with temporary_folder() as folder:
        async with AsyncExitStack() as stack:
            return await measure(stack, folder)


def main() -> None:
    os.sched_setaffinity(0, {PULLER_CORE})
    on_one_core = asyncio.run(run())
    os.sched_setaffinity(0, {SERVER_CORE, PULLER_CORE})
    save("weights_pull", on_one_core | {"puller_on_both_cores": asyncio.run(run())})


if __name__ == "__main__":
    start(command_line(__doc__))
    main()
