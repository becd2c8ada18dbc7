"""A seeded storm over a real job: what strikes whom, and after how much progress, follows from the seed alone.

    with stormy(folder) as sky:
        outcome = sky.storm(seed=7, num_faults=12)      # SUCCEEDED, exactly once, the bits of an undisturbed pass

`make chaos` runs many (benchmarks/chaos.py).
"""

import contextlib
import logging
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from onbeat.client import BrokerUnreachable
from onbeat.contracts.errors import ApiError
from onbeat.contracts.states import JobState
from onbeat.local.redis_server import free_port
from onbeat.local.supervisor import ServiceSpec
from onbeat.streams.keys import JobKeys
from tests.chaos.exactly_once import check_exactly_once
from tests.chaos.proxy import Proxy
from tests.e2e.stack import RunningStack, running, tiny_job

logger = logging.getLogger(__name__)

LEASE_S = 3.0
FAR_HOST = "127.0.0.2"  # trainers listen on 127.0.0.1 and tell rollouts this address: the proxy's
NUM_ITERATIONS, NUM_PROMPTS = 5, 6
NUM_STEPS = NUM_ITERATIONS * (NUM_PROMPTS + 1)  # steps of progress: groups accepted and iterations committed
ROLLOUT = {"num_prompts_per_iteration": NUM_PROMPTS, "num_samples_per_prompt": 4, "max_response_tokens": 48}
OWNER = "trainer"  # whichever of the two has the job when it is struck
PROCESSES = [OWNER, "rollout-0", "rollout-1", "broker", "redis"]
SERVICES = ["trainer", "trainer-1", "rollout-0", "rollout-1", "broker", "redis"]
NETWORKS = ["redis-network", "weights-network"]
DEADLINE_S = 300.0

# Kind of fault -> (weight, whom it may strike, shortest and longest duration in seconds)
KINDS: dict[str, tuple[int, list[str], tuple[float, float]]] = {
    "kill": (6, PROCESSES, (0, 0)),
    "restart": (1, ["redis"], (0, 0)),
    "pause": (3, PROCESSES, (0.2, 1.0)),
    "pause_beyond_lease": (3, [OWNER, "rollout-0", "rollout-1", "broker"], (LEASE_S + 1, LEASE_S + 3)),
    "drop": (3, NETWORKS, (0, 0)),
    "refuse": (2, NETWORKS, (0.5, 3.0)),
    "delay": (2, NETWORKS, (1.0, 3.0)),
}
NETWORK_DELAY_S = 0.1


@dataclass(frozen=True)
class Fault:
    at_progress: int  # it strikes when so much is done
    after_s: float  # and so long after that
    kind: str
    target: str
    duration_s: float


@dataclass
class Strike:
    """A fault that has happened."""

    seed: int
    kind: str
    target: str
    time_s: float  # since the job was submitted
    duration_s: float
    has_struck: bool  # False: the process was just away
    recovery_s: float | None = None  # until the job made progress again


def draw(seed: int, num_faults: int) -> list[Fault]:
    """Draw the faults of a storm: the same seed gives the same storm."""
    chance = random.Random(seed)
    faults = []
    for at_progress in sorted(chance.choices(range(1, NUM_STEPS - 1), k=num_faults)):
        kind = chance.choices(list(KINDS), [weight for weight, _, _ in KINDS.values()])[0]
        _, targets, (shortest, longest) = KINDS[kind]
        faults.append(
            Fault(at_progress, chance.uniform(0, 0.5), kind, chance.choice(targets), chance.uniform(shortest, longest))
        )
    return faults


