"""Lint of the size of classes: a class that holds more than twelve values is two classes."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_ATTRIBUTES = 12
# Classes above the limit, with the number they may have until they are split. Only ever shorten this.
EXCEPTIONS = {
    "services.broker.chats.Conversation": 13,
    "services.rollout.claim_loop.ClaimLoop": 17,
    "services.rollout.gate.VersionGate": 15,
    "services.trainer.publisher.Publisher": 16,
}


def attributes(found: ast.ClassDef) -> set[str]:
    """Return the names that the methods of a class assign in `self.name = ...`."""
    methods = (each for each in found.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
    nodes = (node for method in methods for node in ast.walk(method) if isinstance(node, ast.Attribute))
    return {
        node.attr
        for node in nodes
        if isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }


def large_classes() -> Iterator[tuple[str, int]]:
    for path in sorted(path for folder in ("onbeat", "services") for path in (ROOT / folder).rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and (count := len(attributes(node))) > MAX_ATTRIBUTES:
                yield f"{module}.{node.name}", count


def test_no_class_has_more_attributes_than_it_may() -> None:
    too_large = {name: count for name, count in large_classes() if count > EXCEPTIONS.get(name, MAX_ATTRIBUTES)}
    assert too_large == {}, f"split them; a class has at most {MAX_ATTRIBUTES} attributes"


def test_exceptions_are_no_larger_than_needed() -> None:
    """A class that was split leaves the list, so that it cannot grow back."""
    found = dict(large_classes())
    assert {name: found.get(name, 0) for name in EXCEPTIONS} == EXCEPTIONS
