"""Time to reward: seconds until the mean reward of five iterations in a row reaches 0.8, with the quick start's job.

Also how soon the first group is there, and what comes out: reward and truncated responses of the held-out prompts
before and after, what those prompts cost, and the curves that the doctor reads (tests/unit/broker/test_learning.py cuts
them after every iteration).

`--trl-times 8` is another measurement, of 0.1's quick start: TRL's GRPOTrainer gets the same task, model, cores, limits
of tokens and reward, in the dtype in which it learns this task best. It is stopped once it has had that many times as
long as Onbeat's median. vLLM is not available to it. Both times run from the command: imports, loading and the start of
Onbeat's engine count.
"""

import itertools
import statistics
import time
from typing import Any

from harness import ROOT, command_line, own_dtype, quickstart_model, run_job, save, start, temporary_folder
from vs_trl import run_trl

from onbeat.config import JobConfig

QUICKSTART = "examples/quickstart.toml"
QUICKSTART_OF_TRL = "benchmarks/jobs/quickstart-0.1.toml"
FOR_DOCTOR = (
    *("rollout/truncated_frac", "rollout/uniform_groups", "rollout/solved_all_frac", "rollout/solved_none_frac"),
    "train/entropy",
)
WINDOW, WANTED = 5, 0.8
MAX_TRL_STEPS = 400


def first_window(rewards: list[float]) -> int | None:
    """Return the index at which the first good window ends, or None."""
    windows = (statistics.fmean(rewards[end - WINDOW : end]) for end in range(WINDOW, len(rewards) + 1))
    return next((index + WINDOW - 1 for index, mean in enumerate(windows) if mean >= WANTED), None)


def lowest_window(rewards: list[float], first: int) -> float:
    """Return the lowest mean of all windows from the first good one on."""
    ends = range(first + 1, len(rewards) + 1)
    return min(statistics.fmean(rewards[end - WINDOW : end]) for end in ends)


def course_of(iteration: dict[str, Any]) -> dict[str, Any]:
    """Return what the doctor reads of an iteration."""
    metrics = {name: round(iteration["metrics"][name], 4) for name in FOR_DOCTOR}
    return {name: iteration[name] for name in ("reward_mean", "mismatch_mean", "num_groups")} | {"metrics": metrics}


def held_out_of(report: dict[str, Any]) -> dict[str, Any] | None:
    """Return scores of the held-out prompts before and after, and the share of the job's time that they took."""
    if not (records := report["evaluations"]):
        return None
    scores = {name: [records[index][name] for index in (0, -1)] for name in ("reward_mean", "truncated_frac")}
    spent_s = sum(record["ended_at"] - record["opened_at"] for record in records)
    return scores | {"seconds": spent_s, "share_of_job": spent_s / report["totals"]["job_s"]}


def run_onbeat(job: str, seed: int) -> dict[str, Any]:
    started = time.time()
    report = run_job(job, f"seed={seed}")
    ended = time.time()
    rewards = [iteration["reward_mean"] for iteration in report["iterations"]]
    ends = [iteration["committed_at"] - started for iteration in report["iterations"]]
    first = first_window(rewards)
    return {
        "seed": seed,
        "dtype": report["dtype"],
        "iterations_to_reward": None if first is None else first + 1,
        "seconds_to_reward": None if first is None else ends[first],
        "seconds_to_first_group": report["iterations"][0]["first_accepted_at"] - started,
        "seconds_to_first_iteration": ends[0],
        "lowest_window_after": None if first is None else lowest_window(rewards, first),
        "last_window": statistics.fmean(rewards[-WINDOW:]),
        "job_s": report["totals"]["job_s"],
        "command_s": ended - started,
        "held_out": held_out_of(report),
        "iterations": [course_of(iteration) for iteration in report["iterations"]],
    }


def train_with_trl(dtype: str, limit_s: float) -> dict[str, Any]:
    job = JobConfig.from_file(ROOT / QUICKSTART_OF_TRL)
    rollout = job.rollout
    sizes = (MAX_TRL_STEPS, rollout.num_prompts_per_iteration, rollout.num_samples_per_prompt)
    arguments = (quickstart_model(), *sizes, rollout.max_response_tokens, dtype)
    started = time.perf_counter()
    with temporary_folder() as folder:
        more = (job.optimizer.learning_rate, limit_s)
        result = run_trl("trl_baseline.py", folder, arguments, more, timeout_s=limit_s + 600)
    first = first_window(result["rewards"])
    start_s = result["first_step_at"] - started
    ends = list(itertools.accumulate(result["step_s"], initial=start_s))[1:]
    return {
        "dtype": dtype,
        "seconds_to_reward": None if first is None else ends[first],
        "seconds_to_first_step": start_s,
        "seconds_given": ends[-1],
        "num_steps": len(ends),
        "rewards": result["rewards"],
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--trl-times", type=float, default=0.0, help="TRL's time, as a multiple of Onbeat's; 0: no TRL")
    arguments = start(parser)
    dtype, is_beside_trl = own_dtype(), arguments.trl_times > 0
    runs = [run_onbeat(QUICKSTART_OF_TRL if is_beside_trl else QUICKSTART, seed) for seed in arguments.seeds]
    reached = [run["seconds_to_reward"] for run in runs if run["seconds_to_reward"] is not None]
    median_s = statistics.median(reached) if reached else None
    result = {
        "goal": f"mean reward of {WINDOW} iterations >= {WANTED}",
        "seconds_to_reward": {"median": median_s, "slowest": max(reached, default=None)},
        "seconds_to_first_group": statistics.median(run["seconds_to_first_group"] for run in runs),
        "num_seeds_that_reached_it": len(reached),
        "num_seeds_that_stayed": sum((run["lowest_window_after"] or 0.0) >= WANTED for run in runs),
        "onbeat": runs,
    }
    if is_beside_trl and median_s is not None:
        result["trl"] = train_with_trl("mixed" if dtype == "bfloat16" else "float32", arguments.trl_times * median_s)
    save("time_to_reward_trl" if is_beside_trl else "time_to_reward", result, dtype)


if __name__ == "__main__":
    main()
