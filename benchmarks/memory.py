"""The memory that the quick start takes: all processes of the local stack, a page that several share counted once.

It is the sum of the processes' proportional set sizes, sampled while a job runs on `onbeat up`, and after its end, when
the services wait for the next job. Trainer and engine keep freed memory where there is plenty. So another process holds
the machine's memory but for LEFT_BYTES; the peak with all of the memory is measured, too.

    python benchmarks/memory.py              float32, and bfloat16 where the processor multiplies it; saved
    python benchmarks/memory.py bfloat16     one of them, only shown
"""

import json
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import ROOT, command_line, note_redis, own_dtype, save, start, temporary_folder

from onbeat.local.daemon import start_in_background, stop_in_background
from onbeat.local.stack import StackOptions
from onbeat.machine.memory import read_memory

NUM_ITERATIONS, WARMUP = 6, 2
SAMPLE_S = 0.25
LEFT_BYTES = 8 * 10**9  # README asks for this much
REST_S = 6.0  # after the job, until the memory that is still held is measured
SERVICES = ("broker", "trainer", "rollout")


def children_of(root: int) -> dict[int, int]:
    """Return the parent of each process that descends from `root`, ancestors first; `root` has itself."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has just ended
            continue
    descendants, todo = {root: root}, [root]
    while todo:
        parent = todo.pop()
        for child in [process for process, process_parent in parents.items() if process_parent == parent]:
            descendants[child] = parent
            todo.append(child)
    return descendants


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def service_of(command: str, parents_service: str) -> str:
    """Return the name of the process with this command line, a child of that service."""
    if "redis-server" in command or "valkey-server" in command:
        return "redis"
    for name in SERVICES:
        if f"services.{name}" in command:
            return name
    if "rewards.child" in command:
        return "reward"
    if "environments.child" in command:
        return "environment"
    return "engine core" if parents_service == "rollout" else parents_service  # it says so only after its imports


def measure(root: int) -> dict[str, int]:
    """Return MB by service, the largest first, of `root` and all that descends from it."""
    memory: Counter[str] = Counter()
    services: dict[int, str] = {}
    for pid, parent in children_of(root).items():
        services[pid] = service_of(command_of(pid), services.get(parent, "command"))
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        for line in rollup.splitlines():
            kind, _, size = line.partition(":")
            if kind == "Pss":
                memory[services[pid]] += int(size.split()[0]) * 1024
    return {service: round(size / 1e6) for service, size in memory.most_common()}


class Sampler(threading.Thread):
    """A thread that measures `root` and its descendants every SAMPLE_S seconds until `stop`."""

    def __init__(self, root: int) -> None:
        super().__init__()
        self._root, self._is_over = root, threading.Event()
        self.samples: list[dict[str, int]] = []

    def run(self) -> None:
        while not self._is_over.wait(SAMPLE_S):
            self.samples.append(measure(self._root))

    def stop(self) -> None:
        self._is_over.set()
        self.join()


def peak_of(sizes: list[dict[str, int]], *services: str) -> int:
    """Return the most that these services take together at one moment."""
    return max(sum(sample.get(name, 0) for name in services) for sample in sizes)


def run(*overrides: str) -> dict[str, Any]:
    """Return what a job of the quick start takes with these overrides, in MB."""
    onbeat = [sys.executable, "-m", "onbeat.cli"]
    overrides = (f"schedule.num_iterations={NUM_ITERATIONS}", *overrides)
    with temporary_folder() as folder:
        data_dir = ["--data-dir", str(folder)]
        note_redis()
        root = start_in_background(StackOptions(folder)).pid
        sampler = Sampler(root)
        sampler.start()
        try:
            settings = [part for override in overrides for part in ("--set", override)]
            create = [*onbeat, "jobs", "create", "benchmarks/jobs/quickstart-0.1.toml", *settings, *data_dir]
            job = subprocess.run(create, check=True, cwd=ROOT, capture_output=True, text=True).stdout.split()[0]
            watch = [*onbeat, "jobs", "watch", job, *data_dir]
            subprocess.run(watch, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
            report = subprocess.run(
                [*onbeat, "jobs", "report", job, *data_dir], check=True, cwd=ROOT, capture_output=True, text=True
            )
            time.sleep(REST_S)
        finally:
            sampler.stop()
            after = measure(root)
            stop_in_background(folder)
    peak = max(sampler.samples, key=lambda sample: sum(sample.values()))
    services = sorted({service for sizes in sampler.samples for service in sizes})
    iterations = json.loads(report.stdout)["iterations"][WARMUP:]
    return {
        "peak": sum(peak.values()),
        "at_peak": peak,
        "peak_by_service": {name: peak_of(sampler.samples, name) for name in services},
        "peak_of_rollout_with_engine": peak_of(sampler.samples, "rollout", "engine core"),
        "after_the_job": after,
        "wall_s": round(statistics.median(iteration["wall_s"] for iteration in iterations), 2),
        "train_s": round(statistics.median(iteration["train_s"] for iteration in iterations), 2),
        "rewards": [iteration["reward_mean"] for iteration in json.loads(report.stdout)["iterations"]],
    }


@contextmanager
def scarce_memory(left_bytes: int) -> Iterator[None]:
    """Hold all memory that is available here but for so much."""
    size = max(0, read_memory().available_bytes - left_bytes)
    script = f"held = bytearray(b'x') * {size}; print(len(held), flush=True); input()"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        yield
        holder.communicate("\n")


def measure_both(dtype: str) -> dict[str, Any]:
    with scarce_memory(LEFT_BYTES):
        scarce = run(f"model.dtype={dtype}")
    plenty = run(f"model.dtype={dtype}")
    return scarce | {"with_plenty": {name: plenty[name] for name in ("peak", "at_peak", "wall_s", "train_s")}}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("dtype", nargs="?", choices=["float32", "bfloat16"], help="measure it alone, and only show it")
    if dtype := start(parser).dtype:
        print(json.dumps({dtype: measure_both(dtype)}, indent=2))
        return
    native = own_dtype()
    dtypes = sorted({"float32", native})  # a pass of the other would take minutes
    save("memory", {"unit": "MB"} | {dtype_name: measure_both(dtype_name) for dtype_name in dtypes}, native)


if __name__ == "__main__":
    main()
