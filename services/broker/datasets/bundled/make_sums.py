"""The maker of the two files beside it: sums of things, and others that are held out.

`python services/broker/datasets/bundled/make_sums.py` writes the same bytes each time. No sum a + b of the held-out
file is in the other one, with whatever things.
"""

import json
import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path

NOUNS = (
    "apples bags balls birds boats books bottles boxes cakes cards cars cats chairs clocks coins cups dogs doors eggs "
    "flags flowers forks hats horses keys lamps leaves letters maps pencils pens plates rings roses shells shoes songs "
    "spoons stars stones"
)
NUM_HELD_OUT_SUMS, NUM_HELD_OUT = 16, 64


def prompts_of(sums: Sequence[tuple[int, int]]) -> list[str]:
    """Return a line of the file for each of these sums of each thing."""
    rows = (
        {"prompt": f"Calculate {a} {things} + {b} {things}.", "answer": str(a + b)}
        for (a, b), things in product(sums, NOUNS.split())
    )
    return [f"{json.dumps(row)}\n" for row in rows]


def make_files() -> dict[str, str]:
    """Return the text of each file, by its name."""
    rng = random.Random(0)
    sums = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    rng.shuffle(sums)
    trained, held_out = prompts_of(sums[NUM_HELD_OUT_SUMS:]), prompts_of(sums[:NUM_HELD_OUT_SUMS])
    rng.shuffle(trained)
    rng.shuffle(held_out)
    return {"sums.jsonl": "".join(trained), "sums-held-out.jsonl": "".join(held_out[:NUM_HELD_OUT])}


if __name__ == "__main__":
    for name, text in make_files().items():
        Path(__file__).with_name(name).write_text(text, encoding="utf-8")
