"""Lint of the language, as STYLE and CONTRIBUTING describe it: how docstrings begin, and words that are not ours."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
SHOWN = ("services/broker/chat/routes.py",)  # texts for users that are not in this form
NO_VERBS = {
    *("A", "All", "An", "As", "At", "By", "Every", "For", "From", "How", "In", "Its", "No", "None", "Of", "One", "The"),
    *("Those", "To", "Until", "What", "When", "Where", "Whether", "Which", "Who", "Whoever", "Why", "With", "Without"),
    *("Raises", "Returns", "Yields"),
}
NO_NOUNS = {"By", "From", "How", "Of", "Until", "What", "When", "Where", "Whether", "Which", "Whoever", "Whom", "Why"}
BANNED = {"whoever", "nobody", "somebody"}
MAX_TEST_NAME = 60  # characters

Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "v1" not in path.parts:  # generated
                yield path


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def docstrings(path: Path) -> Iterator[tuple[ast.AST, int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and (text := ast.get_docstring(node)):
            yield node, getattr(node, "lineno", 1), text


def is_property(function: Function) -> bool:
    return any(
        "property" in ast.unparse(each) or ast.unparse(each).endswith("setter") for each in function.decorator_list
    )


def is_badly_begun(node: ast.AST, text: str) -> bool:
    if not isinstance(node, Function):
        return text.split()[0] in NO_NOUNS
    return text.split()[0] in NO_VERBS or (not text[0].isalpha() and not text.startswith(">>>"))


def test_docstrings_begin_with_a_verb_or_of_classes_with_a_noun() -> None:
    wrong = [
        f"{name_of(path)}:{line}: {text.splitlines()[0]}"
        for path in sources("onbeat", "services")
        if not name_of(path).startswith(SHOWN)
        for node, line, text in docstrings(path)
        if not (isinstance(node, Function) and is_property(node)) and is_badly_begun(node, text)
    ]
    assert wrong == []


def test_comments_and_docstrings_avoid_banned_words() -> None:
    found = []
    for path in sources("onbeat", "services"):
        texts = [(line, text) for _, line, text in docstrings(path)]
        tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        texts += [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
        found += [f"{name_of(path)}:{line}" for line, text in texts if BANNED & set(re.findall(r"\w+", text.lower()))]
    assert found == []


def test_names_of_tests_are_short() -> None:
    too_long = [
        f"{name_of(path)}:{node.lineno}: {node.name} has {len(node.name)} characters; at most {MAX_TEST_NAME}"
        for path in sources("tests")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, Function) and node.name.startswith("test_") and len(node.name) > MAX_TEST_NAME
    ]
    assert too_long == []
