"""One command for the day a GPU is there: `make gpu-check`. It needs PyTorch, transformers and this checkout.

Each part is a process of its own with a time limit, so that one failure costs only itself; all together take 9 minutes
at most. Without a GPU the same parts run on the CPU, with tiny shapes. Everything found goes into one JSON file.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .wheels import ROOT, unpack

TOTAL_S = 510.0  # limit for the parts, so that all is over within 9 minutes
GRACE_S, LEAST_S = 20.0, 10.0
DESCRIBE_S = 60.0
NUM_LAST_LINES = 15


@dataclass(frozen=True)
class Part:
    name: str  # name of the module
    limit_s: float
    title: str
    needs_packages: bool = True  # packages besides PyTorch


PARTS = [
    Part("attention", 120, "FlexAttention, compiled, forward and backward, against a dense mask", needs_packages=False),
    Part("step", 120, "the trainer's whole step from a recorded stream"),
    Part("publish", 60, "snapshot, digests and delta of a 1.5B model"),
    Part("invariance", 40, "operators whose bits depend on the batch", needs_packages=False),
    Part("packing", 140, "shared prompts against varlen and against rows, Qwen2.5 1.5B and 7B"),
    Part("job", 170, "a complete job on the transformers engine"),
    Part("quickstart", 240, "the quick start with vLLM, where vLLM is installed"),
]


class Check:
    """One run; `result` is what is written after each part."""

    def __init__(self, folder: Path | None, site: Path, described: dict[str, Any]) -> None:
        """Create the run. `site`: packages, caches, and the parts' findings. `folder` None: no file is written."""
        self._started, self._folder, self._site = time.monotonic(), folder, site
        self._logs = site if folder is None else folder / "gpu_check_logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        about = {"benchmark": "gpu_check", "date": time.strftime("%Y-%m-%d"), "num_cores": os.cpu_count()}
        self.result: dict[str, Any] = {**about, **described, "parts": {}}

    def run(self, part: Part) -> None:
        self._say(f"{part.name}: {part.title} (at most {part.limit_s:.0f} s)")
        began = time.monotonic()
        findings = self._site / f"{part.name}.json"
        left_s = TOTAL_S - GRACE_S - (began - self._started)
        if left_s < LEAST_S:
            status, error = "not started", "the time of the whole check is over"
        else:
            status, error = self._start(part, min(part.limit_s, left_s), findings)
        report = json.loads(findings.read_text()) if findings.is_file() else {"checks": [], "left_out": []}
        num_met = sum(check["is_met"] for check in report["checks"])
        if status == "done" and num_met < len(report["checks"]):
            status = "wrong"
        seconds = time.monotonic() - began
        self.result["parts"][part.name] = {"status": status, "seconds": seconds, "error": error} | report
        self._save()
        sentences = [f"{num_met} of {len(report['checks'])} checks met, {seconds:.0f} s"]
        sentences += [f"left out: {sentence}" for sentence in report["left_out"]] + [error] * bool(error)
        self._say(f"{part.name}: {status.upper()}, {'; '.join(sentences)}")

    def _start(self, part: Part, limit_s: float, findings: Path) -> tuple[str, str]:
        """Return (done, ''), (failed, its last words) or (timeout, after how long)."""
        command = [sys.executable, "-m", f"benchmarks.gpu_check.{part.name}", "--device", self.result["device"]]
        command += ["--findings", str(findings)]
        log = self._logs / f"{part.name}.log"
        with log.open("w") as errors:
            process = subprocess.Popen(
                command, start_new_session=True, cwd=ROOT, env=environment(self._site), stderr=errors
            )
            try:
                exit_code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                end(process)
                return "timeout", f"stopped after {limit_s:.0f} s; {last_lines(log, 3)}"
            except KeyboardInterrupt:
                end(process)
                raise
        if exit_code == 0:
            return "done", ""
        return "failed", last_lines(log, NUM_LAST_LINES) or f"exit code {exit_code}"

    def _save(self) -> None:
        self.result["seconds"] = time.monotonic() - self._started
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / "gpu_check.json").write_text(in_lines(self.result) + "\n")

    def _say(self, sentence: str) -> None:
        print(f"[{time.monotonic() - self._started:4.0f} s] {sentence}", flush=True)


def in_lines(result: dict[str, Any]) -> str:
    """Return the result as JSON, with one line for each check and figure.

    >>> in_lines({"checks": [{"name": "a", "is_met": True}]})
    '{\\n  "checks": [\\n    { "name": "a", "is_met": true }\\n  ]\\n}'
    """
    return re.sub(r"{[^{}]*}", lambda match: " ".join(match[0].split()), json.dumps(result, indent=2))


def last_lines(log: Path, count: int) -> str:
    return "\n".join(log.read_text(errors="replace").strip().splitlines()[-count:])


def environment(site: Path) -> dict[str, str]:
    """Return the environment of a part. Compiled kernels are shared by the parts, and gone afterwards."""
    paths = [str(site), str(ROOT), str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(site / "inductor"), "TRITON_CACHE_DIR": str(site / "triton")}
    return {**os.environ, **caches, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}


def end(process: subprocess.Popen[bytes]) -> None:
    """End the process, with everything that it started in its session."""
    for number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, number)
            process.wait(wait_s)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def describe(site: Path) -> dict[str, Any]:
    """Describe the machine in its own process: one that asks for a CUDA device takes its memory. Raises SystemExit."""
    command = [sys.executable, "-m", "benchmarks.gpu_check.versions"]
    variables = environment(site)
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False, timeout=DESCRIBE_S
        )
    except subprocess.TimeoutExpired:
        raise SystemExit(f"PyTorch or the driver did not answer within {DESCRIBE_S:.0f} s; try nvidia-smi") from None
    if done.returncode:
        reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise SystemExit(
            f"PyTorch cannot be imported ({reason}): make gpu-check PYTHON=/path/to/python3 names one that can"
        )
    description: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return description


def main() -> int:
    names = ", ".join(part.name for part in PARTS)
    parser = argparse.ArgumentParser(prog="make gpu-check", description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"of {names}; default: all")
    parser.add_argument("--folder", type=Path, help="for gpu_check.json; default: benchmarks/results, on a CPU none")
    parser.add_argument("--wheels", type=Path, default=ROOT / ".wheels", help="what `make gpu-check-wheels` fetched")
    options = parser.parse_args()
    if unknown := set(options.parts) - {part.name for part in PARTS}:
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {names}")
    with tempfile.TemporaryDirectory(prefix="onbeat-gpu-check-", ignore_cleanup_errors=True) as folder:
        site = Path(folder)
        missing = unpack(options.wheels, site)
        described = describe(site)
        described["problems"] += [missing] * bool(missing)
        default = ROOT / "benchmarks" / "results" if described["device"] == "cuda" else None
        check = Check(options.folder or default, site, described)
        wanted = [part for part in PARTS if not options.parts or part.name in options.parts]
        return run_all(check, [part for part in wanted if not (missing and part.needs_packages)])


def run_all(check: Check, parts: list[Part]) -> int:
    """Return 0 when every part came to its end and met all its checks."""
    for problem in check.result["problems"]:
        print(problem)
    print(check.result.get("card", check.result["device"]), check.result["versions"])
    for part in parts:
        check.run(part)
    bad = [name for name, part in check.result["parts"].items() if part["status"] != "done"]
    print(f"{len(parts) - len(bad)} of {len(parts)} parts are right", *([f"(not {', '.join(bad)})"] if bad else []))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
