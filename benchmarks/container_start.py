"""The sizes of the CPU images, and how long the compose stack takes to start, to serve a first job, to take in another
rollout in mid-run and to replace its broker. It runs real vLLM and the quick start's job on volumes of its own.

Goal: a rollout that joins late generates within the start of its engine + 5 s. A late join is measured from the start
of its container; all that is not the start of the engine is `late_join_overhead_s`. The start of the engine is what
vLLM itself needs from nothing: to be imported, and to be built. The rollout logs both. The import begins while the
rollout does other things; the core's time for these does not count as the import. The script needs `make engine
images`; it starts a compose project of its own and removes it with its volumes.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from importlib.metadata import version
from typing import Any

import httpx
from harness import REDIS_SERVERS, ROOT, command_line, medians, save, start, termination_as_exit

from onbeat.client import Client
from onbeat.config import read_job_file
from onbeat.contracts.records import Event, WorkerRecord
from tests.containers.leftovers import new_project, remove_dead

REPEATS = 3
POLL_S = 0.1
GENERATING_S, LEAVING_S, UP_S, DOWN_S = 240.0, 90.0, 300.0, 180.0  # deadlines
SERVICES = ("broker", "trainer", "rollout")
IMPORTED = re.compile(r"imported vLLM in ([\d.]+) s, other threads of this process used a core for ([\d.]+) s of them")
BUILT = re.compile(r"built vLLM in ([\d.]+) s")
TAG = f"{version('onbeat')}-cpu"
REDIS_IMAGES = ("redis:7.2-bookworm", "onbeat-test-redis:bookworm")  # the second is made by tests/containers
JOB = {
    "schedule.num_iterations": 10_000,  # it ends with the stack
    # There are more prompts than one rollout takes at once, and the next iteration's are published before the step: a
    # rollout that joins always finds a prompt, so that no wait for work is taken for a slow start.
    "schedule.mode": "bounded",
    "schedule.max_staleness": 1,
    "rollout.num_prompts_per_iteration": 32,
    "rollout.num_samples_per_prompt": 4,
    "rollout.max_response_tokens": 24,
}


# ---- the engine ----------------------------------------------------------------------------------------------------


def docker(*arguments: str, env: dict[str, str] | None = None, timeout_s: float = 120.0) -> str:
    """Run docker and return its output. Raises RuntimeError with its errors."""
    command = ["docker", *arguments]
    given = os.environ | (env or {})
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout.strip()


def has_image(name: str) -> bool:
    return (
        shutil.which("docker") is not None
        and subprocess.run(["docker", "image", "inspect", name], capture_output=True, check=False).returncode == 0
    )


def redis_image() -> str:
    """Return the image that the environment names, or one that is here. Raises RuntimeError where none is."""
    candidates = [os.environ["ONBEAT_REDIS_IMAGE"]] if "ONBEAT_REDIS_IMAGE" in os.environ else REDIS_IMAGES
    for name in candidates:
        if has_image(name):
            REDIS_SERVERS.add(name)
            return name
    raise RuntimeError(f"none of {', '.join(candidates)} is here; pull one, or name one with ONBEAT_REDIS_IMAGE")


def image_of(service: str) -> str:
    return f"onbeat/{service}:{TAG}"


def image_sizes() -> dict[str, int]:
    return {
        f"{name}_bytes": int(docker("image", "inspect", "--format", "{{.Size}}", image_of(name))) for name in SERVICES
    }


class Compose:
    def __init__(self) -> None:
        cores = sorted(os.sched_getaffinity(0))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.project = new_project("onbeat-bench")
        self.url = f"http://127.0.0.1:{port}"
        self.env = {
            "COMPOSE_PROFILES": "cpu",
            "ONBEAT_TAG": TAG,
            "ONBEAT_REDIS_IMAGE": redis_image(),
            "ONBEAT_PUBLISHED_PORT": str(port),
            "ONBEAT_ROLLOUT_CORES": str(cores[0]),
            "ONBEAT_TRAINER_CORES": str(cores[-1]),
        }

    def __call__(self, *arguments: str, timeout_s: float = 120.0) -> str:
        return docker("compose", "--project-name", self.project, *arguments, env=self.env, timeout_s=timeout_s)

    def scale(self, num_rollouts: int) -> None:
        self("up", "--detach", "--no-build", "--no-recreate", "--scale", f"rollout={num_rollouts}", timeout_s=UP_S)

    def rollouts(self) -> set[str]:
        """Return the ids of the rollouts' containers."""
        return set(self("ps", "--quiet", "rollout").split())


