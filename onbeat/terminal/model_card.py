"""The model card of an export, `README.md`: the job, the data, the curve, the audit, the licence of the base.

No folder of the machine that trained is in it. Texts may come from users and models, and are escaped.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from onbeat import __version__
from onbeat.charts.scale import number
from onbeat.charts.table import Curves
from onbeat.terminal.formatting import sparkline
from onbeat.terminal.report_markdown import markdown_of, plain
from onbeat.terminal.run_report import RunReport

MOST_ROWS = 12  # rows of the curve's table
CURVES = (("held-out reward", "eval/reward_mean"), ("reward in training", "iteration/reward_mean"))


@dataclass(frozen=True)
class Export:
    """The model of a card. `gap`: as measured between PEFT and the trained policy; {} if it was not."""

    num_iterations: int  # iterations that are in its weights
    dtype: str
    is_adapter: bool
    audit_head: str  # '' if there was no audit
    licence: str = ""  # the licence of the base; '' if it is not known
    gap: Mapping[str, float] = field(default_factory=dict)


def card_of(run: RunReport, export: Export) -> str:
    """Return the card as Markdown, after the YAML that a hub reads."""
    parts = [
        f"# {plain(run.job.name)}, {export.num_iterations} iterations",
        f"{format_in_words(run, export)}\n\nJob `{run.job.id}`, trained with reinforcement learning by Onbeat "
        f"{__version__}.",
        "## Data",
        data_in_words(run.config),
        "## Curve",
        curve_of(run.curves, export.num_iterations),
        "## Run",
        markdown_of(run).rstrip("\n"),
        "## Audit",
        audit_in_words(export.audit_head),
        "## Licence",
        licence_in_words(base_of(run), export.licence),
    ]
    return "\n\n".join([front_matter(base_of(run), export), *parts]) + "\n"


def base_of(run: RunReport) -> str:
    """Return the name of the model that the job began with: on a hub, or of its folder alone."""
    return str(run.config["model"]["path"])


def is_on_hub(base: str) -> bool:
    return base.count("/") == 1 and not base.startswith(("/", "~", "."))


def front_matter(base: str, export: Export) -> str:
    lines = [f"license: {export.licence}"] if export.licence else []
    if is_on_hub(base):
        lines += [f"base_model: {base}", f"base_model_relation: {'adapter' if export.is_adapter else 'finetune'}"]
    lines += [f"library_name: {'peft' if export.is_adapter else 'transformers'}", "pipeline_tag: text-generation"]
    return "\n".join(["---", *lines, "tags: [onbeat, reinforcement-learning]", "---"])


def format_in_words(run: RunReport, export: Export) -> str:
    """Return what the files are, and how exactly they are the policy that was trained."""
    base = plain(base_of(run))
    if not export.is_adapter:
        return (
            f"A model in Hugging Face layout, trained from {base}. Its weights are the bits that were trained, in "
            + (f"{export.dtype}" + ("; adapters are merged into them." if run.config.get("lora") else "."))
        )
    text = f"A LoRA adapter in PEFT's format for {base}, in {export.dtype}. "
    text += (
        "In training, the weight that computes is the one with the adapter merged into it and rounded; PEFT adds the "
    )
    text += "adapter's output to that of the layer. "
    if not export.gap:
        return f"{text}The gap between the two was not measured: no responses of the job are kept."
    return (
        f"{text}On {export.gap['num_tokens']:.0f} tokens of the job's own responses, with their prompts, PEFT's log-"
        f"probabilities differ from those of the trained policy by {export.gap['mean']:.2g} nats in the mean and "
        f"by {export.gap['max']:.2g} at most."
    )


def data_in_words(config: Mapping[str, Any]) -> str:
    """Return one line for each source of prompts."""
    sources = config["data"] if isinstance(config["data"], list) else [config["data"]]
    lines = []
    for source in sources:
        name = source.get("path") or source.get("task") or ""
        details = [f"{key} {source[key]}" for key in ("subset", "split", "revision") if source.get(key)]
        lines.append("- " + plain(", ".join([f"{source['type']}: {name}", *details])))
    return "\n".join(lines)


def curve_of(curves: Curves, num_iterations: int) -> str:
    """Return the rewards up to the checkpoint: a line of blocks and a table for each of CURVES that has values."""
    parts = []
    for title, series in CURVES:
        # The reward of an iteration is that of the policy before its step.
        last = num_iterations - (not series.startswith("eval/"))
        points = [(place, value) for place, value in curves.get(series, []) if place <= last]
        if points:
            step = -(-len(points) // MOST_ROWS)
            shown = sorted({*points[::step], points[-1]})
            rows = "\n".join(f"| {place:.0f} | {number(value)} |" for place, value in shown)
            blocks = sparkline([value for _, value in points])
            parts.append(f"{blocks}\n\n| iteration | {title} |\n|---:|---:|\n{rows}")
    return "\n\n".join(parts) or "No rewards are recorded."


def audit_in_words(head: str) -> str:
    if not head:
        return "There was no audit."
    return f"`{head}` is the newest link of the audit log: `onbeat audit JOB --head` checks a log against it."


def licence_in_words(base: str, licence: str) -> str:
    if not licence:
        return f"The licence of {plain(base)} is not recorded where this was exported: it applies here, too."
    return f"{plain(base)} has the licence `{licence}`, which applies here, too."
