"""The examples with episodes, as they are: how far the mean reward rises, and how long each takes.

    python benchmarks/examples_learn.py                 both, in the processor's own dtype; saved
    python benchmarks/examples_learn.py --show game     one of them, only shown

The goal: a visibly rising reward within ten minutes on two cores.
"""

import json
import statistics
from typing import Any

from harness import command_line, own_dtype, run_job, save, start

EXAMPLES = ("game", "tools")
WINDOW = 5  # iterations
GOAL_S = 600.0


def run(name: str) -> dict[str, Any]:
    report = run_job(f"examples/{name}.toml")
    rewards = [iteration["reward_mean"] for iteration in report["iterations"]]
    first, last = statistics.fmean(rewards[:WINDOW]), statistics.fmean(rewards[-WINDOW:])
    job_s = report["totals"]["job_s"]
    return {
        "dtype": report["dtype"],
        f"mean_of_first_{WINDOW}": first,
        f"mean_of_last_{WINDOW}": last,
        "job_s": job_s,
        "is_met": last > first and job_s <= GOAL_S,
        "rewards": rewards,
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("names", nargs="*", help=f"default: {' '.join(EXAMPLES)}")
    parser.add_argument("--show", action="store_true", help="write no result")
    arguments = start(parser)
    results = {name: run(name) for name in arguments.names or EXAMPLES}
    if arguments.show:
        print(json.dumps(results, indent=2))
    else:
        save("examples_learn", {"goal": f"the reward rises, in at most {GOAL_S:.0f} s", **results}, own_dtype())


if __name__ == "__main__":
    main()
