"""Lint of forks: with gRPC loaded, a forked process may crash in gRPC's fork handlers before it begins its command."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_no_process_with_grpc_in_it_forks_for_a_preexec_fn() -> None:
    guard = "onbeat/process/guard.py"  # it has no gRPC
    folders = ("onbeat", "services", "tests", "benchmarks", "examples", "deploy", "docs")
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    forking = {str(path.relative_to(ROOT)) for path in paths if re.search(r"preexec_fn\s*=", path.read_text())}
    assert forking == {guard}, "use tests/launcher.py"
