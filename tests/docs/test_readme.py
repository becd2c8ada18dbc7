"""The README stays short; its figures, and those of some other pages, are those that were measured."""

import json
import re
from statistics import mean, median
from typing import Any

import pytest

from tests.docs.pages import ROOT, text_of

README = text_of("README.md")


def results(name: str) -> Any:
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


def row(start: str) -> str:
    """Return the table's row that begins with these words."""
    (line,) = [line for line in README.splitlines() if line.startswith(f"| {start}")]
    return line


def test_readme_has_at_most_a_hundred_lines() -> None:
    assert len(README.splitlines()) <= 100


def test_output_and_picture_are_of_one_recorded_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """`benchmarks/quick_start.py` writes both, and the recording. A picture of another run is named as such."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import quick_start

    recordings = [json.loads(path.read_text()) for path in (ROOT / "benchmarks/results").glob("quick_start*.json")]
    shown = quick_start.shown_in(README)
    (recording,) = [run for run in recordings if quick_start.first_screen(run["output"]) == shown]
    is_of_another = recording.get("picture_sha256") != quick_start.digest_of(quick_start.PICTURE)
    assert is_of_another == (quick_start.OTHER_PICTURE in README)


def test_new_run_takes_the_place_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import quick_start

    before = [line for line in quick_start.shown_in(README) if line != "..."]
    speed = r"(TPSPD|\d+\.\d+ tokens/s per device).*"  # a recording has the words of its day
    output = [re.sub(speed, "1.5 tokens/s per device  policy entropy 2.471", line) for line in before]
    lines = ["using Redis 7.2.4", *output, "speed       1 tokens/s per device", "reward 0.5  1 + 1 -> 3"]
    text = quick_start.with_run(README, lines)
    shown = [re.sub(speed, "1.5 tokens/s per device  ...", line) for line in quick_start.shown_in(README)]
    assert quick_start.shown_in(text) == shown
    assert quick_start.OTHER_PICTURE not in text
    assert text.endswith(README[-1000:])


def test_time_of_the_quick_start_stands_as_measured() -> None:
    measured = results("time_to_reward")
    scores = [run["held_out"]["reward_mean"][-1] for run in measured["onbeat"]]
    shown = row("quick start, from the command")
    assert f"| {measured['seconds_to_reward']['median']:.0f} s; " in shown
    assert f"held-out reward at the end {min(scores):.2f} to {max(scores):.2f}, no response cut" in shown
    assert len(scores) == measured["num_seeds_that_reached_it"] == 5
    assert max(run["held_out"]["truncated_frac"][-1] for run in measured["onbeat"]) == 0


@pytest.mark.parametrize("name", ["time_to_reward_trl", "time_to_reward_trl_float32"])
def test_times_to_reward_are_named_with_their_seeds(name: str) -> None:
    measured = results(name)
    assert isinstance(measured["trl"], dict), "one run"
    onbeat_s, trl_s = round(measured["seconds_to_reward"]["median"]), round(measured["trl"]["seconds_to_reward"])
    (shown,) = [line for line in text_of("docs/performance.md").splitlines() if f"`{name}.json`" in line]
    assert f" {trl_s} s, one seed" in shown
    assert f" {onbeat_s} s, median of five seeds" in shown
    job_s = median(run["job_s"] for run in measured["onbeat"])
    assert f"| {job_s:.0f} s (median of five seeds, `{name}.json`) |" in text_of("docs/platforms.md")
    if name == "time_to_reward_trl":
        assert f"| {onbeat_s} s; TRL" in row("0.1's quick start")
        assert row("0.1's quick start").endswith(f"one seed: {trl_s} s |")


@pytest.mark.parametrize("name", ["vs_trl", "vs_trl_float32", "episodes", "episodes_float32"])
def test_seconds_beside_trl_stand_as_measured(name: str) -> None:
    seconds = results(name)["seconds_per_step"]
    (shown,) = [line for line in text_of("docs/performance.md").splitlines() if f"`{name}.json`" in line]
    _, trl_s, onbeat_s = re.findall(r"\| ([^|]*?)(?: s)? (?=\|)", shown)[:3]
    assert [float(trl_s), float(onbeat_s)] == pytest.approx([seconds["trl"], seconds["onbeat"]], rel=0.03)


def test_peak_memory_is_that_of_the_named_instructions() -> None:
    scarce, plenty = [], []
    for measured in (results("memory")["bfloat16"], results("memory_float32")["float32"]):
        scarce.append(f"{measured['peak'] / 1000:.1f} GB")
        plenty.append(f"{measured['with_plenty']['peak'] / 1000:.1f} GB")
    shown = row("peak memory of 0.1's quick start, in bfloat16, and in float32 with AVX2 alone")
    assert f"| {scarce[0]} in bfloat16 (Intel with AMX), {scarce[1]} in float32; " in shown
    assert shown.endswith(f"{plenty[0]} and {plenty[1]} |")


def test_speed_of_periodic_stands_beside_its_bound() -> None:
    measured, longer = results("overlap"), results("overlap_auto")
    assert row("overlapped").endswith(
        f"{measured['ratio']:.2f} times the speed; the bound, from the times of `sync`: {measured['bound']:.2f}; "
        f"in rows as long as memory allows {longer['ratio']:.2f} and {longer['bound']:.2f} |"
    )


def test_storms_are_counted_with_their_engine() -> None:
    measured = results("chaos")
    assert row(f"{measured['num_storms']} jobs, {len(measured['vllm']['outcomes'])} of them with vLLM")
    assert f"{measured['num_faults']} faults" in row(f"{measured['num_storms']} jobs")


def test_quick_start_on_a_gpu_stands_as_measured() -> None:
    (figures_of_quickstart,) = results("gpu_check")["parts"]["quickstart"]["figures"]
    reward, seconds = mean(figures_of_quickstart["reward_mean"][-5:]), median(figures_of_quickstart["wall_s"][8:])
    assert row("one NVIDIA H100").endswith(f"mean reward {reward:.2f}, {seconds:.1f} s an iteration |")


@pytest.mark.parametrize("name", ["examples_learn", "examples_learn_float32"])
def test_examples_with_episodes_learn_as_their_page_says(name: str) -> None:
    for example, measured in ((example_name, results(name)[example_name]) for example_name in ("game", "tools")):
        figures = (
            f"{measured['mean_of_first_5']:.2f} | {measured['mean_of_last_5']:.2f} | {measured['job_s'] / 60:.1f} |"
        )
        assert re.search(
            rf"\| {example}, {measured['dtype']}.* \| {re.escape(figures)}", text_of("docs/environments.md")
        )
