"""Lint of the size of classes: a class that holds more than twelve values is two classes."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
MAX_ATTRIBUTES = 12


def attributes(definition: ast.ClassDef) -> set[str]:
    """Return the names that the methods of a class assign in `self.name = ...`."""
    methods = (member for member in definition.body if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef))
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
    assert dict(large_classes()) == {}, f"split them; a class has at most {MAX_ATTRIBUTES} attributes"
