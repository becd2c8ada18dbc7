"""An engine on local model folders as a child process, behind OpenAI's interface on this machine's loopback interface.

It ends with the process that started it, also when that is killed (see `onbeat.process.guard`).
"""

import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from onbeat.contracts.endpoint import EndpointOrder, ServedModel
from onbeat.local.checkpoints import Checkpoint, model_before
from onbeat.local.redis_server import HOST, free_port
from onbeat.local.stack import make_scratch, missing_answer
from onbeat.local.supervisor import ServiceSpec, StackFailed, Supervisor, describe_exit
from onbeat.machine.cores import available_cores, format_cores, physical_cores
from onbeat.machine.malloc import KEEP_FREED
from onbeat.process.children import command_of

ENDPOINT_COMMAND = command_of("services.rollout.chat.endpoint")
START_DEADLINE_S = 900.0  # default of ONBEAT_ENGINE_START_S
MARGIN_S = 60.0  # time for imports and the tokenizer; the process itself ends a start that takes too long
POLL_S = 0.5
BEFORE = "before"  # name of the model that the job began with


@dataclass(frozen=True)
class EngineOptions:
    engine: str = "vllm"
    has_before: bool = False  # serve the model that the job began with, too
    port: int | None = None  # default: any free one


@dataclass(frozen=True)
class ChatEngine:
    """A running engine: the address of its interface and the names of its models."""

    url: str
    models: Sequence[str]
    check: Callable[[], None]  # raises StackFailed, with the end of the log, once the engine has ended


@contextmanager
def chat_engine(checkpoint: Checkpoint, options: EngineOptions, data_dir: Path) -> Iterator[ChatEngine]:
    """Serve the checkpoint until this context ends; nothing is left behind. Raises StackFailed, with the end of the
    engine's log, when it does not start in time, and OnbeatError when the model before is not known."""
    models = [
        ServedModel(name=checkpoint.name, source=str(checkpoint.folder), policy_version=checkpoint.policy_version)
    ]
    if options.has_before:
        models.append(ServedModel(name=BEFORE, source=model_before(checkpoint)))
    port, instance_id = options.port or free_port(), secrets.token_hex(8)
    order = EndpointOrder(
        port=port,
        instance_id=instance_id,
        models=models,
        job=checkpoint.job.model_dump(mode="json") if checkpoint.job is not None else None,
    )
    url = f"http://{HOST}:{port}"
    with ExitStack() as cleanup:
        scratch = make_scratch(lambda _: None)
        cleanup.callback(scratch.remove)
        order_file = scratch.path / "order.json"
        order_file.write_text(order.model_dump_json(), "utf-8")
        supervisor = Supervisor(log_folder(data_dir, scratch.path), lambda _: None, [scratch.lock_fd], scratch.path)
        cleanup.callback(supervisor.stop, is_urgent=True)
        engine_start_s = float(os.environ.get("ONBEAT_ENGINE_START_S") or START_DEADLINE_S)
        spec = ServiceSpec(
            "chat",
            [*ENDPOINT_COMMAND, str(order_file)],
            wave=0,
            env=environment(options, data_dir),
            missing=partial(missing_answer, f"{url}/readyz", instance_id),
            ready_deadline_s=engine_start_s * len(models) + MARGIN_S,
        )
        supervisor.start([spec])
        (service,) = supervisor.services

        def check() -> None:
            if (exit_code := service.guard.poll()) is not None:
                raise StackFailed(f"the engine {describe_exit(exit_code)}; {service.tail()}")

        yield ChatEngine(url, [model.name for model in models], check)


def log_folder(data_dir: Path, scratch: Path) -> Path:
    """Return the folder of logs: that of the data folder where there is one that can be written."""
    logs = data_dir / "logs"
    return logs if logs.is_dir() and os.access(logs, os.W_OK) else scratch


def environment(options: EngineOptions, data_dir: Path) -> dict[str, str]:
    """Return the variables of the engine's process, as a rollout that has all cores gets them."""
    cores = format_cores(physical_cores(available_cores()))
    defaults = {"ONBEAT_CPU_CORES": cores, "GLIBC_TUNABLES": KEEP_FREED}
    if data_dir.is_dir():
        defaults["TORCHINDUCTOR_CACHE_DIR"] = str(data_dir / "torchinductor")
    given = {name: os.environ.get(name) or value for name, value in defaults.items()}
    return given | {"ONBEAT_ENGINE": options.engine, "ONBEAT_LOG_FORMAT": "text", "GRPC_ENABLE_FORK_SUPPORT": "0"}


def wait_for_end(engine: ChatEngine) -> None:
    """Wait until the engine ends by itself; then raise StackFailed."""
    while True:
        engine.check()
        time.sleep(POLL_S)
