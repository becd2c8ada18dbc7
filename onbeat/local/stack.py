"""The local stack: Redis, broker, trainer and rollouts as child processes that speak only HTTP, Redis and gRPC."""

import asyncio
import logging
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from socket import gethostname

import httpx

from onbeat.contracts.data_folder import REDIS_FOLDER
from onbeat.contracts.errors import OnbeatError
from onbeat.contracts.installed import ENGINES
from onbeat.contracts.suggestions import close_names, suggest
from onbeat.local.redis_choice import choose_server
from onbeat.local.redis_server import HOST, free_port, redis_service
from onbeat.local.state import StackLock, create_data_dir
from onbeat.local.supervisor import ServiceEnd, ServiceSpec, StackFailed, Supervisor
from onbeat.machine.accelerators import available_devices, device_environments
from onbeat.machine.cores import CorePlan, available_cores, cpu_quota, format_cores, physical_cores, plan_cores
from onbeat.machine.malloc import KEEP_FREED
from onbeat.machine.processor import read_processor
from onbeat.process.brokers import DEFAULT_PORT
from onbeat.process.children import command_of
from onbeat.process.stacks import StackState, this_machine
from onbeat.process.temporary import PrivateFolder

log = logging.getLogger(__name__)

# Responses at a time. A rollout with its own cores takes few: groups finish one after another, so that the trainer
# starts early. On shared cores it takes many: generating is over soonest, and then the trainer has all cores. A GPU or
# NPU is made for many.
SPLIT_MAX_NUM_SEQS, SHARED_MAX_NUM_SEQS = "24", "64"
# On shared cores a thread that waits should soon give its core to the other process (GNU OpenMP; default 300,000). But
# it should not sleep between two operations: with 1,000 it did, and waking it took 0.3 ms on a virtual machine.
SHARED_SPINS = "10000"
LOCAL_DRAIN_S = "5"  # shorter than the grace period of the supervisor
TELL_S = 5.0  # longest wait until the end of a service is told to its jobs
TRAINER_GRACE_S = 60.0  # time for the checkpoint that the trainer writes when it is asked to stop
SCRATCH_PREFIX = "onbeat-"
MAX_SOCKET_PATH_BYTES = 103  # limit for a UNIX socket on macOS; Linux has four more
LONGEST_INSIDE = "/onbeat-12345678/rollout-999/71c596d2-5304-430f-a62c-53895bd8e4a1"  # the path of a vLLM socket


@dataclass(frozen=True)
class StackOptions:
    data_dir: Path
    num_rollouts: int = 1
    engine: str = "vllm"
    pool: str = "default"
    rollout_cores: Sequence[int] | None = None
    trainer_cores: Sequence[int] | None = None
    port: int | None = None  # the broker's; default: any free one
    is_view: bool = False  # only Redis, and a broker that changes nothing


@contextmanager
def local_stack(
    options: StackOptions, command: str, report: Callable[[str], None] = log.warning
) -> Iterator[tuple[str, Supervisor]]:
    """Run the stack: yield the URL of the broker, once it is ready, and the supervisor of all services.

    No process is left behind; Ctrl-C kills all services at once. Raise OnbeatError (StackFailed included) with what to
    do about it.
    """
    create_data_dir(options.data_dir)
    with ExitStack() as held:  # the lock and the temporary files are given up when the services have ended
        lock = StackLock(options.data_dir)
        held.callback(lock.release)
        scratch = make_scratch(report)
        held.callback(scratch.remove)
        server = choose_server(options.data_dir / REDIS_FOLDER)
        report(f"using {server}")
        redis, redis_url = redis_service(options.data_dir, server)
        port = options.port or free_port()
        url = f"http://{HOST}:{port}"
        fds = [lock.children_fd, scratch.lock_fd]
        on_end = partial(tell_end_of_service, redis_url, options)
        supervisor = Supervisor(options.data_dir / "logs", report, fds, scratch.path, on_end)
        # A Ctrl-C that comes while this context is being left may close it from outside instead (GeneratorExit).
        held.push(lambda kind, *_: supervisor.stop(is_urgent=kind in (KeyboardInterrupt, GeneratorExit)))
        supervisor.start([redis])
        specs = service_specs(options, redis_url, port)
        asyncio.run(announce_services(redis_url, options.pool, specs))
        supervisor.start(specs)
        lock.write(StackState(os.getpid(), command, url, redis_url, time.time(), this_machine(), gethostname()))
        yield url, supervisor


