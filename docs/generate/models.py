"""docs/reference/models.md: the table of architectures, from what `benchmarks/architectures.py` has measured."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from docs.generate.markdown import generated_note, table

RESULT = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "architectures.json"
INTRODUCTION = """
`model.path` may name any causal language model that `transformers` loads. There is no list of supported models.
Instead, before the trainer loads a job's model, it builds a tiny random model of the same configuration and compares
its own passes over a micro-batch with those of transformers, one unpadded sequence at a time: log-probabilities and
gradient, in float32, on sequences longer than every window and chunk that the job's sequences may exceed. The trainer
uses the first of these passes that agrees:

1. **Packed**: groups share a row, and each prompt is computed once. This is the fastest pass.
2. **Padded**: each response has a row with its prompt, and all rows share one pass, with the attention `sdpa`, or
   `eager` if `sdpa` is wrong or missing.
3. **By length**: only rows of equal length share a pass.

If none agrees, the job fails with a sentence that names the architecture and the reason. It also fails if logits depend
on later tokens, or if the published weights lack a part of the model. An event (`trainer.not_packed`) says when and why
a model is not packed. Often a smaller `model.max_context_tokens` helps, because a window or a rotary table that no
sequence exceeds does no harm.

A model whose rotary embeddings depend on the longest sequence of a pass (`longrope`, `dynamic`) is refused beyond the
length at which they change: set `model.max_context_tokens` to that length or less. If the broker sees the model's
folder, it refuses such a job at once.

## Architectures of this release
"""
MEANING = """
Each row is a tiny random model of that type in transformers {transformers}, in its default configuration or the one
that the row names, on contexts of 128 tokens. "Long sequences" are longer than the model's windows, chunks or top-k;
the other rows are not. *Gap* is the largest difference of a response token's log-probability from transformers' own, in
nats. *Gradient* is the relative norm of the difference, above 1e-3 only where transformers' own gradient in float32 is
further from its own in float64. *Export* is the largest difference of a logit after saving and loading.
`python benchmarks/architectures.py` measures all rows again.
"""
WAYS = {"one row": "packed", "padded": "padded", "each length by itself": "by length"}


def page() -> str:
    result = json.loads(RESULT.read_text())
    rows = result["rows"]
    counts = Counter(row["outcome"] for row in rows.values())
    summary = (
        f"\n{len(rows)} configurations: {counts['packed']} packed, {counts['not packed']} not packed, "
        f"{counts['refused']} refused, {counts['not built']} that transformers does not build.\n"
    )
    meaning = MEANING.format(transformers=result["transformers"])
    heads = ("model", "trained", "gap", "gradient", "export", "why")
    return (
        f"{generated_note('benchmarks/results/architectures.json')}\n# Models\n{INTRODUCTION}{meaning}{summary}\n"
        + table(heads, (cells(name, row) for name, row in rows.items()))
        + "\n"
    )


def cells(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    if row["outcome"] not in ("packed", "not packed"):
        return name, f"**{row['outcome']}**", "", "", "", row["reason"]
    way = WAYS[row["rows"]]
    attention = "" if way == "packed" else f", {row['attention']}"
    gaps = (f"{row['gaps'][kind]:.0e}" for kind in ("logprobs", "gradient", "export"))
    return name, way + attention, *gaps, row["reason"]
