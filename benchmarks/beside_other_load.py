"""The quick start beside other work: how much longer an iteration takes with one busy loop on each core.

One job runs alone, then the same beside busy processes of normal priority. Where both stages share the cores fairly
with them, an iteration takes twice as long. A seed gives the same prompts, and nearly the same responses, so iteration
i of one job is compared with iteration i of the other; the result is the median of the ratios.
"""

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from harness import command_line, medians, own_dtype, run_job, save, start

NUM_ITERATIONS, WARMUP, GOAL = 8, 2, 2.5
FIELDS = ("wall_s", "train_s", "generate_s", "weight_sync_s")


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def iterations(num_loops: int) -> list[dict[str, float]]:
    with busy_loops(num_loops):
        report = run_job("benchmarks/jobs/quickstart-0.1.toml", f"schedule.num_iterations={NUM_ITERATIONS}")
    return [{field: iteration[field] for field in FIELDS} for iteration in report["iterations"][WARMUP:]]


def main() -> None:
    num_cores = len(os.sched_getaffinity(0))
    alone, beside = iterations(0), iterations(num_cores)
    ratio = statistics.median(b["wall_s"] / a["wall_s"] for a, b in zip(alone, beside, strict=True))
    result = {
        "num_busy_loops": num_cores,
        "ratio": ratio,
        "goal": f"at most {GOAL}",
        "is_met": ratio <= GOAL,
        "median_alone": medians(alone),
        "median_beside": medians(beside),
        "alone": alone,
        "beside": beside,
    }
    save("beside_other_load", result, own_dtype())


if __name__ == "__main__":
    start(command_line(__doc__))
    main()
