"""The cost of an iteration at real sizes: passes, step, update and memory of random models, in full and with LoRA.

The trainer's real loop runs iterations with a row of four groups and a row of one (128 tokens a group): two lengths of
rows tell what a row costs besides its tokens. A version is what follows the step until rollouts may pull. An update is
what follows until an engine is open on it, one part after the other and without a network: the rollout applies the
delta and verifies, vLLM loads all tensors. Peak memory is compared with `onbeat plan memory`.

The rates of this processor are taken from two models, and predict a third one by the formula of iteration_cost.py and
docs/iteration-cost.md. The goal: each part is predicted within a fifth.

    python benchmarks/scale.py                 all, into benchmarks/results/scale.json
    python benchmarks/scale.py Llama-3.2-1B    some of the models, into the same file, which has Qwen2.5-0.5B already

At the end it prints the tables of that page. A model starts only where the machine has the memory that is planned.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harness import RESULTS, ROOT, command_line, own_dtype, save, start, temporary_folder
from iteration_cost import FULL, LORA, MODELS_OF_RATES, SHAPES, Shape, compare, load_result, tables
from scale_trainer import LEARNING_RATE, NUM_THREADS, PROMPT_TOKENS, job_config

from onbeat.machine.malloc import KEEP_FREED
from onbeat.machine.memory import read_memory
from services.trainer.memory_plan import GRADIENT_BYTES, PASS_ON_HOST, Placement, measure_sizes, plan_trainer
from services.trainer.model.model import DTYPES, Passes
from services.trainer.policy import is_served_in_place
from tests.tiny_models import build_tokenizer

GOAL = 0.2
TRAINED = {"Qwen2.5-0.5B": (FULL, LORA), "Llama-3.2-1B": (LORA,), "SmolLM2-360M": (FULL,)}
ONLY_PLANNED = {"Llama-3.2-1B": (FULL,)}  # 24 GB are too little
SPARE_BYTES = 2_000_000_000
DEADLINE_S = 300.0  # limit for a process of the benchmark


def model_config(shape: Shape) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(
        shape.model_type,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=True,
    )


def write_model(folder: Path, shape: Shape, dtype: str) -> None:
    """Write random weights in one file, and the tokenizer of the tests."""
    from transformers import AutoModelForCausalLM

    tokenizer, config = build_tokenizer(), model_config(shape)
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])
    model.save_pretrained(folder, max_shard_size="100GB")
    tokenizer.save_pretrained(folder)


def plan(name: str, kind: str, dtype: str) -> dict[str, Any]:
    """Return the plan of `onbeat plan memory`, and the exact numbers of parameters.

    The plan has the larger of two moments, pass and publish. Where memory is plentiful, the allocator keeps what a pass
    has freed. Then the parts of both are there: activations and gradients, and two versions unless they are served in
    place.
    """
    config = job_config(Path(name), kind, dtype)
    sizes = measure_sizes(config, model_config(SHAPES[name]), Passes(), PROMPT_TOKENS)
    parts = plan_trainer(config, sizes, Placement())["host"]
    both = parts | {
        "gradients": sizes.num_trained * GRADIENT_BYTES,
        "activations": int(sizes.pass_bytes * PASS_ON_HOST),
    }
    if not is_served_in_place(config):
        both["published versions"] = 2 * sizes.num_parameters * DTYPES[dtype].itemsize
    counts = {"parameters": sizes.num_parameters, "trained": sizes.num_trained}
    totals = {"planned_bytes": sum(parts.values()), "both_moments_bytes": sum(both.values())}
    return {"model": name, "kind": kind} | counts | totals | {"planned_parts": parts}


def run(script: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """Run a process of the benchmark and return its result."""
    result = folder.parent / "result.json"
    command = [sys.executable, str(ROOT / "benchmarks" / script), str(folder), *arguments, str(result)]
    # As the images and the local stack do; read when a process is started.
    subprocess.run(command, check=True, env=os.environ | {"GLIBC_TUNABLES": KEEP_FREED}, timeout=DEADLINE_S)
    content: dict[str, Any] = json.loads(result.read_text("utf-8"))
    return content


def measure(name: str, folder: Path, dtype: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return what the model's trainers took, and its engine."""
    started = time.monotonic()
    write_model(folder, SHAPES[name], dtype)
    cases = []
    for kind in TRAINED[name]:
        planned = plan(name, kind, dtype)
        needed, available = planned["both_moments_bytes"] + SPARE_BYTES, read_memory().available_bytes
        if available < needed:
            print(f"{name}, {kind}, is left out: it needs {needed / 1e9:.1f} GB, {available / 1e9:.1f} are available")
            continue
        case = planned | run("scale_trainer.py", folder, kind)
        cases.append(case | {"planned_to_peak": case["planned_bytes"] / case["peak_bytes"]})
    engine = {"model": name} | run("scale_engine.py", folder)
    return cases, engine | {"model_took_s": round(time.monotonic() - started)}


def in_order(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(records, key=lambda record: list(TRAINED).index(record["model"]))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("models", nargs="*", help=f"default: {' '.join(TRAINED)}")
    names = start(parser).models
    if unknown := sorted(set(names) - set(TRAINED)):
        parser.error(f"unknown: {', '.join(unknown)}; models are {', '.join(TRAINED)}")
    dtype = own_dtype()
    file = RESULTS / f"scale{'_float32' if dtype == 'float32' else ''}.json"
    known = json.loads(file.read_text("utf-8")) if names and file.is_file() else {"cases": [], "engines": []}
    for name in names or TRAINED:
        with temporary_folder() as folder:
            cases, engine = measure(name, folder / "model", dtype)
        kinds = {case["kind"] for case in cases}
        kept = [case for case in known["cases"] if case["model"] != name or case["kind"] not in kinds]
        known["cases"] = kept + cases
        known["engines"] = [other for other in known["engines"] if other["model"] != name] + [engine]
    result: dict[str, Any] = {
        "dtype": dtype,
        "num_threads": NUM_THREADS,
        "learning_rate": LEARNING_RATE,
        "goal": f"predicted / measured within {GOAL} of 1",
        "cases": in_order(known["cases"]),
        "engines": in_order(known["engines"]),
        "only_planned": [plan(name, kind, dtype) for name, kinds in ONLY_PLANNED.items() for kind in kinds],
    }
    result["took_s"] = sum(engine["model_took_s"] for engine in result["engines"])
    trained = {case["kind"] for case in result["cases"] if case["model"] in MODELS_OF_RATES}
    if missing := sorted({FULL, LORA} - trained):  # nothing that was measured is lost
        save("scale", result, dtype)
        sys.exit(f"no rates and no tables: no model of the rates was trained {' and '.join(missing)}")
    save("scale", result | compare(result, GOAL), dtype)
    print("\n".join(tables(load_result())))


if __name__ == "__main__":
    main()
