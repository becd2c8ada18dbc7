"""Storms over real jobs: processes killed and paused, Redis restarted, networks that drop, refuse and delay.

The seed determines which fault strikes which process. After each storm the job has SUCCEEDED, its audit is clean, every
group was trained exactly once, and the weights are bit for bit those of an undisturbed pass. `recovery_s` is from a
fault to the job's next progress (a group accepted or an iteration committed), by any service. Run it with `make chaos`;
it exits 1 when a storm did harm.
"""

import logging
import sys
import time
from collections import defaultdict
from statistics import median
from typing import Any

from harness import command_line, note_redis, save, start, temporary_folder

from onbeat.contracts.errors import OnbeatError
from tests.chaos.storm import Strike, stormy

AS_IF_NOTHING = "as if nothing had happened"


def storms(engine: str, seeds: list[int], num_faults: int) -> dict[str, Any]:
    started = time.monotonic()
    outcomes: dict[int, str] = {}
    strikes: list[Strike] = []
    note_redis()
    with temporary_folder() as folder, stormy(folder, engine) as sky:
        for seed in seeds:
            try:
                strikes += sky.storm(seed, num_faults)
                outcomes[seed] = AS_IF_NOTHING
            except (AssertionError, OnbeatError) as error:
                outcomes[seed] = f"{type(error).__name__}: {error}"
            print(f"{engine}, seed {seed}: {outcomes[seed]}")
    struck = [strike for strike in strikes if strike.has_struck]
    return {
        "outcomes": outcomes,
        "num_faults": len(struck),
        "faults": by_kind_and_target(struck),
        "wall_s": round(time.monotonic() - started, 1),
    }


def by_kind_and_target(strikes: list[Strike]) -> dict[str, dict[str, float | None]]:
    """Return `kill rollout` -> how many, and seconds to recover; those after the job's last progress have none."""
    groups: dict[str, list[Strike]] = defaultdict(list)
    for strike in strikes:
        groups[f"{strike.kind} {strike.target.removesuffix('-0').removesuffix('-1')}"].append(strike)
    table: dict[str, dict[str, float | None]] = {}
    for name, alike in sorted(groups.items()):
        times = [round(strike.recovery_s, 2) for strike in alike if strike.recovery_s is not None]
        table[name] = {
            "num": len(alike),
            "median_s": median(times) if times else None,
            "max_s": max(times, default=None),
        }
    return table


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=list(range(1, 15)), help="with the reference engine")
    parser.add_argument("--faults", type=int, default=18, help="of each of them")
    parser.add_argument("--vllm-seeds", type=int, nargs="*", default=[101, 102, 103])
    parser.add_argument("--vllm-faults", type=int, default=8)
    arguments = start(parser)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("tests.chaos.storm").setLevel(logging.INFO)
    result = {}
    if arguments.seeds:
        result["transformers"] = storms("transformers", arguments.seeds, arguments.faults)
    if arguments.vllm_seeds:
        result["vllm"] = storms("vllm", arguments.vllm_seeds, arguments.vllm_faults)
    outcomes = [outcome for of_engine in result.values() for outcome in of_engine["outcomes"].values()]
    num_faults = sum(of_engine["num_faults"] for of_engine in result.values())
    save("chaos", {"num_storms": len(outcomes), "num_faults": num_faults, **result})
    return 0 if set(outcomes) == {AS_IF_NOTHING} else 1


if __name__ == "__main__":
    sys.exit(main())