@contextmanager
def stack_at_usual_port(
    options: StackOptions, command: str, report: Callable[[str], None] = log.warning
) -> Iterator[tuple[str, Supervisor]]:
    """Run the stack with its broker at DEFAULT_PORT if that is free, else at any port, unless the options name one."""
    port = options.port or free_port(preferred=DEFAULT_PORT)
    with ExitStack() as held:
        try:
            stack = held.enter_context(local_stack(replace(options, port=port), command, report))
        except StackFailed:
            if options.port or free_port(preferred=port) == port:
                raise
            report(f"another process was faster at port {port}: starting again at another one")
            stack = held.enter_context(local_stack(replace(options, port=free_port()), command, report))
        yield stack


def make_scratch(report: Callable[[str], None]) -> PrivateFolder:
    """Make the directory of temporary files, in TMPDIR, or in /tmp where paths of sockets would get too long.

    Each service has a folder of its own in it. Raise OnbeatError.
    """
    parent = Path(tempfile.gettempdir())
    if len(os.fsencode(parent)) + len(LONGEST_INSIDE) > MAX_SOCKET_PATH_BYTES:
        report(f"temporary files go to /tmp: TMPDIR={parent} is too long for the paths of sockets inside")
        parent = Path("/tmp")
    try:
        return PrivateFolder(SCRATCH_PREFIX, parent)
    except OSError as error:
        raise OnbeatError(
            f"no temporary folder can be made in {parent}: {error}; free disk space there or set TMPDIR"
        ) from error


def plan_of(options: StackOptions) -> CorePlan:
    """Return the split of this machine's cores, one hardware thread of each. Raises ValueError for a wrong choice."""
    allowed = available_cores()
    cores = options.rollout_cores, options.trainer_cores
    return plan_cores(physical_cores(allowed), options.num_rollouts, *cores, allowed=allowed, quota=cpu_quota())


def worker_environment(data_dir: Path) -> dict[str, str]:
    """Return the variables that trainer and rollouts share."""
    return {
        # Other users of this machine reach the loopback interface, too.
        "ONBEAT_WEIGHTS_API_KEY": os.environ.get("ONBEAT_WEIGHTS_API_KEY") or secrets.token_urlsafe(24),
        # By default compiled kernels are temporary files: they would go with the stack.
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(data_dir / "torchinductor"),
        "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", KEEP_FREED),
    }


def service_specs(options: StackOptions, redis_url: str, port: int) -> list[ServiceSpec]:
    """Return the broker, trainer and rollouts. All they know comes from these environment variables.

    They need Redis, and none needs another one to start. So they start together: most of that is importing.
    """
    plan = plan_of(options)
    trainer_devices, rollout_devices = device_environments(os.environ, options.num_rollouts)
    common = {"ONBEAT_REDIS_URL": redis_url, "ONBEAT_POOL": options.pool, "ONBEAT_LOG_FORMAT": "text"}
    if plan.is_shared:
        common["GOMP_SPINCOUNT"] = os.environ.get("GOMP_SPINCOUNT", SHARED_SPINS)
    max_num_seqs = SHARED_MAX_NUM_SEQS if plan.is_shared or trainer_devices else SPLIT_MAX_NUM_SEQS
    data_dir = {"ONBEAT_DATA_DIR": str(options.data_dir)}
    workers = worker_environment(options.data_dir)
    instance_id = secrets.token_hex(8)
    broker = ServiceSpec(
        "broker",
        service_command("broker"),
        wave=1,
        env={**common, **data_dir, "ONBEAT_HOST": HOST, "ONBEAT_PORT": str(port), "ONBEAT_INSTANCE_ID": instance_id},
        missing=partial(missing_answer, f"http://{HOST}:{port}/readyz", instance_id),
        ready_deadline_s=120.0,  # PyTorch and vLLM are imported beside it
    )
    if options.is_view:
        return [replace(broker, env={**broker.env, "ONBEAT_IS_READ_ONLY": "true"})]
    trainer_env = {
        "ONBEAT_TRAINER_ID": "trainer-0",
        "ONBEAT_CPU_CORES": format_cores(plan.trainer),
        "ONBEAT_WEIGHTS_HOST": HOST,
    }
    trainer = ServiceSpec(
        "trainer",
        service_command("trainer"),
        wave=2,
        env={**common, **data_dir, **workers, **trainer_devices, **trainer_env},
        grace_s=TRAINER_GRACE_S,
        process=trainer_env["ONBEAT_TRAINER_ID"],
        run_variable="ONBEAT_RUN_ID",
    )
    rollouts = [
        ServiceSpec(
            f"rollout-{index}",
            service_command("rollout"),
            wave=2,
            env={
                **common,
                **workers,
                **rollout_devices[index],
                "GRPC_ENABLE_FORK_SUPPORT": "0",  # a forked engine core does not use gRPC
                "ONBEAT_WORKER_ID": f"rollout-{index}",
                "ONBEAT_ENGINE": options.engine,
                "ONBEAT_CPU_CORES": format_cores(cores),
                "ONBEAT_MAX_NUM_SEQS": os.environ.get("ONBEAT_MAX_NUM_SEQS", max_num_seqs),
                "ONBEAT_DRAIN_S": os.environ.get("ONBEAT_DRAIN_S", LOCAL_DRAIN_S),
                "ONBEAT_WEIGHTS_RELAY": os.environ.get("ONBEAT_WEIGHTS_RELAY", str(options.num_rollouts > 1)),
            },
        )
        for index, cores in enumerate(plan.rollouts)
    ]
    return [broker, trainer, *rollouts]


