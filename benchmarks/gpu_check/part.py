"""The inputs of every part of the check, and what it leaves behind: a JSON file, written anew after each finding.

So a part that is stopped at its time limit leaves what it had found by then.
"""

import argparse
import json
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from services.trainer.device import make_deterministic


@dataclass(frozen=True)
class Place:
    """The device that a part runs on. On a CPU every shape is tiny."""

    device: torch.device

    @property
    def is_tiny(self) -> bool:
        return self.device.type == "cpu"

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], Any], repetitions: int) -> float:
        """Return the median time of a call, after one that is not counted."""
        times_s = []
        for _ in range(repetitions + 1):
            self.synchronize()
            started = time.perf_counter()
            run()
            self.synchronize()
            times_s.append(time.perf_counter() - started)
        return statistics.median(times_s[1:])

    def reset_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def peak_gib(self) -> float | None:
        """Return the most memory that tensors took since `reset_peak`; None on a CPU, where it is not counted."""
        return torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else None


class Findings:
    """The results of a part: checks, which are met or not; figures; and sentences on what could not run.

    `at_s` of a check or a figure: seconds since the part began.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._started = file, time.monotonic()
        self._content: dict[str, list[Any]] = {"checks": [], "figures": [], "left_out": []}

    def check(self, name: str, is_met: bool, **numbers: Any) -> None:
        self._add("checks", {"name": name, "is_met": bool(is_met)} | numbers | self._now())

    def figure(self, name: str, **numbers: Any) -> None:
        self._add("figures", {"name": name} | numbers | self._now())

    def leave_out(self, sentence: str) -> None:
        self._add("left_out", sentence)

    def _now(self) -> dict[str, float]:
        return {"at_s": time.monotonic() - self._started}

    def _add(self, kind: str, finding: Any) -> None:
        self._content[kind].append(finding)
        complete = self._file.with_suffix(".new")  # a part that is killed while it writes leaves the findings before
        complete.write_text(json.dumps(self._content))
        complete.replace(self._file)
        print(f"  {kind.removesuffix('s').replace('_', ' ')}: {in_words(finding)}", flush=True)


def in_words(finding: Any) -> str:
    """
    >>> in_words({"name": "float32", "is_met": True, "gap": 1.23456e-7})
    'float32  is_met True  gap 1.23e-07'
    """
    if isinstance(finding, str):
        return finding
    rest = (f"{name} {f'{value:.3g}' if isinstance(value, float) else value}" for name, value in finding.items())
    return "  ".join(rest).removeprefix("name ")


def run_part(measure: Callable[[Place, Findings], None]) -> None:
    """Run a part with its command line: the `main` of each part."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--findings", type=Path, required=True)
    options = parser.parse_args()
    torch.manual_seed(0)
    findings = Findings(options.findings)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a job that runs is to be ended, and may report
    try:
        make_deterministic(torch.device(options.device))  # as the trainer does
        measure(Place(torch.device(options.device)), findings)
    except torch.OutOfMemoryError as error:
        findings.leave_out(f"the rest of this part does not fit into the card's free memory: {error}")
