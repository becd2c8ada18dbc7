"""The same job in `sync` and in `periodic`, engine and trainer on disjoint cores: measured ratio beside the bound.

The bound (Periodic Asynchrony, arXiv 2511.18871) follows from the synchronous run's own times, per iteration:

    T_sync = T_generate + T_micro_batches + T_barrier
    bound  = T_sync / (max(T_generate + t_last_group, T_micro_batches + t_first_group) + T_barrier)

where the barrier is step, weight hand-over and everything else that cannot overlap. Figures are medians after warm-up.
The runs alternate, so that a drift of the machine's speed affects both.
"""

import statistics
from typing import Any

from harness import command_line, medians, run_job, save, start

NUM_ITERATIONS, WARMUP, NUM_ROUNDS = 8, 2, 2
# All groups are trained and all responses have the same length, so that both modes do the same work in every iteration.
OVERRIDES = (f"schedule.num_iterations={NUM_ITERATIONS}", "objective.kl.coef=1e-6", "optimizer.learning_rate=1e-9")


def iterations_of(mode: str) -> list[dict[str, Any]]:
    cores = ("--rollout-cores", "0", "--trainer-cores", "1")
    report = run_job("benchmarks/jobs/quickstart-0.1.toml", *OVERRIDES, f"schedule.mode={mode}", options=cores)
    iterations: list[dict[str, Any]] = report["iterations"]
    return iterations[WARMUP:]


def main() -> None:
    runs: dict[str, list[dict[str, Any]]] = {"sync": [], "periodic": []}
    for _ in range(NUM_ROUNDS):
        for mode, iterations in runs.items():
            iterations += iterations_of(mode)
    sync, periodic = (medians(iterations, "wall_s", "generate_s", "first_group_s") for iterations in runs.values())
    generate_s, first_s = sync["generate_s"], sync["first_group_s"]
    micro_s = statistics.median(iteration["metrics"]["train/micro_batches_s"] for iteration in runs["sync"])
    barrier_s, last_s = sync["wall_s"] - generate_s - micro_s, micro_s / runs["sync"][0]["num_groups"]
    bound_s = max(generate_s + last_s, micro_s + first_s) + barrier_s
    ratio, bound = sync["wall_s"] / periodic["wall_s"], sync["wall_s"] / bound_s
    names = ("wall_s", "generate_s", "train_s", "weight_sync_s", "rollout_idle_frac", "trainer_idle_frac", "tpspd")
    save(
        "periodic_vs_sync",
        {
            "ratio": ratio,
            "bound": bound,
            "share_of_bound": ratio / bound,
            "parts_of_sync_s": {
                "generate": generate_s,
                "micro_batches": micro_s,
                "barrier": barrier_s,
                "first_group": first_s,
                "last_group": last_s,
            },
            "medians": {mode: medians(iterations, *names) for mode, iterations in runs.items()},
            "num_iterations": {mode: len(iterations) for mode, iterations in runs.items()},
            "cores": {"rollout": [0], "trainer": [1]},
        },
    )


if __name__ == "__main__":
    start(command_line(__doc__))
    main()