async def announce_services(redis_url: str, pool: str, specs: Sequence[ServiceSpec]) -> None:
    """Announce trainer and rollouts, before the broker answers: it would miss them."""
    from onbeat.streams.connection import connect
    from onbeat.streams.starting import announce_start

    trainers = [spec.env["ONBEAT_TRAINER_ID"] for spec in specs if "ONBEAT_TRAINER_ID" in spec.env]
    rollouts = [spec.env["ONBEAT_WORKER_ID"] for spec in specs if "ONBEAT_WORKER_ID" in spec.env]
    async with connect(redis_url) as redis:
        await announce_start(redis, pool, trainers, rollouts)


def tell_end_of_service(redis_url: str, options: StackOptions, end: ServiceEnd) -> None:
    """Give the jobs that a service served an event of its end. The caller may be in an event loop: hence the thread."""
    from onbeat.streams.connection import connect
    from onbeat.streams.process_ends import ProcessEnd, tell_end

    async def tell() -> None:
        async with connect(redis_url) as redis:
            await tell_end(redis, options.pool, ProcessEnd(end.process, end.run, end.exit_code, end.sentence))

    if options.is_view:
        return  # nothing is written there
    telling = threading.Thread(target=lambda: asyncio.run(tell()), name="onbeat-tell-end", daemon=True)
    telling.start()
    telling.join(TELL_S)


def describe_places(options: StackOptions) -> str:
    """Return, for people, what trainer and rollouts will compute on.

    >>> describe_places(StackOptions(Path(".onbeat"), num_rollouts=2))  # doctest: +SKIP
    'AMD EPYC 9B14 (AVX-512 with bfloat16): trainer on cores 2-3, rollout-0 on core 0, rollout-1 on core 1'
    """
    variable, devices = available_devices(os.environ)
    if devices:
        trainer, rollouts = device_environments(os.environ, options.num_rollouts)
        texts = [f"rollout-{index} on {environment[variable]}" for index, environment in enumerate(rollouts)]
        return f"accelerators {', '.join(devices)}: {', '.join([f'trainer on {trainer[variable]}', *texts])}"
    plan = plan_of(options)
    places = [("trainer", plan.trainer), *((f"rollout-{index}", cores) for index, cores in enumerate(plan.rollouts))]
    texts = [f"{name} on core{'s' if len(cores) > 1 else ''} {format_cores(cores)}" for name, cores in places]
    place = f"{read_processor()}: {', '.join(texts)}{' (shared)' if plan.is_shared else ''}"
    _, gpus = available_devices({**os.environ, "ONBEAT_DEVICE": "cuda"})  # also those that no package here can use
    if gpus and os.environ.get("ONBEAT_DEVICE", "auto") == "auto":
        place += "; an NVIDIA device is here, too, for which `make setup PLATFORM=cuda` is needed"
    return place


def check_engine_name(name: str) -> None:
    """Raise ValueError for an engine that is not installed: rollouts would only find it out after their start."""
    installed = entry_points(group=ENGINES).names
    if installed and name not in installed:
        hint = suggest(close_names(name, installed), installed)
        raise ValueError(f"--engine {name}: no engine of this name is installed; {hint}")


def service_command(name: str) -> list[str]:
    return command_of(f"services.{name}")


def missing_answer(url: str, instance_id: str = "") -> str:
    """Return why the broker with this id gives no good answer at the URL yet; '' when it gives one."""
    try:
        response = httpx.get(url, timeout=2.0, trust_env=False)
    except httpx.TransportError as error:
        return str(error) or type(error).__name__
    if not response.is_success:
        return f"{url} answers {response.status_code}"
    return "" if instance_id in response.text else f"another process answers at {url}"
