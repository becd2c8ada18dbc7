"""Lint of the language, as CONTRIBUTING describes it: first words of docstrings and comments, names, banned words."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDERS = ("benchmarks", "deploy", "docs", "examples", "onbeat", "requirements", "services", "tests")
SHOWN = ("services/broker/chat/routes.py",)  # texts for users that are not in this form
CLAUSES = {  # words that begin a clause or a fragment, or refer to a word before
    *("How", "Its", "Of", "Than", "That", "Their", "Those", "What", "Whatever", "Whether", "Which", "Who", "Whoever"),
    *("Whom", "Whose"),
}
PREPOSITIONS = {
    *("Among", "At", "Behind", "Below", "Beside", "Besides", "Between", "Beyond", "By", "For", "From", "In", "Into"),
    *("Of", "On", "To", "Under", "With", "Without"),
}
NO_VERBS = {
    *(CLAUSES | PREPOSITIONS),
    *("A", "All", "An", "As", "Every", "No", "None", "One", "The", "Until", "When", "Where", "Why"),
    *("Raises", "Returns", "Yields"),
}
NO_NOUNS = {*CLAUSES, "By", "From", "Until", "When", "Where", "Why"}
NO_SITUATIONS = {*CLAUSES, *PREPOSITIONS, "As", "Raises", "Returns", "Yields"}
BANNED = {"whoever", "nobody", "somebody"}
PRONOUNS = {"each", "found", "it", "its", "mine", "of", "own", "them", "these", "those", "what", "which"}
MARKS = {".js": "//", ".lua": "--", ".yaml": "#", ".yml": "#"}
MAX_TEST_NAME = 60  # characters

Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "v1" not in path.parts:  # generated
                yield path


def scripts() -> Iterator[Path]:
    """Yield the files of the repository that have comments and are not Python's."""
    folders = [ROOT / folder for folder in (*FOLDERS, ".github")]
    for path in (*ROOT.glob("*.y*ml"), *ROOT.glob(".*.y*ml"), *(path for root in folders for path in root.rglob("*"))):
        if path.suffix in MARKS and "vendor" not in path.parts:
            yield path


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def docstrings(path: Path) -> Iterator[tuple[ast.AST, int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and (text := ast.get_docstring(node)):
            yield node, getattr(node, "lineno", 1), text


def is_property(function: Function) -> bool:
    decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
    return any("property" in decorator or decorator.endswith("setter") for decorator in decorators)


def is_badly_begun(node: ast.AST, text: str) -> bool:
    first = text.split()[0]
    if not isinstance(node, Function):
        return first in NO_NOUNS
    if node.name.startswith("test_"):  # the name is the promise, the docstring describes the situation
        return first in NO_SITUATIONS
    return first in NO_VERBS or (not text[0].isalpha() and not text.startswith(">>>"))


def comments_of_python(path: Path) -> Iterator[tuple[int, str, bool]]:
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string[1:].strip(), bool(token.line[: token.start[1]].strip())


def comments_of_script(path: Path) -> Iterator[tuple[int, str, bool]]:
    mark = re.compile(rf"(|.*?\s)({MARKS[path.suffix]}|/\*\*?)\s(.*)")
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if match := mark.fullmatch(line):
            yield number, match[3].strip(), bool(match[1].strip())


def comments_of(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield the line and the first line's text of each comment, and whether it is a trailing one."""
    last = -1
    for number, text, is_trailing in (comments_of_python if path.suffix == ".py" else comments_of_script)(path):
        if is_trailing or number != last + 1:
            yield number, text, is_trailing
        last = -1 if is_trailing else number


def is_fragment(text: str, is_trailing: bool) -> bool:
    first = re.split(r"[\s,:;]", text)[0].capitalize()
    return first in CLAUSES or (is_trailing and (first in PREPOSITIONS or first == "Each"))


def names_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each variable and parameter."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def test_docstrings_begin_with_a_verb_or_of_classes_with_a_noun() -> None:
    wrong = [
        f"{name_of(path)}:{line}: {text.splitlines()[0]}"
        for path in sources(*FOLDERS)
        if not name_of(path).startswith(SHOWN)
        for node, line, text in docstrings(path)
        if not (isinstance(node, Function) and is_property(node)) and is_badly_begun(node, text)
    ]
    assert wrong == []


def test_comments_are_sentences_and_trailing_ones_phrases() -> None:
    wrong = [
        f"{name_of(path)}:{line}: {text}"
        for path in (*sources(*FOLDERS), *scripts())
        for line, text, is_trailing in comments_of(path)
        if is_fragment(text, is_trailing)
    ]
    assert wrong == []


def test_variables_are_no_pronouns() -> None:
    wrong = [
        f"{name_of(path)}:{line}: {name}"
        for path in sources(*FOLDERS)
        for line, name in names_in(ast.parse(path.read_text()))
        if name in PRONOUNS
    ]
    assert wrong == []


def test_comments_and_docstrings_avoid_banned_words() -> None:
    wrong = []
    for path in sources("onbeat", "services"):
        texts = [(line, text) for _, line, text in docstrings(path)]
        texts += [(line, text) for line, text, _ in comments_of_python(path)]
        wrong += [f"{name_of(path)}:{line}" for line, text in texts if BANNED & set(re.findall(r"\w+", text.lower()))]
    assert wrong == []


def test_names_of_tests_are_short() -> None:
    too_long = [
        f"{name_of(path)}:{node.lineno}: {node.name} has {len(node.name)} characters; at most {MAX_TEST_NAME}"
        for path in sources("tests")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, Function) and node.name.startswith("test_") and len(node.name) > MAX_TEST_NAME
    ]
    assert too_long == []
