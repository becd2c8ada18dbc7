"""What the conversion of a bundled model changes in foreign modules, and leaves."""

from types import ModuleType

from services.trainer.model.bundled import cached


def test_functions_keep_their_results_inside_the_block_alone() -> None:
    module, calls = ModuleType("foreign"), []
    module.read = read = calls.append
    with cached(module, "read"):
        module.read("file")
        module.read("file")
        module.read("other")
    assert module.read is read
    assert calls == ["file", "other"]
