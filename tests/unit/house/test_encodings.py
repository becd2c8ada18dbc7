"""Files are read and written in UTF-8, whatever the locale of the machine says."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_text_files_have_a_named_encoding():
    num_arguments = {"read_text": 1, "write_text": 2}  # positional arguments with the encoding, which is the last

    def calls_without_encoding() -> Iterator[str]:
        for path in sorted([*(ROOT / "onbeat").rglob("*.py"), *(ROOT / "services").rglob("*.py")]):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    needed = num_arguments.get(node.func.attr)
                    names = {keyword.arg for keyword in node.keywords}
                    if needed is not None and len(node.args) < needed and "encoding" not in names:
                        yield f"{path.relative_to(ROOT)}:{node.lineno}"

    assert list(calls_without_encoding()) == []


def test_model_with_accents_is_read_in_a_plain_locale(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "author": "Zoë 日本"}', "utf-8")
    script = "import sys; from pathlib import Path; from services.broker.admission.model_files import read_json; "
    script += "assert read_json(Path(sys.argv[1]) / 'config.json')['author'].startswith('Zo')"
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", script, str(tmp_path)]
    subprocess.run(command, env=os.environ | plain, cwd=ROOT, check=True, timeout=60)