class Sky:
    def __init__(self, stack: RunningStack, folder: Path, proxies: dict[str, list[Proxy]]) -> None:
        self.stack, self.proxies, self._folder = stack, proxies, folder
        self.redis = Redis.from_url(stack.redis_url, socket_timeout=0.2, socket_connect_timeout=0.2, retry=None)

    def storm(self, seed: int, num_faults: int) -> list[Strike]:
        """Run a job in the storm of this seed. Raises AssertionError when the job differs from an undisturbed one."""
        rollout = ROLLOUT | {"max_lost_rollouts": 1_000}  # the storm kills many
        mode = {"mode": "bounded", "max_staleness": 2} if seed % 3 == 2 else {"mode": "periodic"}
        schedule = mode | {"num_iterations": NUM_ITERATIONS}
        every = {"every_iterations": 1 + seed % 2}
        job = tiny_job(self._folder, rollout=rollout, schedule=schedule, checkpoint=every) | {"seed": seed}
        job_id = self.stack.client.jobs.create(job).id
        storm = Storm(self, job_id, seed, draw(seed, num_faults))
        try:
            storm.run()
            with tempfile.TemporaryDirectory() as scratch:
                check_exactly_once(self.stack, job_id, Path(scratch))
        except BaseException:
            logger.error("%s", storm.describe())
            storm.calm()
            raise
        return storm.strikes


class Storm:
    """One job and its faults. One thread does it all, so that a log of a failure can be read from top to bottom."""

    def __init__(self, sky: Sky, job_id: str, seed: int, faults: list[Fault]) -> None:
        self._sky, self._job_id, self._seed = sky, job_id, seed
        self._faults = faults
        self._reached: dict[int, float] = {}  # progress -> when it was reached
        self._lasting: list[tuple[float, Fault]] = []  # faults that end, and when
        self._started = time.monotonic()
        self._progress = 0
        self.strikes: list[Strike] = []

    def run(self) -> None:
        """Strike until the job is final and all services are back. Raises AssertionError after DEADLINE_S."""
        while not self._is_final() or self._lasting:
            assert self._elapsed_s() < DEADLINE_S, f"storm {self._seed}: not over after {DEADLINE_S:.0f} s"
            for fault in [fault for fault in self._faults if self._is_due(fault)]:
                self._faults.remove(fault)
                self._strike(fault)
            self._end_lasting(until_s=self._elapsed_s())
            time.sleep(0.02)

    def calm(self) -> None:
        """After a failure: the next storm begins in fair weather, and finds trainers without a job."""
        self._end_lasting(until_s=float("inf"))
        self._sky.stack.job(self._job_id)  # a broker is there
        with contextlib.suppress(ApiError, BrokerUnreachable):  # the job is over, or Redis not back yet
            self._sky.stack.client.jobs.cancel(self._job_id)

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def _is_final(self) -> bool:
        """Looks how far the job is; while Redis is away nothing is known."""
        job = JobKeys(self._job_id)
        try:
            state, committed = self._sky.redis.hmget(job.job, "state", "next_iteration")
            with self._sky.redis.pipeline(transaction=False) as pipeline:
                for iteration in range(NUM_ITERATIONS):
                    pipeline.hget(job.iteration(iteration), "num_accepted")
                progress = int(committed or 0) + sum(int(number or 0) for number in pipeline.execute())
        except (RedisError, OSError):
            return False
        if progress > self._progress:
            self._note_progress(progress)
        return state is not None and JobState(state.decode()).is_final

    def _note_progress(self, progress: int) -> None:
        now = self._elapsed_s()
        for step in range(self._progress + 1, progress + 1):
            self._reached[step] = now
        self._progress = progress
        for strike in self.strikes:
            if strike.recovery_s is None:
                strike.recovery_s = now - strike.time_s

    def _is_due(self, fault: Fault) -> bool:
        return self._elapsed_s() >= self._reached.get(fault.at_progress, float("inf")) + fault.after_s

    def _strike(self, fault: Fault) -> None:
        if fault.target == OWNER:
            fault = replace(fault, target=self._owner())
        strike = Strike(self._seed, fault.kind, fault.target, self._elapsed_s(), fault.duration_s, True)
        if fault.target in self._sky.proxies:
            self._disturb(fault, True)
        else:
            number = {"kill": signal.SIGKILL, "restart": signal.SIGTERM}.get(fault.kind, signal.SIGSTOP)
            strike.has_struck = self._sky.stack.signal(fault.target, number)
        self.strikes.append(strike)
        if fault.duration_s:
            self._lasting.append((self._elapsed_s() + fault.duration_s, fault))
        logger.info("seed %d, %.2f s: %s", self._seed, strike.time_s, strike)

    def _owner(self) -> str:
        """Return the service that trains the job, or the first trainer while Redis is away."""
        try:
            owner = self._sky.redis.hget(JobKeys(self._job_id).job, "owner")
        except (RedisError, OSError):
            owner = None
        return "trainer-1" if owner == b"trainer-1" else "trainer"

    def _end_lasting(self, until_s: float) -> None:
        for end, fault in [lasting for lasting in self._lasting if lasting[0] <= until_s]:
            self._lasting.remove((end, fault))
            if fault.target in self._sky.proxies:
                self._disturb(fault, False)
            else:
                self._sky.stack.signal(fault.target, signal.SIGCONT)

    def _disturb(self, fault: Fault, is_bad: bool) -> None:
        for proxy in self._sky.proxies[fault.target]:
            if fault.kind == "refuse":
                proxy.is_refusing = is_bad
            if fault.kind == "delay":
                proxy.delay_s = NETWORK_DELAY_S if is_bad else 0.0
            elif is_bad:
                proxy.drop()

    def describe(self) -> str:
        """Describe all that is known of the storm, for the analysis of a failure."""
        try:
            fields: Any = self._sky.redis.hgetall(JobKeys(self._job_id).job)
            events: Any = self._sky.redis.xrevrange(JobKeys(self._job_id).events, count=40)
        except (RedisError, OSError) as error:
            fields, events = {}, [error]
        logs = [f"{name}:\n" + "\n".join(self._sky.stack.log(name).splitlines()[-25:]) for name in SERVICES]
        parts = [f"storm {self._seed}, job {self._job_id}, progress {self._progress} of {NUM_STEPS}", *self.strikes]
        parts += [*fields.items(), *reversed(events), *logs]
        return "\n".join(map(str, parts))


