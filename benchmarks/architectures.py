"""A check of the installed transformers' architectures: are they trained right, and packed, not packed, or refused?

Every row is a tiny random model in a folder, as a job would name it. The trainer decides as for a job (`packing.py`)
and loads the model; its log-probabilities and gradient are then compared with those of transformers' own model, one
sequence at a time, and so are the logits of a model that is loaded from what the trainer exports.

    python benchmarks/architectures.py                all rows, into benchmarks/results/architectures.json
    python benchmarks/architectures.py 40 80          rows 40 to 79, into the same file
    python benchmarks/architectures.py gemma2 falcon  rows whose names begin with one of these, shown and not kept
"""

import json
import multiprocessing
import signal
import sys
from concurrent.futures import ProcessPoolExecutor

import torch
import transformers
from harness import RESULTS, command_line, save, start

from tests.architectures import all_rows, measure


def prepare_process() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("rows", nargs="*", help="first and last row, or beginnings of names; default: all")
    arguments = start(parser).rows
    prepare_process()
    rows = every = list(all_rows())
    is_kept = all(argument.isdigit() for argument in arguments)
    if is_kept and arguments:
        rows = rows[int(arguments[0]) : int(arguments[1])]
    elif arguments:
        rows = [row for row in rows if row.name.startswith(tuple(arguments))]
    file = RESULTS / "architectures.json"
    known = json.loads(file.read_text())["rows"] if is_kept and arguments and file.is_file() else {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the rows measured so far are kept
    pool = ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn"), initializer=prepare_process)
    try:
        for row, result in zip(rows, pool.map(measure, rows), strict=True):
            known[row.name] = result
            print(f"{row.name:40} {json.dumps(result)}", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
        if is_kept:
            ordered = {row.name: known[row.name] for row in every if row.name in known}
            save("architectures", {"transformers": transformers.__version__, "rows": ordered})


if __name__ == "__main__":
    main()
