"""The cost of Redis' append-only file: accepted groups per second and latency of one, for each `appendfsync`.

`always` loses nothing that was answered, even when the machine loses power; `everysec` up to a second then; neither
loses anything when only the Redis process dies, because what it has written is in the kernel's hands. `no file` is the
floor: everything is gone with the process.
"""

import asyncio
import time
from typing import Any

from harness import command_line, save, start
from ledger_throughput import REPEATS, latency, median_of_runs, redis_server, throughput

NUM_TOKENS, NUM_GROUPS = 256, 2000
AOF = ("--save", "", "--appendonly", "yes", "--appendfsync")
POLICIES = {
    "no file": ("--save", ""),
    "no": (*AOF, "no"),
    "everysec": (*AOF, "everysec"),
    "always": (*AOF, "always"),
}


async def measure() -> dict[str, Any]:
    took = await latency(NUM_TOKENS, NUM_GROUPS)
    runs = [await throughput(1, NUM_TOKENS, NUM_GROUPS) for _ in range(REPEATS)]
    return {"in_per_s": median_of_runs(runs)["in_per_s"], "submit_us": round(took["submit_us"], 1)}


def main() -> None:
    results = {}
    for policy, options in POLICIES.items():
        with redis_server(*options):
            time.sleep(1.0)
            results[policy] = asyncio.run(measure())
    save("appendfsync", {"tokens": f"8 x {NUM_TOKENS}", "num_groups": NUM_GROUPS, "appendfsync": results})


if __name__ == "__main__":
    start(command_line(__doc__))
    main()
