"""The contract of the annexes in pyproject.toml catches what it promises to catch."""

import tomllib
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest
from importlinter.contracts.protected import ProtectedContract

ROOT = Path(__file__).parents[3]
LINT = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
(OPTIONS,) = [contract for contract in LINT["contracts"] if contract["type"] == "protected"]


@pytest.fixture(scope="module")
def house() -> grimp.ImportGraph:
    return grimp.build_graph(*LINT["root_packages"], cache_dir=None)


def wrong_imports(house: grimp.ImportGraph, options: dict) -> Iterator[tuple[str, str]]:
    check = ProtectedContract(OPTIONS["name"], {}, options).check(house, verbose=False)
    for annex in check.metadata["illegal_imports"]:
        yield from ((link["importer"], link["imported"]) for link in annex.illegal_links)


@pytest.mark.parametrize("annex", OPTIONS["protected_modules"])
def test_new_core_module_may_not_import_an_annex(house: grimp.ImportGraph, annex: str) -> None:
    house.add_import(importer="services.broker.new_module", imported=annex)
    try:
        assert list(wrong_imports(house, OPTIONS)) == [("services.broker.new_module", annex)]
    finally:
        house.remove_module("services.broker.new_module")


def test_imports_of_annexes_inside_functions_count(house: grimp.ImportGraph) -> None:
    others = [name for name in OPTIONS["allowed_importers"] if name != "services.trainer.__main__"]
    wrong = set(wrong_imports(house, OPTIONS | {"allowed_importers": others}))
    assert ("services.trainer.__main__", "services.trainer.attention.npu") in wrong
