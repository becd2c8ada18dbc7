"""Tests that leftovers of killed test sessions are removed from the engine, and things of others stay."""

import subprocess
import sys

import pytest

from tests.containers.leftovers import KINDS, host_token, is_dead, new_project


@pytest.fixture(scope="module")
def dead_process() -> int:
    """Return the id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(10)
    return process.pid


@pytest.mark.parametrize("kind", KINDS)
def test_a_project_is_dead_with_its_process_on_this_machine(kind: str, dead_process: int):
    alive = new_project(kind)
    host, token = host_token(), alive.split("-")[3]
    dead = alive.replace(f"-{token}-", f"-{dead_process}-")
    assert (is_dead(alive), is_dead(dead)) == (False, True)
    assert not is_dead(alive.replace(f"-{token}-", "-1-")), "of another user, perhaps"
    assert not is_dead(dead.replace(host, "abcdef" if host != "abcdef" else "fedcba")), "of another machine"


@pytest.mark.parametrize("name", ["onbeat", "onbeat-test", "onbeat-test-1a2b3c", "mine-1a2b3c-99-1a2b3c", ""])
def test_other_names_are_never_taken_for_a_dead_project(name: str):
    assert not is_dead(name)
