"""Lint of import circles: no module reaches itself by imports, those inside functions and dynamic ones included."""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DASHBOARD = ROOT / "services/broker/dashboard"
JS_IMPORT = re.compile(r"""(?:\bfrom|\bimport\s*\(?)\s*["'](\./[^"']+)["']""")

Graph = dict[str, set[str]]  # module -> the modules that it imports


def python_graph(folder: Path, root: Path = ROOT) -> Graph:
    """Return the imports between the modules of a folder. A package is the module of its `__init__.py`."""
    paths = {module_name(path.relative_to(root)): path for path in folder.rglob("*.py")}
    return {name: {module for module in imports_of(path, paths) if module != name} for name, path in paths.items()}


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """Yield those of the modules that a file imports. A package counts only where a name of its own is taken."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names if alias.name in modules)
            case ast.ImportFrom(module=str(package), names=names, level=0):
                for alias in names:
                    module = f"{package}.{alias.name}"
                    yield from {module if module in modules else package} & modules.keys()
            case ast.ImportFrom(level=level) if level:
                raise ValueError(f"{path}:{node.lineno}: write the whole name of the module instead of a relative one")
            case ast.Call(args=[ast.Constant(value=str(name)), *_], func=func) if name in modules:
                if ast.unparse(func).rpartition(".")[2] in ("import_module", "__import__"):
                    yield name


def dashboard_graph(folder: Path = DASHBOARD) -> Graph:
    paths = [path for path in folder.rglob("*.js") if "vendor" not in path.parts]
    return {path.name: {Path(name).name for name in JS_IMPORT.findall(path.read_text())} for path in paths}


def find_circle(graph: Graph) -> list[str]:
    """Return the modules of one circle, the first one again at its end; none where the graph has no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("part", ["onbeat", "services/broker", "services/rollout", "services/trainer"])
def test_no_python_modules_import_each_other_in_a_circle(part: str) -> None:
    graph = python_graph(ROOT / part)
    assert sum(map(len, graph.values())) > len(graph) / 2, "the imports were not found"
    assert find_circle(graph) == []


def test_no_modules_of_the_dashboard_form_a_circle() -> None:
    graph = dashboard_graph()
    assert {"jobs.js", "samples.js"} <= graph["app.js"], "dynamic imports count"
    assert find_circle(graph) == []


@pytest.mark.parametrize(
    "way", ["from part.b import name", "import part.b", "def f():\n    from part import b", 'import_module("part.b")']
)
def test_circle_of_python_modules_is_found(tmp_path: Path, way: str) -> None:
    folder = tmp_path / "part"
    folder.mkdir()
    for name, text in (("__init__", ""), ("a", way), ("b", "from part.c import name"), ("c", "import part.a")):
        (folder / f"{name}.py").write_text(text)
    assert set(find_circle(python_graph(folder, tmp_path))) == {"part.a", "part.b", "part.c"}


@pytest.mark.parametrize(
    "way", ['import { x } from "./b.js";', 'import "./b.js";', 'const b = await import("./b.js");']
)
def test_circle_of_javascript_modules_is_found(tmp_path: Path, way: str) -> None:
    (tmp_path / "a.js").write_text(way)
    (tmp_path / "b.js").write_text('import {\n  y,\n} from "./a.js";')
    assert set(find_circle(dashboard_graph(tmp_path))) == {"a.js", "b.js"}
