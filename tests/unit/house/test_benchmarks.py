"""The benchmarks start by their path, from any folder, with a help that says how long they take."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from onbeat.local.redis_choice import RedisServer, Release

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
STARTED_BY_OTHERS = {  # processes of other benchmarks
    *("scale_engine", "scale_trainer", "trl_baseline", "trl_episodes", "weights_peer"),
}
SCRIPTS = sorted(
    path for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text() and path.stem not in STARTED_BY_OTHERS
)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_benchmark_reads_its_command_line(script: Path) -> None:
    calls = [node.func.id for node in ast.walk(ast.parse(script.read_text())) if is_plain_call(node)]
    assert "start" in calls
    assert "command_line" in calls


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_benchmark_that_starts_a_redis_names_it(script: Path) -> None:
    """`run_job` of the harness names that of its stack."""
    starts_redis = {"own_redis", "local_stack", "running", "stormy", "start_in_background", "embedded_server"}
    calls = {node.func.id for node in ast.walk(ast.parse(script.read_text())) if is_plain_call(node)}
    assert not calls & starts_redis or "note_redis" in calls


def test_result_names_kind_and_version_of_the_redis(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import harness

    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(harness, "REDIS_SERVERS", set())
    harness.save("without", {})
    harness.note_redis(RedisServer(Release("Valkey", (8, 0, 1)), "valkey-server"))
    harness.save("with", {})
    assert "redis" not in json.loads((tmp_path / "without.json").read_text())["machine"]
    assert json.loads((tmp_path / "with.json").read_text())["machine"]["redis"] == "Valkey 8.0.1"


def is_plain_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)


@pytest.mark.parametrize("name", ["ledger_throughput", "dashboard_api"])
def test_benchmark_starts_from_any_folder(name: str, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--help"]
    help_page = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert help_page.returncode == 0, help_page.stderr
    assert "how long it takes" in help_page.stdout or "minutes" in help_page.stdout


@pytest.mark.slow
def test_missing_arguments_name_the_starter() -> None:
    arguments = ["model", *"12345", "float32", "rows.jsonl"]  # no file for the result
    command = [sys.executable, str(BENCHMARKS / "trl_episodes.py"), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.stderr.endswith("It is started by episodes.py.\n"), ended.stderr


def test_busy_machine_is_warned_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import harness

    monkeypatch.setattr(sys, "argv", ["ledger_throughput.py"])
    monkeypatch.setattr(os, "getloadavg", lambda: (0.51, 0.0, 0.0))
    harness.start(harness.command_line("help"))
    assert "the load of this machine is 0.51" in capsys.readouterr().err
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5, 9.0, 9.0))
    harness.start(harness.command_line("help"))
    assert capsys.readouterr().err == ""


def test_overlap_is_measured_within_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine was twice as slow in the second round, which changes no ratio."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import overlap

    def iterations(wall_s: float, overlap_frac: float | None) -> list[dict[str, Any]]:
        times = dict.fromkeys(overlap.TIMES, 0.0) | {"wall_s": wall_s, "generate_s": 4.0, "first_group_s": 1.0}
        metrics = {"train/micro_batches_s": 8.0, "train/passes": 4}
        return [times | {"num_groups": 8, "overlap_frac": overlap_frac, "metrics": metrics}]

    rounds = [
        {"sync": iterations(14.0, 0.0), "periodic": iterations(10.0, 0.75)},
        {"sync": iterations(28.0, 0.0), "periodic": iterations(20.0, 0.5) + iterations(20.0, None)},
    ]
    summary = overlap.summary_of(rounds)
    assert (summary["ratio"], summary["overlap_frac"], summary["is_met"]) == (1.4, 0.625, True)
    assert summary["num_iterations"] == {"sync": 2, "periodic": 3}
    assert summary["num_rows"] == {"sync": 4, "periodic": 4}
    assert summary["parts_of_sync_s"]["barrier"] == 21.0 - 4.0 - 8.0
    assert overlap.bound_of(overlap.parts_of(rounds[0]["sync"])) == 14.0 / (9.0 + 2.0)  # training, and the first group
