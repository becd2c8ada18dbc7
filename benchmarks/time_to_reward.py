"""Time to reward: seconds until the mean reward of five iterations in a row reaches 0.8, with the quick start's job.

Both times run from the command: imports, loading and the start of Onbeat's engine count. TRL's GRPOTrainer gets the
same task, model, cores, limits of tokens and reward, in the dtype in which it learns this task best. It is stopped once
it has had `--times` as long as Onbeat's median. vLLM is not available to it.
"""

import itertools
import statistics
import time
from typing import Any

from harness import ROOT, command_line, own_dtype, quickstart_model, run_job, save, start, temporary_folder
from vs_trl import run_trl

from onbeat.config import JobConfig

QUICKSTART = "benchmarks/jobs/quickstart-0.1.toml"
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


def run_onbeat(seed: int) -> dict[str, Any]:
    started = time.time()
    report = run_job(QUICKSTART, f"seed={seed}")
    rewards = [iteration["reward_mean"] for iteration in report["iterations"]]
    ends = [iteration["committed_at"] - started for iteration in report["iterations"]]
    first = first_window(rewards)
    return {
        "seed": seed,
        "dtype": report["dtype"],
        "iterations_to_reward": None if first is None else first + 1,
        "seconds_to_reward": None if first is None else ends[first],
        "seconds_to_first_iteration": ends[0],
        "lowest_window_after": None if first is None else lowest_window(rewards, first),
        "last_window": statistics.fmean(rewards[-WINDOW:]),
        "job_s": report["totals"]["job_s"],
        "rewards": rewards,
    }


def train_with_trl(dtype: str, limit_s: float) -> dict[str, Any]:
    job = JobConfig.from_file(ROOT / QUICKSTART)
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
    parser.add_argument("--times", type=float, default=8.0, help="TRL's time, as a multiple of Onbeat's; 0: no TRL")
    arguments = start(parser)
    dtype = own_dtype()
    runs = [run_onbeat(seed) for seed in arguments.seeds]
    reached = [run["seconds_to_reward"] for run in runs if run["seconds_to_reward"] is not None]
    median_s = statistics.median(reached) if reached else None
    trl = None
    if arguments.times and median_s is not None:
        trl = train_with_trl("mixed" if dtype == "bfloat16" else "float32", arguments.times * median_s)
    save(
        "time_to_reward",
        {
            "goal": f"mean reward of {WINDOW} iterations >= {WANTED}",
            "seconds_to_reward": {"median": median_s, "slowest": max(reached, default=None)},
            "num_seeds_that_reached_it": len(reached),
            "num_seeds_that_stayed": sum((run["lowest_window_after"] or 0.0) >= WANTED for run in runs),
            "onbeat": runs,
            "trl": trl,
        },
        dtype,
    )


if __name__ == "__main__":
    main()
