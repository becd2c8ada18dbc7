"""A real local stack (Redis, broker, trainer, rollouts as processes) on a tiny model, to be watched or hurt."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
from redis import Redis

from onbeat.client import BrokerUnreachable, Client
from onbeat.contracts.errors import ApiError
from onbeat.contracts.records import JobRecord
from onbeat.local.stack import StackOptions, local_stack, service_specs
from onbeat.local.supervisor import ServiceSpec, Supervisor
from onbeat.machine.cores import available_cores
from onbeat.process.stacks import running_stack
from services.trainer.replay import replay as replay_iteration
from services.trainer.settings import Settings
from tests.tiny_models import write_tied_model
from tests.waiting import wait_until

DEADLINE_S = 180.0


class RunningStack:
    def __init__(self, url: str, supervisor: Supervisor, data_dir: Path) -> None:
        self.data_dir, self.url, self._supervisor = data_dir, url, supervisor
        self.services = supervisor.services
        state = running_stack(data_dir)
        assert state is not None
        self.redis_url = state.redis_url
        self.redis: Any = Redis.from_url(state.redis_url)
        self.client = Client(url)

    def process(self, name: str) -> psutil.Process | None:
        """Return the process of a service, such as `rollout-0`, not its guard; None while there is none."""
        (service,) = [service for service in self.services if service.spec.name == name]
        try:
            children = psutil.Process(service.guard.pid).children()
        except psutil.NoSuchProcess:
            return None
        return children[0] if children and children[0].status() != psutil.STATUS_ZOMBIE else None

    def signal(self, name: str, number: int = signal.SIGKILL) -> bool:
        """Signal the service; False when there is none just now."""
        process = self.process(name)
        try:
            if process is not None:
                process.send_signal(number)
        except psutil.NoSuchProcess:
            return False
        return process is not None

    def log(self, name: str) -> str:
        return (self.data_dir / "logs" / f"{name}.log").read_text(errors="replace")

    def launch(self, spec: ServiceSpec) -> None:
        """Start one more service, which ends with the stack."""
        self._supervisor._launch(spec)

    def wait(self, job_id: str) -> JobRecord:
        """Wait until the job is final."""
        wait_until(lambda: self.job(job_id).state.is_final, f"job {job_id} ends")
        return self.job(job_id)

    def job(self, job_id: str) -> JobRecord:
        """Read the job from the broker that answers first: another one may just be restarting."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                return self.client.jobs.get(job_id)
            except (BrokerUnreachable, ApiError):
                assert time.monotonic() < deadline, f"no broker answered for {DEADLINE_S:.0f} s"
                time.sleep(0.1)

    def events(self, job_id: str, kind: str) -> list[Any]:
        return [event for event in self.client.jobs.events(job_id) if event.kind == kind]


@contextmanager
def running(
    tmp_path: Path,
    num_rollouts: int = 1,
    engine: str = "transformers",
    lease_s: float = 5.0,
    change: Callable[[list[ServiceSpec]], list[ServiceSpec]] = lambda specs: specs,
    **options: Any,
) -> Iterator[RunningStack]:
    """Run a stack. `change` may start other services than broker, trainer and rollouts, or start them differently."""
    # Slow on purpose: few responses at a time, the last core trains, so that there is a middle of an iteration to hurt.
    cores = available_cores()
    split = {"rollout_cores": cores[:1], "trainer_cores": cores[-1:]}
    inherited = {"ONBEAT_LEASE_S": str(lease_s), "ONBEAT_MAX_NUM_SEQS": "24"}  # a short lease: take-over in seconds
    stack_options = StackOptions(data_dir=tmp_path / "data", num_rollouts=num_rollouts, engine=engine, **split)
    done = threading.Event()

    def supervise(supervisor: Supervisor) -> None:
        while not done.wait(0.1):
            supervisor.check()
            for service in supervisor.services:
                service.num_failures = 0  # however often a test kills it, it starts again soon

    with (
        patch.dict(os.environ, inherited),
        patch("onbeat.local.stack.service_specs", lambda *args: change(service_specs(*args))),
        local_stack(replace(stack_options, **options), "up") as (url, supervisor),
    ):
        thread = threading.Thread(target=supervise, args=[supervisor], daemon=True)
        thread.start()
        try:
            yield RunningStack(url, supervisor, tmp_path / "data")
        finally:
            done.set()
            thread.join(timeout=10)


def tiny_job(tmp_path: Path, **sections: Any) -> dict[str, Any]:
    """Build a job for a tiny random model whose rewards differ by chance: a digit or an early letter counts."""
    model_dir = tmp_path / "model"
    if not model_dir.exists():
        write_tied_model(model_dir)
    data = tmp_path / "data" / "prompts.jsonl"
    data.parent.mkdir(exist_ok=True)
    data.write_text("\n".join(f'{{"prompt": "say {index}", "answer": "x"}}' for index in range(20)))
    job: dict[str, Any] = {
        "name": "tiny",
        "model": {"path": str(model_dir), "dtype": "float32"},
        "data": {"type": "jsonl", "path": str(data)},
        "reward": {"name": "regex", "options": {"pattern": "[0-4]"}},
        "rollout": {"num_prompts_per_iteration": 8, "num_samples_per_prompt": 4, "max_response_tokens": 24},
        "optimizer": {"learning_rate": 1e-3},
        "schedule": {"num_iterations": 4},
    }
    for name, values in sections.items():
        job[name] = job.get(name, {}) | values if isinstance(values, dict) else values
    if "environment" in job:
        del job["reward"]  # episodes bring their own
    return job


def replay(stack: RunningStack, job_id: str, iteration: int) -> dict[str, Any]:
    """Return the report of `onbeat replay`, computed in this process on the core that the trainer had."""
    own_cores, core = os.sched_getaffinity(0), str(available_cores()[-1])
    settings = Settings(redis_url=stack.redis_url, data_dir=stack.data_dir, device="cpu", cpu_cores=core)
    try:
        return replay_iteration(settings, job_id, iteration)
    finally:
        os.sched_setaffinity(0, own_cores)
