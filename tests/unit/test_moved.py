"""Names of modules that have moved still work, and name the new place."""

from importlib import import_module

import pytest


@pytest.mark.parametrize(
    ("old", "name", "new"),
    [
        ("onbeat.types", "JobRecord", "onbeat.contracts.records"),
        ("onbeat.types", "JobState", "onbeat.contracts.states"),
        ("onbeat.section", "Float", "onbeat.contracts.section"),
        ("onbeat.errors", "OnbeatError", "onbeat.contracts.errors"),
        ("services.rollout.engines.interface", "Engine", "onbeat.engines"),
        ("services.rollout.engines.arrivals", "gathered", "onbeat.engines.arrivals"),
        ("services.rollout.engines.registry", "EngineDied", "onbeat.engines"),
    ],
)
def test_moved_name_works_with_a_warning(old: str, name: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{old}.{name} is now {new}.{name}"):
        value = getattr(import_module(old), name)
    assert value is getattr(import_module(new), name)


def test_unknown_name_of_a_moved_module_is_refused() -> None:
    with pytest.raises(ImportError):
        exec("from onbeat.types import NoSuchRecord")
