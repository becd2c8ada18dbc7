"""The cost of an update of the quick start's weights: bytes of the delta, seconds from optimizer step to open engine.

Goals: a delta is at most 5% of the bytes at learning rate 1e-6 and 10% at 1e-5; the engine is open within 1 s.
"""

import statistics

from harness import command_line, medians, run_job, save, start

NUM_ITERATIONS = 8
LEARNING_RATES = (1e-6, 1e-5, 2e-5)  # the last is the quick start's own
WARMUP = 2  # versions: the one that rollouts join with, and the engine's first load in place


def main() -> None:
    results = {}
    for learning_rate in LEARNING_RATES:
        report = run_job(
            "benchmarks/jobs/quickstart-0.1.toml",
            f"schedule.num_iterations={NUM_ITERATIONS}",
            f"optimizer.learning_rate={learning_rate}",
        )
        versions = report["weights"]
        rollouts = [rollout for version in versions[WARMUP:] for rollout in version["rollouts"].values()]
        deltas = [version["delta_bytes"] / version["full_bytes"] for version in versions[1:]]
        results[str(learning_rate)] = {
            "full_bytes": versions[0]["full_bytes"],
            "delta_share": {"median": statistics.median(deltas), "largest": max(deltas)},
            **medians(versions[WARMUP:], "encode_s", "publish_s"),
            **medians(rollouts, "pull_s", "apply_s", "load_s", "open_s"),
            "largest_open_s": max(rollout["open_s"] for rollout in rollouts),
        }
    save("weights_update", {"model": "SmolLM2-135M-Instruct", "by_learning_rate": results, "versions": NUM_ITERATIONS})


if __name__ == "__main__":
    start(command_line(__doc__))
    main()
