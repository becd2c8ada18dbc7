"""New weights for eight rollouts on links of a given rate: in a tree of relays, and in a star.

The trainer and each rollout are processes in network namespaces of their own, on one bridge; both directions of every
link are limited by a token bucket. Namespaces disappear with the run, also after Ctrl-C or an error. It needs root.

    alone    one rollout pulls
    tree     all eight at once, each passes on what it receives (egress 1, fan-out 1): until the last has it
    star     all eight at once from the trainer
    killed   as tree; a rollout in the middle is killed at half the time of `alone`; until the last of the others
    cut      the same, but its link goes silent: no error shows that it is gone

    sudo python benchmarks/weights_relay.py --rates 1000 500
"""

import asyncio
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager

from harness import command_line, save, start
from weights_peer import Answer, Process

NUM_PULLERS = 8
KILLED = 3  # the fourth that asks; three feed it, four wait for it
ORDER_S = 0.1  # seconds between two requests, where it matters which puller feeds the other
DELTA_SHARE = 0.04  # share of the weights that change
BURST = "256kb"
SUBNET = "10.213.0"
GOAL = 2.0  # tree to alone
TRAINER = "trainer"
LOSSES = ("killed", "cut")  # `cut` once: it waits for deadlines, which do not vary


# ---- the network -----------------------------------------------------------------------------------------------------


class Network:
    """The hosts, named by their role: each is in a namespace, and a bridge in one more joins them."""

    def __init__(self, rate_mbit: int) -> None:
        self._prefix = f"onbeat-{os.getpid()}-{rate_mbit}"
        self._rate = f"{rate_mbit}mbit"
        self._switch = f"{self._prefix}-switch"
        self._hosts: dict[str, int] = {}  # last number of the address

    def build(self, hosts: list[str]) -> None:
        command(f"ip netns add {self._switch}")
        command(f"ip -n {self._switch} link add bridge type bridge")
        command(f"ip -n {self._switch} link set bridge up")
        for number, host in enumerate(hosts, start=1):
            self._hosts[host] = number
            self._add(host, f"port{number}")

    def _add(self, host: str, port: str) -> None:
        name = self._namespace(host)
        command(f"ip netns add {name}")
        command(f"ip -n {self._switch} link add {port} type veth peer name eth0 netns {name}")
        command(f"ip -n {self._switch} link set {port} master bridge up")
        command(f"ip -n {name} address add {self.address(host)}/24 dev eth0")
        command(f"ip -n {name} link set eth0 up")
        command(f"ip -n {name} link set lo up")
        for namespace, device in [(self._switch, port), (name, "eth0")]:
            command(f"tc -n {namespace} qdisc add dev {device} root tbf rate {self._rate} burst {BURST} latency 50ms")

    def remove(self) -> None:
        """Remove all namespaces; their devices go with them."""
        for name in [*map(self._namespace, self._hosts), self._switch]:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def address(self, host: str) -> str:
        return f"{SUBNET}.{self._hosts[host]}"

    def prefix(self, host: str) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self._namespace(host))

    def set_link(self, host: str, state: str) -> None:
        """Set the link `up`, or `down`: packets to and from the host are then silently lost."""
        command(f"ip -n {self._switch} link set port{self._hosts[host]} {state}")

    def _namespace(self, host: str) -> str:
        return f"{self._prefix}-{host}"


