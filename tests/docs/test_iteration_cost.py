"""The page of what an iteration costs has the benchmark's tables, and the formula that the benchmark computes with."""

import json
import re
from types import ModuleType
from typing import Any

import pytest

from tests.docs.pages import ROOT, blocks_of, text_of

PAGE = "docs/iteration-cost.md"
NAMES = {"pass": "pass of 512 tokens", "step": "step and version", "update": "update", "token": "token"}


@pytest.fixture
def cost(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import iteration_cost

    return iteration_cost


def block_with(text: str) -> list[str]:
    (block,) = [block.text for block in blocks_of(PAGE) if text in block.text]
    return block.splitlines()


def test_tables_of_the_page_are_those_of_the_result(cost: Any) -> None:
    result = json.loads((ROOT / "benchmarks/results/scale.json").read_text("utf-8"))
    lines = text_of(PAGE).splitlines()
    assert [line for line in cost.tables(result) if line not in lines] == []


def test_formula_of_the_page_is_that_of_the_benchmark(cost: Any) -> None:
    formulas = {
        cells[0]: cells[1] for line in block_with("/ compute") if len(cells := re.split(r"\s{2,}", line.strip())) > 1
    }
    shape, row, rates = cost.SHAPES["Llama-3.2-1B"], cost.Row(512, 304), cost.Rates(*range(1, 11))
    for kind, f in cost.OPERATIONS.items():
        sizes = {"L": shape.in_layers, "H": shape.in_head, "P": shape.parameters, "A": shape.trained(kind)}
        symbols = vars(rates) | sizes | {"K": shape.layers, "T": row.tokens, "N": row.sampled, "D": 5e6, "f": f}
        expected = cost.predict(shape, kind, [row], 5e6, rates)
        assert {part: eval(formulas[part], {}, symbols) for part in NAMES} == {  # noqa: S307, the page is ours
            part: pytest.approx(expected[name]) for part, name in NAMES.items()
        }


def test_parameters_are_counted_as_in_the_benchmark(cost: Any) -> None:
    for shape in cost.SHAPES.values():
        symbols: dict[str, Any] = {
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "vocab_size": shape.vocabulary,
        }
        exec("\n".join(line.strip() for line in block_with("kv = ")), {}, symbols)
        assert (symbols["L"], symbols["H"], symbols["P"]) == (shape.in_layers, shape.in_head, shape.parameters)
