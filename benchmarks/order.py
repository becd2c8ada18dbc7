"""Rows of mixed difficulty, three epochs, in two orders: `data.order = "shuffled"` and `"difficulty"`.

A group is uniform if all of its responses are solved, or none: it teaches nothing. The target is a mean reward on the
held-out prompts; the time to it is counted in iterations, which cost the same in both orders, and which no load of the
machine changes. The opening takes longer where prompts are chosen: `opening_s` is the median time from the commit of an
iteration to the opening of the next.
"""

import itertools
import json
import random
import statistics
from pathlib import Path
from typing import Any

from harness import ROOT, command_line, own_dtype, run_job, save, seconds, start, temporary_folder

from onbeat.config.data import DifficultyConfig
from onbeat.streams.outcomes import Outcome
from services.broker.datasets.difficulty import Knowledge, choose_rows

JOB = ROOT / "benchmarks" / "jobs" / "order.toml"
ORDERS = ("shuffled", "difficulty")
KINDS = {  # operator, and the range of both numbers
    "to_12": ("+", 1, 12),
    "to_29": ("+", 10, 29),
    "two_digits": ("+", 30, 99),
    "three_digits": ("+", 100, 999),
    "products": ("*", 13, 99),
}
NUM_ROWS, NUM_HELD_OUT = 400, 80
TARGET = 0.5  # mean reward on the held-out prompts
GOALS = {"uniform_ratio": 0.5, "speed_up": 1.25}  # the first at most, the second at least

Runs = dict[str, list[dict[str, Any]]]  # order of the prompts -> figures of its runs, by seed


def make_rows() -> list[str]:
    """Return the lines of both files, the held-out ones last: no prompt comes twice."""
    rng, prompts = random.Random(0), dict[str, str]()
    kinds = list(KINDS.values())
    while len(prompts) < NUM_ROWS + NUM_HELD_OUT:
        operator, low, high = kinds[len(prompts) % len(kinds)]
        a, b = rng.randint(low, high), rng.randint(low, high)
        prompts.setdefault(f"Calculate {a} {operator} {b}.", str(a + b if operator == "+" else a * b))
    return [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in prompts.items()]


def write_job(folder: Path) -> Path:
    rows = make_rows()
    (folder / "rows.jsonl").write_text("\n".join(rows[:NUM_ROWS]) + "\n", encoding="utf-8")
    (folder / "held-out.jsonl").write_text("\n".join(rows[NUM_ROWS:]) + "\n", encoding="utf-8")
    job = folder / "order.toml"
    job.write_text(JOB.read_text(encoding="utf-8"), encoding="utf-8")
    return job


def figures_of(report: dict[str, Any]) -> dict[str, Any]:
    """Return what counts of a run."""
    iterations = report["iterations"]
    metrics = [iteration["metrics"] for iteration in iterations]
    uniform = [metric["rollout/solved_all_frac"] + metric["rollout/solved_none_frac"] for metric in metrics]
    held_out = [(record["evaluation"], record["reward_mean"]) for record in report["evaluations"]]
    opening = [after["opened_at"] - before["committed_at"] for before, after in itertools.pairwise(iterations)]
    return {
        "uniform_frac": statistics.fmean(uniform),
        "uniform_frac_by_third": [round(statistics.fmean(third), 3) for third in thirds(uniform)],
        "held_out": [[number, round(reward, 4)] for number, reward in held_out],
        "target_after": next((number for number, reward in held_out if reward >= TARGET), None),
        "opening_s": statistics.median(opening),
        "wall_s": statistics.median(iteration["wall_s"] for iteration in iterations),
    }


def thirds(values: list[float]) -> list[list[float]]:
    size = len(values) // 3
    return [values[:size], values[size : 2 * size], values[2 * size :]]


def choosing_s(num_rows: int, share_seen: float = 0.25, num_tries: int = 5) -> float:
    """Return the median seconds of a choice among so many rows, of which a share was seen."""
    knowledge = Knowledge(DifficultyConfig())
    knowledge.add_outcomes(0, [Outcome(row, row % 5, 4) for row in range(int(share_seen * num_rows))])
    tries = [
        seconds(choose_rows, knowledge, range(num_rows), range(20), 10**6 + number, 4, 0) for number in range(num_tries)
    ]
    return statistics.median(tries)


def late_of(run: dict[str, Any]) -> float:
    """Return the mean of the last five held-out rewards of a run, which are less noisy than the last one."""
    return statistics.fmean(reward for _, reward in run["held_out"][-5:])


def summary_of(runs: Runs) -> dict[str, Any]:
    uniform = {order: statistics.median(run["uniform_frac"] for run in runs[order]) for order in ORDERS}
    pairs = list(zip(*(runs[order] for order in ORDERS), strict=True))
    speed_ups = [
        shuffled["target_after"] / chosen["target_after"]
        for shuffled, chosen in pairs
        if shuffled["target_after"] and chosen["target_after"]
    ]
    return {
        "uniform_frac": uniform,
        "uniform_ratio": uniform["difficulty"] / uniform["shuffled"],
        "speed_up": statistics.median(speed_ups) if speed_ups else None,
        "speed_ups": speed_ups,
        "held_out_late": {order: statistics.fmean(map(late_of, runs[order])) for order in ORDERS},
        "opening_s": {order: statistics.median(run["opening_s"] for run in runs[order]) for order in ORDERS},
        "choosing_s_by_rows": {num_rows: choosing_s(num_rows) for num_rows in (400, 10_000, 1_000_000)},
        "target": TARGET,
        "goals": GOALS,
        "runs": runs,
    }


def main(num_seeds: int, runs_file: Path) -> None:
    runs: Runs = {order: [] for order in ORDERS}
    if runs_file.is_file():
        runs |= json.loads(runs_file.read_text(encoding="utf-8"))
    for seed, order in itertools.product(range(num_seeds), ORDERS):
        if len(runs[order]) > seed:
            continue
        with temporary_folder() as folder:
            job = write_job(folder)
            report = run_job(str(job), f"seed={seed}", f"data.order={order}", timeout_s=3600)
        runs[order].append({"seed": seed, **figures_of(report)})
        runs_file.write_text(json.dumps(runs), encoding="utf-8")
        print(order, json.dumps(runs[order][-1]), flush=True)
    save("order", {"dtype": own_dtype(), "num_seeds": num_seeds} | summary_of(runs), own_dtype())


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--runs", type=Path, required=True, help="file of the runs, which a next start goes on with")
    arguments = start(parser)
    main(arguments.seeds, arguments.runs)
