"""The time that ledger and audit log add to a group's life and to an iteration, in real runs of the local stack.

Redis, broker, trainer and a rollout run as usual; every call of their ledgers is timed in place (ledger_clock.py), and
each submission is paired with a bare XADD and XACK of the same group. So script, bare commands, the group's life and
the iteration are all of one run. The definitions are in the result. Goal: under 10%.
"""

import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import ROOT, save, temporary_folder

from onbeat.config import read_job_file
from onbeat.local.supervisor import ServiceSpec
from onbeat.types import IterationRecord, JobState
from tests.e2e.stack import RunningStack, running, tiny_job

WARMUP = 2  # iterations
LEASE_S = 30.0  # the default of the services
BACKGROUND = {"renew_job", "renew_groups"}  # they run beside the work: nothing waits for them
DEFINITIONS = {
    "life_s": "from the call that claims a group to the answer 'accepted' to its submission, without the measuring",
    "added_to_life_s": "claim less a bare XREADGROUP of as many prompts, plus submission less a bare XADD and XACK",
    "iteration_s": "from commit to commit, without the measuring of that time",
    "added_to_iteration_s": "sum over all processes, as if none overlapped: claims and submissions less their bare "
    "commands; every other script, the reads of group states and the trainer's digests in whole, though without a "
    "ledger some command would stand in their place. Reads that wait for news are not ledger work and not in it",
    "background_s": "lease renewals of an iteration; nobody waits for them, not in added_to_iteration_s",
}
Line = dict[str, Any]


def clocked(folder: Path) -> Callable[[list[ServiceSpec]], list[ServiceSpec]]:
    def change(specs: list[ServiceSpec]) -> list[ServiceSpec]:
        return [clocked_spec(spec, folder) for spec in specs]

    return change


def clocked_spec(spec: ServiceSpec, folder: Path) -> ServiceSpec:
    *python, _, _, module = spec.command  # python -P -m services.NAME
    env = {**spec.env, "PYTHONPATH": str(ROOT), "LEDGER_CLOCK": str(folder)}
    return replace(spec, command=[*python, "-m", "benchmarks.ledger_clock", module], env=env)


def reference_job(folder: Path) -> dict[str, Any]:
    return tiny_job(folder, schedule={"num_iterations": 20}, checkpoint={"every_iterations": 5})


def quickstart_job(folder: Path) -> dict[str, Any]:
    return read_job_file(ROOT / "examples" / "quickstart.toml", ["schedule.num_iterations=10"])


def measure(engine: str, make_job: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    with temporary_folder() as folder:
        clock = folder / "clock"
        clock.mkdir()
        with running(folder, engine=engine, lease_s=LEASE_S, change=clocked(clock)) as stack:
            job = make_job(folder)
            iterations = run(stack, job)
        lines = [json.loads(line) for path in clock.iterdir() for line in path.read_text().splitlines()]
    measured = iterations[WARMUP:]
    first = measured[0].iteration
    return {
        "num_iterations": len(measured),
        "num_groups_per_iteration": measured[0].num_groups,
        "group": of_groups(lines, first),
        "iteration": of_iterations(lines, measured),
        "calls": by_call(lines, measured),
    }


def run(stack: RunningStack, job: dict[str, Any]) -> list[IterationRecord]:
    job_id = stack.client.jobs.create(job).id
    record = stack.client.jobs.wait(job_id, timeout_s=900)
    assert record.state is JobState.SUCCEEDED, record.error
    assert stack.client.jobs.audit(job_id).is_clean
    return list(stack.client.jobs.iterations(job_id))


def of_groups(lines: list[Line], first_iteration: int) -> dict[str, float]:
    claims = {group_id: line for line in lines if line["call"] == "claim_groups" for group_id in line["group_ids"]}
    submitted = [line for line in lines if line["call"] == "submit_group" and line["verdict"] == "accepted"]
    measured = [line for line in submitted if int(line["group_id"].split("-")[0]) >= first_iteration]
    lives, added, bare, scripts = [], [], [], []
    for line in measured:
        claim = claims[line["group_id"]]
        lives.append(line["ended"] - claim["began"] - line["before_s"] - claim["measuring_s"])
        added.append(claim["s"] - claim["bare_s"] + line["s"] - line["bare_s"])
        bare.append(line["bare_s"])
        scripts.append(line["s"])
    shares = [a / life for a, life in zip(added, lives, strict=True)]
    return {
        "num": len(measured),
        "life_s": rounded(statistics.median(lives)),
        "submit_s": rounded(statistics.median(scripts)),
        "bare_xadd_xack_s": rounded(statistics.median(bare)),
        "added_to_life_s": rounded(statistics.median(added)),
        "share_median": rounded(statistics.median(shares)),
        "share_95th_percentile": rounded(statistics.quantiles(shares, n=20)[-1]),
        "share_of_sums": rounded(sum(added) / sum(lives)),
    }


def of_iterations(lines: list[Line], measured: list[IterationRecord]) -> dict[str, float]:
    walls, added, background, measuring = [], [], [], []
    for record in measured:
        own = during(lines, record)
        measuring.append(sum(line.get("measuring_s", 0.0) for line in own))
        walls.append((record.wall_s or 0.0) - measuring[-1])
        on_path = [line for line in own if line["call"] not in BACKGROUND]
        added.append(sum(line["s"] - line.get("bare_s", 0.0) for line in on_path))
        background.append(sum(line["s"] for line in own if line["call"] in BACKGROUND))
    shares = [a / wall for a, wall in zip(added, walls, strict=True)]
    return {
        "iteration_s": rounded(statistics.median(walls)),
        "added_to_iteration_s": rounded(statistics.median(added)),
        "share_median": rounded(statistics.median(shares)),
        "share_max": rounded(max(shares)),
        "background_s": rounded(statistics.median(background)),
        "measuring_s": rounded(statistics.median(measuring)),
    }


def during(lines: list[Line], record: IterationRecord) -> list[Line]:
    """Return the lines that began between the previous commit and this one."""
    assert record.committed_at is not None
    assert record.wall_s is not None
    return [line for line in lines if record.committed_at - record.wall_s < line["began"] <= record.committed_at]


def by_call(lines: list[Line], measured: list[IterationRecord]) -> dict[str, dict[str, float]]:
    """Return by call how often it is made in an iteration, on average, and its median time."""
    own = [line for record in measured for line in during(lines, record)]
    table = {}
    for call in sorted({line["call"] for line in own}):
        took = [line["s"] for line in own if line["call"] == call]
        table[call] = {
            "per_iteration": round(len(took) / len(measured), 2),
            "median_us": round(1e6 * statistics.median(took), 1),
        }
    return table


def rounded(value: float) -> float:
    return float(f"{value:.4g}")


def main() -> None:
    runs = {
        "reference engine, tiny model, 8 x 4 x 24 tokens": measure("transformers", reference_job),
        "vLLM, SmolLM2-135M, 8 x 8 x 32 tokens (the quick start)": measure("vllm", quickstart_job),
    }
    largest = max(
        share for run in runs.values() for share in (run["group"]["share_median"], run["iteration"]["share_median"])
    )
    about = {"goal": "< 0.1", "largest_share": largest, "definitions": DEFINITIONS, "warmup": WARMUP}
    save("audit_overhead", about | runs)


if __name__ == "__main__":
    main()