def command(line: str) -> None:
    done = subprocess.run(line.split(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{line}: {done.stderr.strip()}; this benchmark needs root, network namespaces and tc")


@contextmanager
def network(rate_mbit: int, hosts: list[str]) -> Iterator[Network]:
    made = Network(rate_mbit)
    try:
        made.build(hosts)
        yield made
    finally:
        made.remove()


# ---- the rollouts ----------------------------------------------------------------------------------------------------


class Fleet:
    """A trainer and its rollouts. A rollout that was killed is replaced before the next measurement."""

    def __init__(self, stack: AsyncExitStack, net: Network, names: list[str]) -> None:
        self._stack, self._net, self._names = stack, net, names
        self._pullers: dict[str, Process] = {}
        self._num_started = 0

    async def start(self) -> None:
        self.trainer = self._process(TRAINER, "trainer")
        self._trainer_address = (await self.trainer.start())["address"]
        await self.mend()

    async def mend(self) -> None:
        for name in self._names:
            if name not in self._pullers:
                worker_id = f"{name}-{self._num_started}"
                self._num_started += 1
                puller = self._process(name, "puller", "--trainer", self._trainer_address, "--worker-id", worker_id)
                await puller.start()
                self._pullers[name] = puller

    def _process(self, host: str, *arguments: str) -> Process:
        process = Process(*arguments, "--host", self._net.address(host), prefix=self._net.prefix(host))
        self._stack.push_async_callback(process.kill)
        return process

    async def spread(self, version: int, names: list[str], is_full: bool, is_tree: bool) -> float:
        """Return the seconds until the last of these has the version."""
        await self.trainer.ask("serve", egress=1 if is_tree else NUM_PULLERS, fanout=1)
        started = time.monotonic()
        answers = await asyncio.gather(*(self._pull(name, version, is_full, is_tree) for name in names))
        return last_of(answers) - started

    async def lose(self, version: int, after_s: float, is_cut: bool) -> float:
        """Pull in full in the tree and lose one rollout meanwhile; return the seconds until the last other has it."""
        await self.trainer.ask("serve", egress=1, fanout=1)
        started = time.monotonic()
        pulls: dict[str, asyncio.Task[Answer]] = {}
        for name in self._names:
            pulls[name] = asyncio.create_task(self._pull(name, version, is_full=True, is_relay=True))
            await asyncio.sleep(ORDER_S)
        await asyncio.sleep(after_s - (time.monotonic() - started))
        victim = self._names[KILLED]
        lost = pulls.pop(victim)
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        puller = self._pullers.pop(victim)
        if is_cut:
            self._net.set_link(victim, "down")
        else:
            await puller.kill()
        answers = await asyncio.gather(*pulls.values())
        if is_cut:
            await puller.kill()
            self._net.set_link(victim, "up")
        await self.mend()
        return last_of(answers) - started

    async def bring_all_to(self, version: int) -> None:
        await self.spread(version, self._names, is_full=False, is_tree=True)

    async def _pull(self, name: str, version: int, is_full: bool, is_relay: bool) -> Answer:
        return await self._pullers[name].ask("pull", version=version, is_full=is_full, is_relay=is_relay)


def last_of(answers: list[Answer]) -> float:
    failed = [answer["error"] for answer in answers if "error" in answer]
    if failed:
        raise RuntimeError(f"a rollout did not get the weights: {failed[0]}")
    times: list[float] = [answer["done_at"] for answer in answers]
    return max(times)


# ---- the measurement -------------------------------------------------------------------------------------------------


async def measure(rate_mbit: int, num_rounds: int, is_full: bool) -> Answer:
    names = [f"rollout{number}" for number in range(NUM_PULLERS)]
    with network(rate_mbit, [TRAINER, *names]) as net:
        async with AsyncExitStack() as stack:
            fleet = Fleet(stack, net, names)
            await fleet.start()
            return await run_rounds(fleet, names, rate_mbit, num_rounds, is_full)


async def run_rounds(fleet: Fleet, names: list[str], rate_mbit: int, num_rounds: int, is_full: bool) -> Answer:
    published = await fleet.trainer.ask("publish")
    await fleet.bring_all_to(published["version"])  # allocates their memory
    full, delta, loads = defaultdict(list), defaultdict(list), []
    for number in range(num_rounds):
        for kind, chosen, is_tree in [("alone", names[:1], True), ("tree", names, True), ("star", names, False)]:
            published = await fleet.trainer.ask("publish", share=DELTA_SHARE)
            delta[kind].append(await fleet.spread(published["version"], chosen, is_full=False, is_tree=is_tree))
            if is_full:
                full[kind].append(await fleet.spread(published["version"], chosen, is_full=True, is_tree=is_tree))
            if chosen != names:
                await fleet.bring_all_to(published["version"])
        for kind in LOSSES[: 1 if number else 2] if is_full else ():
            taken_s = await fleet.lose(published["version"], full["alone"][-1] / 2, is_cut=kind == "cut")
            full[kind].append(taken_s)
            await fleet.bring_all_to(published["version"])
        loads.append(os.getloadavg()[0])
        print(f"{rate_mbit} Mbit/s, round {number}: full {dict(full)}, delta {dict(delta)}", file=sys.stderr)
    link = {"rate_mbit_per_s": rate_mbit, "rounds": num_rounds, "load_average": loads}
    link |= {name: published[name] for name in ("full_bytes", "delta_bytes")} | {"delta_changed": DELTA_SHARE}
    return link | {name: summary(rounds) for name, rounds in [("full", full), ("delta", delta)] if rounds}


def summary(rounds: dict[str, list[float]]) -> Answer:
    kinds: Answer = {
        name: {"median_s": statistics.median(values), "rounds_s": values} for name, values in rounds.items()
    }
    for kind in rounds:
        kinds[kind]["to_alone"] = kinds[kind]["median_s"] / kinds["alone"]["median_s"]
    kinds["is_goal_met"] = kinds["tree"]["to_alone"] <= GOAL
    kinds["hop_s"] = (kinds["tree"]["median_s"] - kinds["alone"]["median_s"]) / (NUM_PULLERS - 1)
    return kinds


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rates", type=int, nargs="*", default=[1000, 500], help="of the links, in Mbit/s")
    parser.add_argument("--delta-rates", type=int, nargs="*", default=[100], help="the same, for the delta alone")
    parser.add_argument("--rounds", type=int, default=3)
    options = start(parser)
    if os.geteuid() != 0:
        raise SystemExit("this benchmark makes network namespaces and limits their links: run it as root")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    links = [asyncio.run(measure(rate, options.rounds, is_full=True)) for rate in options.rates]
    links += [asyncio.run(measure(rate, options.rounds, is_full=False)) for rate in options.delta_rates]
    goal = {"goal": f"tree, last of {NUM_PULLERS} <= {GOAL} x alone"}
    save("weights_relay", {"num_rollouts": NUM_PULLERS} | goal | {"links": links})


if __name__ == "__main__":
    main()
