"""Scorers of reasoning_gym that run an answer as code, kept from it: an answer is text of a model.

Some call `eval` to read a list: here it reads literals. Others give it to sympy's `parse_expr`, which is `eval`, too:
they see only answers that are expressions of numbers, symbols and known functions, and none with powers or factorials
that keep them busy until their process is killed: such an answer would fail its whole group.
"""

import ast
import builtins
import keyword
import re
import sys
from typing import Any

READ_BY_EVAL = {"string_insertion", "spiral_matrix", "binary_matrix", "n_queens"}  # modules of reasoning_gym
PARSED = {"countdown", "puzzle24", "polynomial_multiplication", "simple_integration", "intermediate_integration"}
FUNCTIONS = {"sqrt", "cbrt", "root", "abs"}  # these are no classes of sympy, as sin and exp are
EXPRESSION = re.compile(r"[\w\s+\-*/^().,!|]*", re.ASCII)
ATTRIBUTE = re.compile(r"\.\s*[A-Za-z_]")
NAME = re.compile(r"[A-Za-z_]\w*")
# These are exponents of four digits or more, powers of powers such as 9**9**9 and (9**9)**9, factorials of numbers of
# four digits or more, and factorials of factorials.
TOO_LARGE = re.compile(r"\*\*[\s(+-]*([\d_]{4}|[\d._]+[\s)]*\*\*)|([\d_]{4}|!)[\s)]*!")


def score_as_text(dataset: Any, answer: str, entry: dict[str, Any]) -> float:
    """Return the score that the task's scorer gives the answer; 0 for an answer that it would have to run."""
    if hasattr(dataset, "datasets"):  # a mixture of tasks
        dataset = dataset.datasets[entry["metadata"]["source_dataset"]]
    module = sys.modules[type(dataset).__module__]
    task = module.__name__.rpartition(".")[2]
    if task in READ_BY_EVAL:
        vars(module)["eval"] = ast.literal_eval
    if task in PARSED and not is_expression(answer):
        return 0.0
    return float(dataset.score_answer(answer, entry))


def is_expression(text: str) -> bool:
    """Return whether nothing but arithmetic of reasonable size can happen when sympy parses the text.

    >>> is_expression("3*x**2 + sin(x)/2"), is_expression("print(1)"), is_expression("x.free_symbols")
    (True, False, False)
    """
    is_plain = EXPRESSION.fullmatch(text) and not ATTRIBUTE.search(text) and "__" not in text
    if not is_plain or TOO_LARGE.search(text):
        return False
    return all(name in FUNCTIONS or not does_more(name) for name in NAME.findall(text))


def does_more(name: str) -> bool:
    """Return whether Python or sympy know the name, and not as a mathematical function or number."""
    import sympy

    known = getattr(sympy, name, None)
    is_mathematical = isinstance(known, sympy.Basic) or (isinstance(known, type) and issubclass(known, sympy.Basic))
    return not is_mathematical and (hasattr(sympy, name) or hasattr(builtins, name) or keyword.iskeyword(name))
