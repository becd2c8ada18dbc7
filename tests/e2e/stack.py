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

import psutil

from onbeat.client import Client
from onbeat.local.cores import available_cores
from onbeat.local.stack import LocalStack, StackOptions
from onbeat.local.state import running_stack
from onbeat.types import JobRecord
from tests.integration.tiny_models import write_tied_model

DEADLINE_S = 180.0


class RunningStack:
    def __init__(self, stack: LocalStack, data_dir: Path) -> None:
        self.data_dir, self.url = data_dir, stack.url
        state = running_stack(data_dir)
        assert state is not None
        self.redis_url = state.redis_url
        self.client = Client(stack.url)

    def kill(self, service: str, number: int = signal.SIGKILL, worker_id: str = "") -> int:
        """Signal the service process of this stack (never its guard); returns its pid."""
        (process,) = self.processes(service, worker_id)
        os.kill(process.pid, number)
        return process.pid

    def processes(self, service: str, worker_id: str = "") -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                environment = process.environ()
                is_service = process.cmdline()[-2:] == ["-m", f"services.{service}"]
                is_guard = "onbeat.local.guard" in " ".join(process.cmdline())
            except (psutil.Error, OSError):
                continue
            is_ours = environment.get("ONBEAT_REDIS_URL") == self.redis_url
            if is_ours and is_service and not is_guard and worker_id in environment.get("ONBEAT_WORKER_ID", ""):
                found.append(process)
        return found

    def wait(self, job_id: str) -> JobRecord:
        """Until the job is final."""
        wait_until(lambda: self.client.jobs.get(job_id).state.is_final, f"job {job_id} ends")
        return self.client.jobs.get(job_id)

    def wait_for_middle_of_iteration(self, job_id: str, iteration: int, num_accepted: int = 1) -> None:
        """Until some, but not all groups of the iteration are accepted. Fails when it is over too soon."""

        def is_there() -> bool:
            records = self.client.jobs.iterations(job_id, after=iteration - 1)
            if not records or records[0].num_accepted < num_accepted:
                return False
            assert records[0].num_accepted < records[0].num_groups, "the iteration was over before it could be hurt"
            return True

        wait_until(is_there, f"iteration {iteration} is under way", poll_s=0.01)

    def events(self, job_id: str, kind: str) -> list[Any]:
        return [event for event in self.client.jobs.events(job_id) if event.kind == kind]


@contextmanager
def running(
    tmp_path: Path, num_rollouts: int = 1, engine: str = "transformers", lease_s: float = 5.0, **options: Any
) -> Iterator[RunningStack]:
    os.environ["ONBEAT_LEASE_S"] = str(lease_s)  # services inherit it: take-over in seconds
    # Slow on purpose: few responses at a time, the last core trains, so that there is a middle of an iteration to hurt.
    cores = available_cores()
    split = {"rollout_cores": cores[:1], "trainer_cores": cores[-1:]}
    os.environ["ONBEAT_MAX_NUM_SEQS"] = "24"
    stack_options = StackOptions(data_dir=tmp_path / "data", num_rollouts=num_rollouts, engine=engine, **split)
    stack = LocalStack(replace(stack_options, **options), "up")
    done = threading.Event()

    def supervise() -> None:
        while not done.wait(0.2):
            stack.check()

    with stack:
        thread = threading.Thread(target=supervise, daemon=True)
        thread.start()
        try:
            yield RunningStack(stack, tmp_path / "data")
        finally:
            done.set()
            thread.join(timeout=10)


def tiny_job(tmp_path: Path, **sections: Any) -> dict[str, Any]:
    """A job on a tiny random model whose rewards differ by chance: any digit or early letter in the text counts."""
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
        job[name] = job.get(name, {}) | values
    return job


def wait_until(is_true: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S, poll_s: float = 0.1) -> None:
    deadline = time.monotonic() + deadline_s
    while not is_true():
        assert time.monotonic() < deadline, f"waited {deadline_s:.0f} s in vain until {what}"
        time.sleep(poll_s)