@contextmanager
def stack() -> Iterator[tuple[Compose, float]]:
    """Yield the stack with one rollout, and the seconds until all of it was healthy. Nothing is left afterwards."""
    compose = Compose()
    remove_dead()
    with termination_as_exit():
        try:
            started = time.monotonic()
            compose("up", "--detach", "--wait", "--no-build", "--wait-timeout", "240", timeout_s=UP_S)
            yield compose, time.monotonic() - started
        finally:
            compose("down", "--volumes", "--timeout", "10", timeout_s=DOWN_S)


# ---- one rollout comes to serve a job ------------------------------------------------------------------------------


def find_worker(client: Client, container: str) -> WorkerRecord | None:
    """Return the container's rollout, or None. Its id begins with the name of its host: the container's short id."""
    return next((w for w in client.workers() if w.id.startswith(f"rollout-{container[:12]}-")), None)


def wait_generating(client: Client, job_id: str, container: str) -> tuple[str, float]:
    """Return (worker's id, Unix time at which it was first seen generating)."""
    deadline = time.monotonic() + GENERATING_S
    while time.monotonic() < deadline:
        worker = find_worker(client, container)
        if worker is not None and worker.job_id == job_id and worker.state == "generating":
            return worker.id, time.time()
        time.sleep(POLL_S)
    raise RuntimeError(
        f"no prompt for {container[:12]} within {GENERATING_S:.0f} s; the job: {client.jobs.get(job_id)}"
    )


def events_since(client: Client, job_id: str, after: str) -> list[Event]:
    """Return the events of all pages."""
    events: list[Event] = []
    while page := client.jobs.events(job_id, after=events[-1].id if events else after):
        events += page
    return events


def engine_times(container: str) -> tuple[float, float]:
    """Return the seconds that vLLM took to be imported, less the rollout's other work meanwhile, and to be built."""
    command = ["docker", "logs", container]
    logs = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=True)
    imported, built = IMPORTED.search(logs.stdout), BUILT.search(logs.stdout)
    if imported is None or built is None:
        raise RuntimeError(f"{container[:12]} does not say how long vLLM took to start:\n{logs.stdout[-4000:]}")
    return float(imported[1]) - float(imported[2]), float(built[1])


def measure_start(client: Client, job_id: str, container: str, started_at: float, after: str = "0") -> dict[str, float]:
    """Return the seconds from `started_at` (Unix time) on. The rollout waits for its engine when it has the model: that
    wait contains only the part of vLLM's import that was not over by then.
    """
    worker_id, generating_at = wait_generating(client, job_id, container)
    events = [e for e in events_since(client, job_id, after) if e.data.get("worker_id") == worker_id]
    joined = next(event for event in events if event.kind == "worker.joined")
    serving = next(event for event in events if event.kind == "worker.updated")
    import_s, build_s = engine_times(container)
    return {
        "joined_s": joined.time - started_at,
        "import_s": import_s,
        "build_s": build_s,
        "engine_start_s": import_s + build_s,
        "engine_wait_s": float(serving.data["load_s"]),  # the first version, with which the engine starts
        "serving_s": serving.time - started_at,
        "generating_s": generating_at - started_at,
    }


def measure_first_job(compose: Compose, client: Client) -> tuple[str, dict[str, float]]:
    """Measure from the creation of the job, on volumes that hold no model yet."""
    (container,) = compose.rollouts()
    overrides = [f"{key}={value}" for key, value in JOB.items()]
    created_at = time.time()
    job = client.jobs.create(read_job_file(ROOT / "benchmarks" / "jobs" / "quickstart-0.1.toml", overrides))
    return job.id, measure_start(client, job.id, container, created_at)


