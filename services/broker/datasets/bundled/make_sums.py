"""The maker of the two files beside it: sums of things, and others that are held out.

`python services/broker/datasets/bundled/make_sums.py` writes the same bytes each time. The things of the held-out
file are in no prompt of the other one.
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
NUM_HELD_OUT_THINGS, NUM_HELD_OUT = 4, 64


def prompts_of(things: Sequence[str]) -> list[str]:
    """Return a line of the file for each sum of each of these things."""
    rows = (
        {"prompt": f"Calculate {a} {thing} + {b} {thing}.", "answer": str(a + b)}
        for thing, a, b in product(things, range(1, 10), range(1, 10))
    )
    return [f"{json.dumps(row)}\n" for row in rows]


def make_files() -> dict[str, str]:
    """Return the text of each file, by its name."""
    rng = random.Random(0)
    things = NOUNS.split()
    rng.shuffle(things)
    trained, held_out = prompts_of(things[NUM_HELD_OUT_THINGS:]), prompts_of(things[:NUM_HELD_OUT_THINGS])
    rng.shuffle(trained)
    rng.shuffle(held_out)
    return {"sums.jsonl": "".join(trained), "sums-held-out.jsonl": "".join(held_out[:NUM_HELD_OUT])}


if __name__ == "__main__":
    for name, text in make_files().items():
        Path(__file__).with_name(name).write_text(text, encoding="utf-8")
