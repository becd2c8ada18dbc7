"""The formula for the cost of an iteration (docs/iteration-cost.md), and the page's tables from the result of scale.py.

    L   parameters of the layers' matrices        T   tokens of a packed row
    H   parameters of the head                    N   tokens of it that responses sampled
    P   all parameters                            A   parameters that are trained: P, or those of the adapters
    D   bytes of a version's delta                K   layers

    pass        f * (L * T + H * N) / compute + P / row        f = 6 in full, 4 with LoRA
    step        A / step + P / version
    update      D / apply + P / verify + P / load + K * load_layer
    a token     P / generate + K * generate_layer              of each of 16 responses
    memory      the plan of `onbeat plan memory`

Rates of passes and steps are those of one kind, full or LoRA. This script prints tables; `scale.py` measures.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Any

import numpy as np
from harness import RESULTS, command_line, own_dtype, start

FULL, LORA = "full", "LoRA"
OPERATIONS = {FULL: 6, LORA: 4}  # multiplications and additions: forward, gradients of inputs and, in full, of weights
RANK = 16
MEGA = 1e6

Measured = Mapping[str, Any]  # a part of scale.json


@dataclass(frozen=True)
class Row:
    tokens: int
    sampled: int


@dataclass(frozen=True)
class Shape:
    """The shape of a decoder whose head is its embedding."""

    model_type: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """The inputs and outputs of a layer's matrices."""
        keys = self.hidden // self.heads * self.kv_heads
        attention = [(self.hidden, self.hidden)] * 2 + [(self.hidden, keys)] * 2
        return [*attention, *[(self.hidden, self.intermediate)] * 3]

    @property
    def in_layers(self) -> int:
        return self.layers * sum(inputs * outputs for inputs, outputs in self.matrices)

    @property
    def in_head(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All but norms and biases, which are less than a thousandth."""
        return self.in_layers + self.in_head

    def trained(self, kind: str) -> int:
        in_adapters = self.layers * RANK * sum(inputs + outputs for inputs, outputs in self.matrices)
        return in_adapters if kind == LORA else self.parameters

    def operations(self, kind: str, row: Row) -> int:
        return OPERATIONS[kind] * (self.in_layers * row.tokens + self.in_head * row.sampled)


SHAPES = {
    "Qwen2.5-0.5B": Shape("qwen2", 896, 4864, 24, 14, 2, 151_936),
    "Llama-3.2-1B": Shape("llama", 2048, 8192, 16, 32, 8, 128_256),
    "SmolLM2-360M": Shape("llama", 960, 2560, 32, 15, 5, 49_152),
}
MODELS_OF_RATES = ("Qwen2.5-0.5B", "Llama-3.2-1B")  # the others are predicted


# ---- rates -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rates:
    """The rates of one kind of training: operations, bytes (`apply`) or parameters a second; seconds of a layer."""

    compute: float
    row: float
    step: float
    version: float
    apply: float
    verify: float
    load: float
    load_layer: float
    generate: float
    generate_layer: float


def rates_of(result: Measured, kind: str) -> Rates:
    """Return the means over the models that rates are taken from, and the rates of engines that fit them best."""
    cases = [case for case in result["cases"] if case["model"] in MODELS_OF_RATES]
    by_case = [passes_and_step(case) for case in cases if case["kind"] == kind]
    rates = {name: mean(of_case[name] for of_case in by_case) for name in by_case[0]}
    rates["apply"] = mean(case["delta_bytes"] / case["apply_s"] for case in cases)
    rates["verify"] = mean(SHAPES[case["model"]].parameters / case["verify_s"] for case in cases)
    engines = [engine for engine in result["engines"] if engine["model"] in MODELS_OF_RATES]
    shapes = [SHAPES[engine["model"]] for engine in engines]
    sizes = np.array([(shape.parameters, shape.layers) for shape in shapes])
    for name, seconds in (("load", "load_s"), ("generate", "token_s")):
        taken = np.array([engine[seconds] for engine in engines])
        of_parameter, of_layer = np.linalg.lstsq(sizes, taken)[0]
        if of_layer < 0:  # too little to be told from what the parameters take
            (of_parameter,), of_layer = np.linalg.lstsq(sizes[:, :1], taken)[0], 0.0
        rates |= {name: float(1 / of_parameter), f"{name}_layer": float(of_layer)}
    return Rates(**rates)


def passes_and_step(case: Measured) -> dict[str, float]:
    """Return the rates of a trained model. Two lengths of rows tell what a row costs besides its tokens."""
    shape, kind, (short, long) = SHAPES[case["model"]], case["kind"], case["rows"]
    share = short["tokens"] / long["tokens"]
    row_s = (short["pass_s"] - share * long["pass_s"]) / (1 - share)
    return {
        "compute": shape.operations(kind, row_of(long)) / (long["pass_s"] - row_s),
        "row": shape.parameters / row_s,
        "step": shape.trained(kind) / case["step_s"],
        "version": shape.parameters / case["version_s"],
    }


def row_of(measured: Measured) -> Row:
    return Row(measured["tokens"], measured["sampled"])


# ---- the formula -----------------------------------------------------------------------------------------------------


def predict(shape: Shape, kind: str, rows: Iterable[Row], delta_bytes: float, rates: Rates) -> dict[str, float]:
    """Return the seconds of each part of an iteration."""
    size = shape.parameters
    passes = {
        f"pass of {row.tokens} tokens": shape.operations(kind, row) / rates.compute + size / rates.row for row in rows
    }
    load_s = size / rates.load + shape.layers * rates.load_layer
    return passes | {
        "step and version": shape.trained(kind) / rates.step + size / rates.version,
        "update": delta_bytes / rates.apply + size / rates.verify + load_s,
        "token": size / rates.generate + shape.layers * rates.generate_layer,
    }


def seconds_of(case: Measured, engine: Measured) -> dict[str, float]:
    """Return the measured seconds of the parts that `predict` has."""
    passes = {f"pass of {row['tokens']} tokens": row["pass_s"] for row in case["rows"]}
    return passes | {
        "step and version": case["step_s"] + case["version_s"],
        "update": case["apply_s"] + case["verify_s"] + engine["load_s"],
        "token": engine["token_s"],
    }


def compare(result: Measured, goal: float) -> dict[str, Any]:
    """Return rates by kind, and each part of the other models: predicted, measured, their ratio."""
    rates = {kind: rates_of(result, kind) for kind in (FULL, LORA)}
    parts = []
    for case, measured in timed_cases(result):
        if case["model"] in MODELS_OF_RATES:
            continue
        rows = [row_of(row) for row in case["rows"]]
        predicted = predict(SHAPES[case["model"]], case["kind"], rows, case["delta_bytes"], rates[case["kind"]])
        pairs = {part: (predicted[part], measured[part]) for part in measured}
        pairs["memory"] = (case["planned_bytes"], case["peak_bytes"])
        for part, (ours, theirs) in pairs.items():
            named = {"model": case["model"], "kind": case["kind"], "part": part}
            parts.append(named | {"predicted": ours, "measured": theirs, "ratio": ours / theirs})
    is_met = bool(parts) and all(abs(part["ratio"] - 1) <= goal for part in parts)
    return {"is_met": is_met, "predictions": parts, "rates": {kind: vars(rates[kind]) for kind in rates}}


def timed_cases(result: Measured) -> Iterator[tuple[Measured, dict[str, float]]]:
    engines = {engine["model"]: engine for engine in result["engines"]}
    for case in result["cases"]:
        yield case, seconds_of(case, engines[case["model"]])


# ---- the tables ------------------------------------------------------------------------------------------------------


def tables(result: Measured) -> list[str]:
    """Return the lines of the page's tables, for a result that `compare` has completed."""
    return [*rates_table(result), "", *models_table(result), "", *predictions_table(result), "", *memory_table(result)]


def table(heads: list[str], rows: Iterable[list[str]]) -> list[str]:
    return [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *(f"| {' | '.join(cells)} |" for cells in rows)]


def rates_table(result: Measured) -> list[str]:
    units = [
        ("compute", "billion operations a second", 1e9),
        ("row", "million parameters a second", MEGA),
        ("step", "million trained parameters a second", MEGA),
        ("version", "million parameters a second", MEGA),
        ("apply", "million bytes of a delta a second", MEGA),
        ("verify", "million parameters a second", MEGA),
        ("load", "million parameters a second", MEGA),
        ("load_layer", "milliseconds", 1e-3),
        ("generate", "million parameters a second", MEGA),
        ("generate_layer", "milliseconds", 1e-3),
    ]
    rates = result["rates"]
    cells = [[f"`{name}`", unit, *(short(rates[kind][name] / size) for kind in rates)] for name, unit, size in units]
    return table(["rate", "unit", *rates], cells)


def models_table(result: Measured) -> list[str]:
    rows, parts = [], []
    for case, measured in timed_cases(result):
        parts = list(measured)
        numbers = [short(case["parameters"] / MEGA), short(case["trained"] / MEGA), short(case["delta_bytes"] / MEGA)]
        rows.append([f"{case['model']}, {case['kind']}", *numbers, *(f"{measured[part]:.2f}" for part in parts)])
    return table(["model", "parameters, millions", "trained, millions", "delta, MB", *(f"{p}, s" for p in parts)], rows)


def predictions_table(result: Measured) -> list[str]:
    rows = []
    for part in result["predictions"]:
        unit, size = ("GB", 1e9) if part["part"] == "memory" else ("s", 1.0)
        cells = [f"{part[side] / size:.2f}" for side in ("predicted", "measured")]
        rows.append([f"{part['model']}, {part['kind']}", f"{part['part']}, {unit}", *cells, f"{part['ratio']:.2f}"])
    return table(["model", "part", "predicted", "measured", "predicted / measured"], rows)


def memory_table(result: Measured) -> list[str]:
    rows = []
    for case in [*result["cases"], *result["only_planned"]]:
        planned = [f"{case[name] / 1e9:.1f}" for name in ("planned_bytes", "both_moments_bytes")]
        peak = f"{case['peak_bytes'] / 1e9:.1f}" if "peak_bytes" in case else "does not fit"
        rows.append([f"{case['model']}, {case['kind']}", *planned, peak])
    return table(["trainer of", "planned, GB", "parts of both moments, GB", "measured peak, GB"], rows)


def short(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.1f}"


def load_result() -> dict[str, Any]:
    suffix = "_float32" if own_dtype() == "float32" else ""
    path = RESULTS / f"scale{suffix}.json"
    if not path.exists():
        raise SystemExit(f"{path} is missing; run benchmarks/scale.py first")
    content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return content


def main() -> None:
    print("\n".join(tables(load_result())))


if __name__ == "__main__":
    start(command_line(__doc__))
    main()