@contextlib.contextmanager
def stormy(folder: Path, engine: str = "transformers") -> Iterator[Sky]:
    """Two trainers, two rollouts, a broker and Redis, with proxies where they speak to each other."""
    proxies: dict[str, list[Proxy]] = {"redis-network": [], "weights-network": []}

    def change(specs: list[ServiceSpec]) -> list[ServiceSpec]:
        trainers = [spec for spec in specs if spec.name == "trainer"]
        specs += [
            replace(spec, name="trainer-1", env={**spec.env, "ONBEAT_TRAINER_ID": "trainer-1"}) for spec in trainers
        ]
        url = specs[0].env["ONBEAT_REDIS_URL"]
        redis_port = url.rpartition(":")[2].partition("/")[0]
        proxy = Proxy(int(redis_port))
        proxies["redis-network"].append(proxy)
        changes = {"ONBEAT_REDIS_URL": url.replace(f":{redis_port}/", f":{proxy.port}/")}
        return [replace(spec, env={**spec.env, **changes, **far_weights(spec)}) for spec in specs]

    def far_weights(spec: ServiceSpec) -> dict[str, str]:
        if not spec.name.startswith("trainer"):
            return {}
        port = free_port()
        proxies["weights-network"].append(Proxy(port, FAR_HOST, port))
        return {"ONBEAT_WEIGHTS_PORT": str(port), "ONBEAT_WEIGHTS_ADVERTISE": FAR_HOST}

    try:
        with running(folder, num_rollouts=2, engine=engine, lease_s=LEASE_S, change=change) as stack:
            yield Sky(stack, folder, proxies)
    finally:
        for proxy in [proxy for several in proxies.values() for proxy in several]:
            proxy.close()
