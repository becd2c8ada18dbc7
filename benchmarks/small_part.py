"""The example small_part.toml by `objective.signal`: what the policy learns, and what the doctor says of it.

    python benchmarks/small_part.py                     both signals with record seed; saved
    python benchmarks/small_part.py --reports FOLDER    of runs that are over, which may have run side by side: the
                                                        files SIGNAL-SEED.json of `onbeat run --report`, the signal
                                                        without `part:`

Nothing here depends on how fast the machine is, or on what else it does.
"""

import json
import statistics
import tomllib
from pathlib import Path
from typing import Any

from harness import ROOT, command_line, own_dtype, run_job, save, start

from onbeat.config import JobConfig
from onbeat.contracts.records import IterationRecord
from services.broker.doctor.course import NUM_RECENT, Course
from services.broker.doctor.learning import findings_of

EXAMPLE = "examples/small_part.toml"
SIGNALS = ("reward", "part:right")
SEEDS = (0, 1)
PARTS = ("right", "steps")
NUM_ITERATIONS = 5
WINDOW = 2  # iterations


def read(folder: Path | None, signal: str, seed: int) -> dict[str, Any]:
    """Return the report of a run that is over, or else run the example."""
    if folder is None:
        changes = (f"objective.signal={signal}", f"seed={seed}", f"schedule.num_iterations={NUM_ITERATIONS}")
        return run_job(EXAMPLE, *changes)
    report: dict[str, Any] = json.loads(
        (folder / f"{signal.removeprefix('part:')}-{seed}.json").read_text(encoding="utf-8")
    )
    return report


def sum_up(report: dict[str, Any], signal: str, seed: int) -> dict[str, Any]:
    iterations = report["iterations"][:NUM_ITERATIONS]
    curves = {part: [round(record["metrics"][f"reward/{part}_mean"], 3) for record in iterations] for part in PARTS}
    row: dict[str, Any] = {"signal": signal, "seed": seed}
    for part, values in curves.items():
        row |= {f"{part}_first": values[0], f"{part}_last_{WINDOW}": round(statistics.fmean(values[-WINDOW:]), 3)}
    unsolved = [record["metrics"].get("rollout/mixed_unsolved_groups", 0.0) for record in iterations[:WINDOW]]
    shares = [value / record["num_groups"] for value, record in zip(unsolved, iterations, strict=False)]
    row[f"unsolved_but_different_first_{WINDOW}"] = round(statistics.fmean(shares), 3)
    return row | {"doctor": words(signal, iterations), "job_s": round(report["totals"]["job_s"])} | curves


def words(signal: str, iterations: list[dict[str, Any]]) -> list[str]:
    """Return what the doctor says after these iterations."""
    job = tomllib.loads((ROOT / EXAMPLE).read_text(encoding="utf-8"))
    job["objective"]["signal"] = signal
    names = IterationRecord.model_fields
    records = [IterationRecord(**{name: record[name] for name in names if name in record}) for record in iterations]
    first, recent = records[:NUM_RECENT], records[-NUM_RECENT:]
    course = Course("JOB", JobConfig.model_validate(job), len(records), first, recent, evaluations=[], around_best=[])
    return [finding.sentence for finding in findings_of(course)]


def medians_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    names = [name for name, value in rows[0].items() if isinstance(value, float)]
    return {name: round(statistics.median(row[name] for row in rows), 3) for name in names}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--reports", type=Path, help="folder of reports of runs that are over")
    arguments = start(parser)
    rows = [sum_up(read(arguments.reports, signal, seed), signal, seed) for signal in SIGNALS for seed in SEEDS]
    medians = {signal: medians_of([row for row in rows if row["signal"] == signal]) for signal in SIGNALS}
    took = {"took_s": sum(row["job_s"] for row in rows)} if arguments.reports else {}
    save("small_part", took | {"job": EXAMPLE, "medians": medians, "runs": rows}, own_dtype())


if __name__ == "__main__":
    main()
