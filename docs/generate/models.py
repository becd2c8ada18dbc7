"""docs/reference/models.md: the table of architectures, from what `benchmarks/architectures.py` has measured."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from docs.generate.markdown import generated_note, table

RESULT = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "architectures.json"
INTRODUCTION = """
Any causal language model that `transformers` loads may be named in `model.path`. How it is trained is not looked up
in a list: before a job's model is loaded, and long before anything is generated, the trainer builds a tiny random
model of the same configuration and compares its own passes over a micro-batch with those of transformers, one
unpadded sequence at a time: log-probabilities and gradient, in float32, on sequences longer than every window and
chunk that the job's sequences may exceed. The first of these that agrees is used:

1. **Packed**: groups in one row, each prompt once. The quickest way.
2. **Padded**: a row for each response, its prompt repeated, in one pass; with the attention `sdpa`, or `eager` where
   that one is wrong or missing.
3. **By length**: only rows of equal length share a pass.

If none agrees, the job fails with a sentence that names the architecture and the reason. So it does if logits depend
on later tokens, or if a model that is built from what is published lacks something. An event (`trainer.not_packed`)
says when and why a model is not packed. Often `model.max_context_tokens` is the remedy: a window or a rotary table
that no sequence exceeds does no harm.

A model whose rotary embeddings depend on the longest sequence of a pass (`longrope`, `dynamic`) is refused beyond the
length at which they change: set `model.max_context_tokens` to that length or less. The broker refuses such a job at
once where it can see the model's folder.

## Architectures of this release
"""
MEANING = """
Each row is a tiny random model of that type in transformers {transformers}, in its default configuration or with what
the row says, on contexts of 128 tokens. "Long sequences" are longer than the model's windows, chunks or top-k; the
other rows are not. *Gap*: the largest difference of a response token's log-probability from transformers' own, in
nats. *Gradient*: the norm of the difference, relative; above 1e-3 only where transformers' own gradient in float32 is
further from its own in float64. *Export*: the largest difference of a logit after saving and
loading. `python benchmarks/architectures.py` measures it anew.
"""
WAYS = {"one row": "packed", "padded": "padded", "each length by itself": "by length"}


def page() -> str:
    result = json.loads(RESULT.read_text())
    rows = result["rows"]
    counts = Counter(found["outcome"] for found in rows.values())
    summary = (
        f"\n{len(rows)} configurations: {counts['packed']} packed, {counts['not packed']} not packed, "
        f"{counts['refused']} refused.\n"
    )
    meaning = MEANING.format(transformers=result["transformers"])
    heads = ("model", "trained", "gap", "gradient", "export", "why")
    return (
        f"{generated_note('benchmarks/results/architectures.json')}\n# Models\n{INTRODUCTION}{meaning}{summary}\n"
        + table(heads, (cells(name, found) for name, found in rows.items()))
        + "\n"
    )


def cells(name: str, found: dict[str, Any]) -> tuple[str, ...]:
    if found["outcome"] not in ("packed", "not packed"):
        return name, f"**{found['outcome']}**", "", "", "", found["reason"]
    way = WAYS[found["rows"]]
    attention = "" if way == "packed" else f", {found['attention']}"
    gaps = (f"{found['gaps'][kind]:.0e}" for kind in ("logprobs", "gradient", "export"))
    return name, way + attention, *gaps, found["reason"]
