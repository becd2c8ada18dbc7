"""The parts that the benchmark scripts share: the command line, a job's run, the machine, the JSON result.

A script is started as `.venv/bin/python benchmarks/NAME.py`, and imports this module before anything of `tests`.
"""

import argparse
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

from onbeat.local.redis_choice import RedisServer, choose_server
from onbeat.machine.processor import read_processor
from onbeat.process.temporary import private_folder

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # Python puts the folder of a script there, not the one above it, which has `tests`
    sys.path.append(str(ROOT))
from tests.temporary_files import temporary_files_in  # noqa: E402

STARTED = time.monotonic()
QUIET_LOAD = 0.5  # processes that want a core, on average over the last minute
RESULTS = ROOT / "benchmarks" / "results"
INNERMOST = re.compile(r"[\[{][^\[\]{}]*[\]}]")  # lists and objects without others in them
STOP_S = (
    15.0  # time of `onbeat run` to pause its job and to report; services whose `onbeat run` is killed end by themselves
)
MAX_LINE = 110  # characters
REDIS_SERVERS: set[str] = set()  # servers that this benchmark has started, such as `Redis 7.0.15`


def command_line(doc: str) -> argparse.ArgumentParser:
    """Return the parser of a benchmark's options; its help is `doc`, with the time that the recorded run took."""
    name = Path(sys.argv[0]).stem
    took = [took_in(RESULTS / file) for file in (f"{name}.json", f"{name}_float32.json")]
    epilog = "\n".join(filter(None, took)) or "No recorded run says how long it takes."
    return argparse.ArgumentParser(description=doc, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter)


def took_in(result_file: Path) -> str:
    """Return how long the run of a result took, and on which processor; empty without a result that says it."""
    result = json.loads(result_file.read_text()) if result_file.is_file() else {}
    if "took_s" not in result:
        return ""
    where = f"{result['machine']['processor']} ({result['machine']['instructions']})"
    return f"The run in {result_file.name} took {result['took_s'] / 60:.1f} minutes on {where}."


def start(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the command line, and warn if the machine is busy before the benchmark starts."""
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    if load > QUIET_LOAD:
        print(f"warning: the load of this machine is {load:.2f}; figures need one below {QUIET_LOAD}", file=sys.stderr)
    return arguments


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a folder, also for temporary files of this process and its children. It is removed at the end, or when the
    next one is made. SIGTERM leaves the block as an exception does, so that the processes started in it end, too."""
    with private_folder("onbeat-bench-") as folder, temporary_files_in(folder), termination_as_exit():
        yield folder


@contextmanager
def termination_as_exit() -> Iterator[None]:
    """Let SIGTERM raise SystemExit once, unless it has a handler: that of an outer block, or of the benchmark."""
    if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def leave(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ending what was started takes its time
        sys.exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def run_job(
    job: str, *overrides: str, options: tuple[str, ...] = (), timeout_s: float = 1800, may_be_cut: bool = False
) -> dict[str, Any]:
    """Run `onbeat run` in a folder of its own; return the report. Raises RuntimeError with the end of its output.

    `may_be_cut`: of a job that is stopped by its time limit, or by Ctrl-C, the report so far is returned.
    """
    with temporary_folder() as folder:
        note_redis()
        report = folder / "report.json"
        command = [sys.executable, "-m", "onbeat.cli", "run", str(ROOT / job), "--report", str(report)]
        command += ["--data-dir", str(folder), *options]
        for override in overrides:
            command += ["--set", override]
        with subprocess.Popen(command, stdout=PIPE, stderr=STDOUT, text=True, cwd=ROOT) as run:
            try:
                output, _ = run.communicate(timeout=timeout_s)
            except (subprocess.TimeoutExpired, KeyboardInterrupt, SystemExit) as reason:
                run.terminate()  # it pauses the job and reports, and then ends its services
                with suppress(subprocess.TimeoutExpired):
                    run.communicate(timeout=STOP_S)
                run.kill()
                output, _ = run.communicate(timeout=STOP_S)
                if isinstance(reason, SystemExit):
                    raise
        if run.returncode != 0 and not (may_be_cut and report.is_file()):
            raise RuntimeError(f"{' '.join(command)} failed:\n{output[-4000:]}")
        content: dict[str, Any] = json.loads(report.read_text())
        return content


def quickstart_model() -> Path:
    """Return the folder of the quick start's model."""
    prepare = [sys.executable, "-m", "services.trainer.model.bundled", "smollm2-135m-instruct"]
    return Path(subprocess.run(prepare, check=True, capture_output=True, text=True).stdout.strip().splitlines()[-1])


def seconds(run: Callable[..., object], *arguments: object) -> float:
    """Return how long a call took."""
    started = time.perf_counter()
    run(*arguments)
    return time.perf_counter() - started


def medians(rows: Sequence[Mapping[str, Any]], *names: str) -> dict[str, float]:
    """Return the median of each figure over the rows; of all that they have, if none is named."""
    return {name: statistics.median(row[name] for row in rows) for name in names or rows[0]}


def machine() -> dict[str, Any]:
    """Describe this machine; the instructions are those that PyTorch may use (ISA in the Makefile)."""
    processor = read_processor()
    return {
        "processor": processor.name,
        "instructions": processor.instructions,
        "num_cores": os.cpu_count(),
        "python": platform.python_version(),
    }


def note_redis(server: RedisServer | None = None) -> None:
    """Let the result name a Redis that this benchmark starts; default: the one that a new local stack takes here."""
    REDIS_SERVERS.add(str((server or choose_server(ROOT / "no-data")).release))


def own_dtype() -> str:
    """Return the dtype that a job with `model.dtype = "auto"` computes in on this machine."""
    return "bfloat16" if read_processor().bfloat16 == "native" else "float32"


def on_one_line(text: str) -> str:
    """Return the JSON without line breaks, if it is short; strings in it have none."""
    line = re.sub(r"\n\s*", " ", text)
    return line if len(line) <= MAX_LINE else text


def save(name: str, result: dict[str, Any], dtype: str = "bfloat16") -> None:
    """Write benchmarks/results/NAME.json, or NAME_float32.json, and show it: figures of one dtype say nothing about the
    other, and both are kept."""
    name += "_float32" if dtype == "float32" else ""
    RESULTS.mkdir(parents=True, exist_ok=True)
    head = {"benchmark": name, "date": time.strftime("%Y-%m-%d"), "took_s": round(time.monotonic() - STARTED)}
    servers = {"redis": ", ".join(sorted(REDIS_SERVERS))} if REDIS_SERVERS else {}
    result = head | {"machine": machine() | servers} | result
    text = INNERMOST.sub(lambda match: on_one_line(match[0]), json.dumps(result, indent=2))
    (RESULTS / f"{name}.json").write_text(text + "\n")
    print(text)
