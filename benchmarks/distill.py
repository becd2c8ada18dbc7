"""On-policy distillation against reinforcement learning from the same start: iterations until the reward is there.

The quick start's job trains a teacher from the reward. Then a fresh copy of the same model learns from the teacher
alone, with as many responses an iteration (`examples/distill.toml`), and its reward is only measured. The reward is
there when three iterations in a row have a mean of 0.8. What else the machine does changes seconds, but no iterations,
so that only these are compared.
"""

import statistics
from pathlib import Path
from typing import Any

from harness import command_line, own_dtype, run_job, save, start, temporary_folder

QUICKSTART, DISTILL = "examples/quickstart.toml", "examples/distill.toml"
WINDOW, WANTED = 3, 0.8


def first_there(rewards: list[float]) -> int | None:
    """Return the number of iterations at the end of the first good window, or None."""
    ends = range(WINDOW, len(rewards) + 1)
    return next((end for end in ends if statistics.fmean(rewards[end - WINDOW : end]) >= WANTED), None)


def course(report: dict[str, Any]) -> dict[str, Any]:
    """Return the curve of a run: rewards, its gap to the teacher if it has one, and the held-out rewards."""
    rewards = [iteration["reward_mean"] for iteration in report["iterations"]]
    gaps = [iteration["metrics"].get("train/teacher_divergence") for iteration in report["iterations"]]
    held_out = [record["reward_mean"] for record in report["evaluations"]]
    divergence = {} if gaps[0] is None else {"divergence_by_iteration": [round(gap, 4) for gap in gaps]}
    return {
        "iterations_to_reward": first_there(rewards),
        "rewards": [round(reward, 3) for reward in rewards],
        "held_out": held_out,
    } | divergence


def run_seed(seed: int) -> dict[str, dict[str, Any]]:
    """Train a teacher from the reward, and then a student from the teacher."""
    with temporary_folder() as folder:
        beside = ("--data-dir", str(folder))
        from_reward = course(run_job(QUICKSTART, f"seed={seed}", options=beside))
        (teacher,) = last_checkpoints(folder)
        from_teacher = course(run_job(DISTILL, f"seed={seed}", f"teacher.path={teacher}"))
    return {"from_reward": from_reward, "from_teacher": from_teacher}


def last_checkpoints(folder: Path) -> list[Path]:
    """Return the newest checkpoint of each job in a data folder."""
    return [max(job.glob("checkpoints/iteration-*")) for job in (folder / "jobs").iterdir() if job.is_dir()]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = start(parser)
    runs: dict[str, dict[str, Any]] = {}
    for seed in arguments.seeds:
        runs[str(seed)] = run_seed(seed)
        medians = {
            kind: statistics.median(run[kind]["iterations_to_reward"] or float("inf") for run in runs.values())
            for kind in ("from_reward", "from_teacher")
        }
        result = {"goal": f"mean reward of {WINDOW} iterations >= {WANTED}", "median_iterations": medians}
        save("distill", result | {"by_seed": runs}, own_dtype())


if __name__ == "__main__":
    main()
