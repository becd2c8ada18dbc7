"""examples/overlap.toml in `periodic` and in `sync`, engine and trainer on a core each: overlap, and ratio of times.

The runs take turns, so that a drift of the machine's speed affects both. A round has one run of each; its ratio is that
of the two medians, and the result the median over the rounds. The first WARMUP iterations of a run do not count. With
`--rows auto`, rows are as long as memory allows, which shows what longer rows cost in overlap: in `sync` one may have
all groups, in `periodic` it has those that are there when it begins. The bound (Periodic Asynchrony, arXiv 2511.18871)
comes from the synchronous run's own times, per iteration; it is out of reach where `periodic` has more rows:

    T_sync = T_generate + T_micro_batches + T_barrier
    bound  = T_sync / (max(T_generate + t_last_group, T_micro_batches + t_first_group) + T_barrier)

where the barrier is step, weight hand-over and everything else that cannot overlap.
"""

import os
import statistics
from typing import Any

from harness import command_line, medians, own_dtype, run_job, save, start

EXAMPLE = "examples/overlap.toml"
MODES = ("sync", "periodic")
ROW_TOKENS: dict[str, tuple[str, ...]] = {"example": (), "auto": ('training.max_tokens_per_micro_batch="auto"',)}
WARMUP = 2
CORES = {"rollout": 0, "trainer": 1}
# The policy stays as it is, so that both modes do the same work in every iteration.
SAME_WORK = ("optimizer.learning_rate=1e-9", "checkpoint.every_iterations=1000")
TIMES = ("wall_s", "generate_s", "train_s", "weight_sync_s", "rollout_idle_frac", "trainer_idle_frac", "tpspd")
GOALS = {"overlap_frac": 0.5, "ratio": 1.12}

Iterations = list[dict[str, Any]]


def iterations_of(mode: str, num_iterations: int, row_tokens: str) -> Iterations:
    """Run the example, and return its iterations without the first ones."""
    schedule = (f"schedule.num_iterations={num_iterations}", f"schedule.mode={mode}")
    overrides = (*SAME_WORK, *ROW_TOKENS[row_tokens], *schedule)
    cores = ("--rollout-cores", str(CORES["rollout"]), "--trainer-cores", str(CORES["trainer"]))
    iterations: Iterations = run_job(EXAMPLE, *overrides, options=cores)["iterations"]
    return iterations[WARMUP:]


def parts_of(sync: Iterations) -> dict[str, float]:
    """Return the medians of the parts of a synchronous iteration, in seconds."""
    micro_batches_s = statistics.median(iteration["metrics"]["train/micro_batches_s"] for iteration in sync)
    whole = medians(sync, "wall_s", "generate_s", "first_group_s")
    return {
        "generate": whole["generate_s"],
        "micro_batches": micro_batches_s,
        "barrier": whole["wall_s"] - whole["generate_s"] - micro_batches_s,
        "first_group": whole["first_group_s"],
        "last_group": micro_batches_s / sync[0]["num_groups"],
    }


def bound_of(parts: dict[str, float]) -> float:
    """Return how many times as fast as `sync` an iteration is in which everything overlaps that can."""
    work_s = parts["generate"] + parts["micro_batches"]
    overlapped_s = max(parts["generate"] + parts["last_group"], parts["micro_batches"] + parts["first_group"])
    return (work_s + parts["barrier"]) / (overlapped_s + parts["barrier"])


def num_rows(iteration: dict[str, Any]) -> float:
    """Return how many rows an iteration had, each of which is a pass."""
    return float(iteration["metrics"]["train/passes"])


def summary_of(rounds: list[dict[str, Iterations]]) -> dict[str, Any]:
    """Return the figures of some rounds, each of which has the iterations of both modes."""
    both = {mode: [iteration for one_round in rounds for iteration in one_round[mode]] for mode in MODES}
    ratios = []
    for one_round in rounds:
        sync, periodic = (medians(one_round[mode], "wall_s")["wall_s"] for mode in MODES)
        ratios.append(sync / periodic)
    overlaps = [overlap for record in both["periodic"] if (overlap := record["overlap_frac"]) is not None]
    parts = parts_of(both["sync"])
    bound, figures = bound_of(parts), {"overlap_frac": statistics.median(overlaps), "ratio": statistics.median(ratios)}
    return {
        **figures,
        "goals": GOALS,
        "is_met": all(figures[name] >= goal for name, goal in GOALS.items()),
        "ratios": ratios,
        "bound": bound,
        "share_of_bound": figures["ratio"] / bound,
        "lowest_overlap_frac": min(overlaps),
        "parts_of_sync_s": parts,
        "num_rows": {mode: statistics.median(map(num_rows, iterations)) for mode, iterations in both.items()},
        "medians": {mode: medians(iterations, *TIMES) for mode, iterations in both.items()},
        "num_iterations": {mode: len(iterations) for mode, iterations in both.items()},
    }


def main(num_iterations: int, num_rounds: int, row_tokens: str) -> None:
    rounds: list[dict[str, Iterations]] = []
    for number in range(num_rounds):
        order = MODES if number % 2 == 0 else MODES[::-1]
        rounds.append({mode: iterations_of(mode, num_iterations, row_tokens) for mode in order})
    head = {"dtype": own_dtype(), "num_rounds": num_rounds, "cores": CORES}
    save("overlap" if row_tokens == "example" else f"overlap_{row_tokens}", head | summary_of(rounds), own_dtype())


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("--iterations", type=int, default=8, help=f"of each run; the first {WARMUP} do not count")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each mode")
    parser.add_argument("--rows", choices=ROW_TOKENS, default="example", help="tokens of a row")
    arguments = start(parser)
    if arguments.iterations <= WARMUP or arguments.rounds < 1:
        parser.error(f"at least {WARMUP + 1} iterations and one round are needed")
    if not set(CORES.values()) <= os.sched_getaffinity(0):
        parser.error("engine and trainer need a core each: 0 and 1")
    main(arguments.iterations, arguments.rounds, arguments.rows)
