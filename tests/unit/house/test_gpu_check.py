"""The frame of `make gpu-check`: parts fail alone, what is missing is said in a sentence, what travels is pinned."""

import json
from importlib.metadata import distributions
from pathlib import Path

import pytest

from benchmarks.gpu_check import wheels
from benchmarks.gpu_check.__main__ import Check, Part, run_all
from benchmarks.gpu_check.versions import problem_of

pytestmark = pytest.mark.slow


@pytest.fixture
def check(tmp_path):
    (tmp_path / "site").mkdir()
    return Check(tmp_path / "results", tmp_path / "site", {"device": "cpu", "problems": [], "versions": {}})


def test_part_that_fails_or_hangs_costs_only_itself(check, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu_check.__main__.GRACE_S", 1.0)
    (tmp_path / "site" / "no_such_part.json").write_text('{"checks": [{"name": "a", "is_met": true}], "left_out": []}')
    parts = [Part("no_such_part", 30, "breaks"), Part("attention", 0.2, "hangs"), Part("part", 60, "is right")]
    assert run_all(check, parts) == 1
    monkeypatch.setattr("benchmarks.gpu_check.__main__.TOTAL_S", 0.0)
    run_all(check, [Part("step", 100, "too late")])
    parts = json.loads((tmp_path / "results" / "gpu_check.json").read_text())["parts"]
    assert [part["status"] for part in parts.values()] == ["failed", "timeout", "done", "not started"]
    assert "No module named" in parts["no_such_part"]["error"]
    assert parts["no_such_part"]["checks"] == [{"name": "a", "is_met": True}], "what it found before its end is kept"
    logs = {path.stem for path in (tmp_path / "results" / "gpu_check_logs").iterdir()}
    assert logs == {"no_such_part", "attention", "part"}, "what they wrote can be read afterwards"


def test_old_pytorch_is_named():
    for version, problem in (("2.13.0", ""), ("3.0.0", ""), ("2.9.1", "is 2.9.1"), (None, "is missing")):
        sentence = problem_of("PyTorch", version, (2, 11))
        assert (problem in sentence and "2.11 or newer" in sentence) if problem else not sentence


def test_missing_packages_are_named_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(wheels, "MODULES", ("redis", "no_such_module"))
    sentence = wheels.unpack(tmp_path / "wheels", tmp_path / "site")
    assert sentence.startswith("missing here: no_such_module; run `make gpu-check-wheels`")
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "torn-1.0-py3-none-any.whl").write_bytes(b"torn")
    assert "cannot be unpacked" in wheels.unpack(tmp_path / "wheels", tmp_path / "site")


def test_engines_and_rewards_are_found_without_an_installation(tmp_path):
    assert wheels.unpack(tmp_path, tmp_path / "site") == "", "everything is installed where tests run"
    (distribution,) = distributions(path=[str(tmp_path / "site")])
    names = {entry.name for entry in distribution.entry_points if entry.group == "onbeat.engines"}
    assert names == {"vllm", "transformers"}


def test_every_package_that_travels_is_pinned():
    requirements = Path(__file__).parents[3] / "requirements"
    pins = {line.partition("==")[0] for line in (requirements / "cpu.lock").read_text().splitlines()}
    travelling = set((requirements / "gpu-check-wheels.in").read_text().splitlines()[1:])
    assert len(travelling) > 30
    assert travelling <= pins
