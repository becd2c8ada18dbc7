"""`onbeat plan memory` against measured peaks, on a CPU with the whole local stack: five configurations in float32.

The models are random Llamas from 0.1 to 0.4 billion parameters and the quick start's; full and LoRA, with and without a
reference. Random models get no reward, so they have a KL term: without one their groups would be left out. The goal:
the trainer's peak, and that of the rollout with its engine core, are within a tenth of what was planned.

    python benchmarks/memory_plan.py              all, into benchmarks/results/memory_plan.json
    python benchmarks/memory_plan.py full lora    some of them, into the same file

A case starts only where the machine has what is planned for it, and SPARE_BYTES for others besides.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from fsdp_memory import write_model
from harness import RESULTS, ROOT, command_line, save, start, temporary_folder
from memory import run, scarce_memory

from onbeat.cli.plan import OTHERS_BYTES
from onbeat.machine.memory import read_memory

GOAL = 0.1
SPARE_BYTES = 5_000_000_000
# The engine core can only be distinguished from its rollout once it has imported vLLM. A page of the weights that both
# have mapped counts half for each.
SIDES = {"trainer": ["trainer"], "rollout": ["rollout", "engine core"]}
PROMPT_TOKENS = 45  # tokens of the quick start's prompts
SMALL = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12}
LARGE = {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 14}
# Groups as in the quick start, so that rows are as long.
SHORT = ("model.dtype=float32", "schedule.num_iterations=3")
KL = ("objective.kl.coef=0.05",)
CASES: dict[str, tuple[dict[str, int] | None, tuple[str, ...]]] = {
    "full": (None, ()),
    "reference": (None, KL),
    "lora": (None, ("lora.rank=16",)),
    "checkpointing": (SMALL, (*KL, "training.has_gradient_checkpointing=true")),
    "large": (LARGE, KL),
}


def plan(overrides: list[str]) -> dict[str, dict[str, int]]:
    settings = [part for override in overrides for part in ("--set", override)]
    command = [sys.executable, "-m", "onbeat.cli", "plan", "memory", "benchmarks/jobs/quickstart-0.1.toml", *settings]
    command += ["--prompt-tokens", str(PROMPT_TOKENS), "--json"]
    planned: dict[str, dict[str, int]] = json.loads(
        subprocess.run(command, check=True, cwd=ROOT, capture_output=True).stdout
    )
    return planned


def compare(name: str, folder: Path) -> dict[str, Any]:
    sizes, changes = CASES[name]
    overrides = [*SHORT, *changes]
    if sizes is not None:
        write_model(folder / name, sizes)
        overrides.append(f"model.path={folder / name}")
    planned = plan(overrides)
    needed = sum(size for parts in planned.values() for size in parts.values()) + OTHERS_BYTES + SPARE_BYTES
    if (available := read_memory().available_bytes) < needed:
        raise SystemExit(f"{name} needs {needed / 1e9:.1f} GB, {available / 1e9:.1f} are available; end other programs")
    with scarce_memory(needed):
        measured = run(*overrides)
    whole = {process: round(sum(parts.values()) / 1e6) for process, parts in planned.items()}
    expected = {side: sum(whole[part] for part in side_parts) for side, side_parts in SIDES.items()}
    by_service = measured["peak_by_service"]
    peaks = {"trainer": by_service["trainer"], "rollout": measured["peak_of_rollout_with_engine"]}
    return {
        "overrides": [override for override in overrides if not override.startswith("model.path")],
        "planned": expected,
        "measured": peaks,
        "ratio": {side: round(expected[side] / peaks[side], 3) for side in SIDES},
        "parts": planned,
        "measured_apart": {name: by_service[name] for name in SIDES["rollout"]},  # peaks at different moments
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("cases", nargs="*", help=f"default: {' '.join(CASES)}")
    names = start(parser).cases
    if unknown := sorted(set(names) - set(CASES)):
        parser.error(f"unknown: {', '.join(unknown)}; cases are {', '.join(CASES)}")
    file = RESULTS / "memory_plan.json"
    known = json.loads(file.read_text())["cases"] if names and file.is_file() else {}
    with temporary_folder() as folder:
        for name in names or CASES:
            known[name] = compare(name, folder)
            save_cases({case: known[case] for case in CASES if case in known})


def save_cases(cases: dict[str, Any]) -> None:
    ratios = [ratio for case in cases.values() for ratio in case["ratio"].values()]
    result = {
        "goal": f"planned / measured within {GOAL} of 1",
        "is_met": len(cases) == len(CASES) and all(abs(ratio - 1) <= GOAL for ratio in ratios),
        "unit": "MB (parts: bytes)",
        "cases": cases,
    }
    save("memory_plan", result)


if __name__ == "__main__":
    main()
