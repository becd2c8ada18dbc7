"""The worked example of docs/performance.md is what its formula makes of the benchmark's numbers."""

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest

from tests.docs.pages import ROOT, blocks_of, text_of

pytestmark = pytest.mark.slow

PAGE = "docs/performance.md"


def measured() -> SimpleNamespace:
    results = json.loads((ROOT / "benchmarks/results/periodic_vs_sync.json").read_text())
    return SimpleNamespace(**results["medians"]["periodic"])


def predict(new_rollouts: int, new_trainers: int) -> tuple[float, float]:
    namespace: dict[str, Any] = {}
    (code,) = [block.text for block in blocks_of(PAGE) if "def predict(" in block.text]
    exec(code, namespace)
    seconds, tpspd = namespace["predict"]([measured()], 1, 1, new_rollouts, new_trainers)
    return seconds, tpspd


def test_table_is_what_the_formula_gives() -> None:
    rows = re.findall(r"^\| (\d) \| (\d) \| ([\d.]+)[^|]* \| (\d+)", text_of(PAGE), re.M)
    assert len(rows) == 4
    for rollouts, trainers, seconds, tpspd in rows:
        expected = predict(int(rollouts), int(trainers))
        assert (float(seconds), int(tpspd)) == (round(expected[0], 1), round(expected[1]))


def test_text_has_the_measured_numbers() -> None:
    record = measured()
    numbers = (f"`wall_s` {record.wall_s:.1f}", f"`rollout_idle_frac` {record.rollout_idle_frac:.2f}")
    numbers += (f"`trainer_idle_frac` {record.trainer_idle_frac:.2f}", f"`tpspd` {record.tpspd:.0f}")
    flat = " ".join(text_of(PAGE).split())
    assert [number for number in numbers if number not in flat] == []
    generating = (1 - record.rollout_idle_frac) * record.wall_s
    training = (1 - record.trainer_idle_frac) * record.wall_s
    assert f"generating is {generating:.1f} core-seconds, training {training:.1f}" in flat
    assert f"and {record.wall_s - training:.1f} s overlap with nothing" in flat
    assert f"{training / generating:.1f} trainers for each rollout" in flat