def measure_late_join(compose: Compose, client: Client, job_id: str) -> dict[str, float]:
    """Measure from the start of the second rollout's container; afterwards there is one rollout again."""
    before, after = compose.rollouts(), events_since(client, job_id, "0")[-1].id
    compose.scale(2)
    (container,) = compose.rollouts() - before
    started = docker("inspect", "--format", "{{.State.StartedAt}}", container)
    measured = measure_start(client, job_id, container, datetime.fromisoformat(started).timestamp(), after)
    measured["late_join_overhead_s"] = measured["generating_s"] - measured["engine_start_s"]
    compose.scale(1)
    (left,) = (before | {container}) - compose.rollouts()
    deadline = time.monotonic() + LEAVING_S
    while find_worker(client, left) is not None:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{left[:12]} did not leave within {LEAVING_S:.0f} s")
        time.sleep(POLL_S)
    print(f"a late join: {rounded(measured)}", file=sys.stderr)
    return measured


# ---- the broker's container is replaced ----------------------------------------------------------------------------


def is_ready(compose: Compose) -> bool:
    try:
        return httpx.get(f"{compose.url}/readyz", timeout=1, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def measure_broker(compose: Compose) -> dict[str, float]:
    """Return the seconds from the command to the new broker's readiness, and without an answer in between."""
    before = compose("ps", "--quiet", "broker")
    command = ["docker", "compose", "--project-name", compose.project, "up", "--detach", "--no-build"]
    command += ["--no-deps", "--force-recreate", "broker"]
    started, silent_since, ready_at = time.monotonic(), 0.0, 0.0
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | compose.env, stderr=subprocess.DEVNULL) as replacing:
        while not ready_at and time.monotonic() - started < UP_S:
            ready = is_ready(compose)
            if not ready:
                silent_since = silent_since or time.monotonic()
            elif silent_since:
                ready_at = time.monotonic()
            time.sleep(POLL_S / 4)
        if not ready_at:
            replacing.kill()
    if not ready_at or replacing.returncode != 0 or compose("ps", "--quiet", "broker") == before:
        raise RuntimeError("the broker was not replaced")
    return {"replaced_s": ready_at - started, "unanswered_s": ready_at - silent_since}


# ---- all of it -----------------------------------------------------------------------------------------------------


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return round(value, 2) if isinstance(value, float) else value


def measure() -> dict[str, Any]:
    images = image_sizes()
    with stack() as (compose, healthy_s):
        admin_key = compose("run", "--rm", "init", "show", "admin-key")
        with Client(compose.url, api_key=admin_key) as client:
            job_id, first_job = measure_first_job(compose, client)
            print(f"healthy after {healthy_s:.1f} s; the first job: {rounded(first_job)}", file=sys.stderr)
            late = [measure_late_join(compose, client, job_id) for _ in range(REPEATS)]
            broker = measure_broker(compose)
            num_iterations = client.jobs.get(job_id).next_iteration
        cores = {name: compose.env[f"ONBEAT_{name.upper()}_CORES"] for name in ("trainer", "rollout")}
    return {
        "goal": "late_join_overhead_s <= 5",
        "cores": cores,
        "job": JOB,
        "iterations_meanwhile": num_iterations,
        "images": images,
        "healthy_s": healthy_s,
        "first_job": first_job,
        "late_join": {"median": medians(late), "repeats": late},
        "broker": broker,
    }


def main() -> None:
    missing = [image_of(service) for service in SERVICES if not has_image(image_of(service))]
    if shutil.which("docker") is None or missing:
        sys.exit(f"container_start: run `make engine images` first; missing: {', '.join(missing) or 'docker'}")
    save("container_start", rounded(measure()))


if __name__ == "__main__":
    start(command_line(__doc__))
    main()
