"""One run of the quick start, recorded for the README: its output, and the picture of its job on the dashboard.

Writes benchmarks/results/quick_start.json, docs/screenshots/job.png and the output in README.md. It needs Chromium.
"""

import asyncio
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from dashboard_page import STEP_MS, chromium
from harness import ROOT, command_line, note_redis, own_dtype, save, start, temporary_folder

from onbeat.local.stack import StackOptions, local_stack

README, PICTURE = ROOT / "README.md", ROOT / "docs" / "screenshots" / "job.png"
FENCE = "```"
# Two blanks: examples of responses begin with a reward, too.
TOTALS = ("reward  ", "held out  ", "time  ", "tokens  ", "audit  ")
CUT_FROM = "  policy entropy"  # lines of iterations are wide
OTHER_PICTURE = " The picture is of another run."  # a sentence of README until a run with its picture


def first_screen(output: list[str]) -> list[str]:
    """Return the lines of a run's output that the README shows."""

    def lines(*starts: str) -> list[str]:
        return [line for line in output if line.startswith(starts)]

    place = [line for line in output if ": trainer on core" in line]
    first, *_, last = lines("iteration ")
    middle = [cut(first), "...", cut(last)]
    return [*place, *lines("job.dtype:", "precision:"), *middle, *lines("job.state: SUCCEEDED"), "", *lines(*TOTALS)]


def cut(line: str) -> str:
    kept, was_cut, _ = line.partition(CUT_FROM)
    return f"{kept}  ..." if was_cut else kept


def shown_in(readme: str) -> list[str]:
    """Return the lines of the README's first block of output."""
    return readme.split(f"\n{FENCE}\n")[1].splitlines()


def with_run(readme: str, output: list[str]) -> str:
    """Return the README with this run in it."""
    before, _, after = readme.split(f"\n{FENCE}\n", 2)
    block = f"\n{FENCE}\n".join([before, "\n".join(first_screen(output)), after])
    return block.replace(OTHER_PICTURE, "")


def digest_of(picture: Path) -> str:
    return hashlib.sha256(picture.read_bytes()).hexdigest()


def run(data_dir: Path, overrides: list[str]) -> tuple[list[str], str]:
    """Run the quick start. Return the lines of its output, as in a file, and the id of the job."""
    report = data_dir / "report.json"
    command = [sys.executable, "-m", "onbeat.cli", "run", "examples/quickstart.toml", "--report", str(report)]
    command += ["--data-dir", str(data_dir), *overrides]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=1800)
    return done.stdout.splitlines(), json.loads(report.read_text())["job_id"]


async def draw(url: str, job_id: str, picture: Path) -> None:
    async with chromium() as browser:
        page = await browser.new_page(viewport={"width": 1280, "height": 1500})
        await page.goto(f"{url}/#/jobs/{job_id}", wait_until="networkidle", timeout=STEP_MS)
        await page.locator("[data-testid=chart-reward] canvas").wait_for(timeout=STEP_MS)
        await page.screenshot(path=picture)


def record(overrides: list[str], picture: Path) -> dict[str, Any]:
    note_redis()
    with temporary_folder() as data_dir:
        output, job_id = run(data_dir, overrides)
        with local_stack(StackOptions(data_dir, is_view=True), "view", print) as (url, _):
            asyncio.run(draw(url, job_id, picture))
    return {"output": output, "picture_sha256": digest_of(picture)}


def main() -> None:
    start(command_line(__doc__))
    result = record([], PICTURE)
    save("quick_start", result, own_dtype())
    README.write_text(with_run(README.read_text(), result["output"]))


if __name__ == "__main__":
    main()
