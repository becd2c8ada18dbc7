"""The formula of what an iteration costs counts as PyTorch does, and finds the rates that it was given."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch.utils.flop_counter import FlopCounterMode

from services.trainer.memory_plan import empty_model, inputs_without_values, largest_row
from services.trainer.model.model import Passes, target_logprobs

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
SIZE = "SmolLM2-360M"  # the third model


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", ["scale.py"])
    import scale

    return scale


@pytest.fixture
def cost(scale: ModuleType) -> ModuleType:
    import iteration_cost

    return iteration_cost


@pytest.mark.parametrize(("kind", "most"), [("full", 1.0), ("LoRA", 1.1)])  # adapters are computed, too
def test_operations_are_those_that_pytorch_counts(kind: str, most: float, scale: Any, cost: Any) -> None:
    shape, config = cost.SHAPES[SIZE], scale.job_config(Path("none"), kind, "bfloat16")
    model = empty_model(config, scale.model_config(shape), Passes())
    batch = largest_row(config, scale.PROMPT_TOKENS)
    row = cost.Row(len(batch.token_ids), len(batch.target_ids))
    with FlopCounterMode(display=False) as counter:
        target_logprobs(model, inputs_without_values(model, batch), batch, 1.0)[0].sum().backward()
    assert 1.0 <= counter.get_total_flops() / shape.operations(kind, row) <= most


@pytest.mark.parametrize("kind", ["full", "LoRA"])
def test_parameters_are_those_of_the_model(kind: str, scale: Any, cost: Any) -> None:
    for name, shape in cost.SHAPES.items():
        planned = scale.plan(name, kind, "bfloat16")
        assert shape.parameters == pytest.approx(planned["parameters"], rel=1e-3)
        assert shape.trained(kind) == pytest.approx(planned["trained"], rel=1e-3)


def test_rates_are_found_again_and_predict_a_third_model(scale: Any, cost: Any) -> None:
    """All seconds are made by the formula, with rates that differ between full and LoRA."""
    rates = {"full": cost.Rates(4e11, 5e8, 2e8, 3e8, 5e7, 2e9, 9e8, 3e-3, 6e9, 2e-3)}
    rates["LoRA"] = cost.Rates(5e11, 7e8, 2.5e8, 4e8, 5e7, 2e9, 9e8, 3e-3, 6e9, 2e-3)
    cases = [case_of(name, kind, rates[kind], cost) for name, kinds in scale.TRAINED.items() for kind in kinds]
    engines = [engine_of(name, rates["full"], cost) for name in scale.TRAINED]
    compared = cost.compare({"cases": cases, "engines": engines}, goal=0.2)
    for kind, of_kind in rates.items():
        assert compared["rates"][kind] == pytest.approx(vars(of_kind))
    ratios = {part["part"]: part["ratio"] for part in compared["predictions"] if part["part"] != "memory"}
    assert ratios == pytest.approx(dict.fromkeys(ratios, 1.0))
    assert len(ratios) == 5
    assert not compared["is_met"], "the plan of the memory is half of the peak"


def case_of(name: str, kind: str, rates: Any, cost: Any) -> dict[str, Any]:
    shape, rows, delta_bytes = cost.SHAPES[name], [cost.Row(128, 76), cost.Row(512, 304)], 4e7
    seconds = cost.predict(shape, kind, rows, delta_bytes, rates)
    return {
        "model": name,
        "kind": kind,
        "rows": [vars(row) | {"pass_s": seconds[f"pass of {row.tokens} tokens"]} for row in rows],
        "step_s": shape.trained(kind) / rates.step,
        "version_s": shape.parameters / rates.version,
        "delta_bytes": delta_bytes,
        "apply_s": delta_bytes / rates.apply,
        "verify_s": shape.parameters / rates.verify,
        "planned_bytes": 1e9,
        "peak_bytes": 2e9,
    }


def engine_of(name: str, rates: Any, cost: Any) -> dict[str, Any]:
    shape = cost.SHAPES[name]
    load_s = shape.parameters / rates.load + shape.layers * rates.load_layer
    return {
        "model": name,
        "load_s": load_s,
        "token_s": shape.parameters / rates.generate + shape.layers * rates.generate_layer,
    }
