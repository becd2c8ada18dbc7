"""The summary of a finished run: a table of totals, and example responses before and after it."""

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from onbeat.client import AsyncClient
from onbeat.contracts.errors import OnbeatError
from onbeat.contracts.records import Sample
from onbeat.contracts.rewards import recorded_rules
from onbeat.terminal.answers import above, text_of, without_shared_lines
from onbeat.terminal.before_after import print_before_after, read_before_after
from onbeat.terminal.formatting import PIPE_WIDTH, clip, duration, number, printable, sparkline, wrapped
from onbeat.terminal.job_progress import JobProgress
from onbeat.terminal.job_view import state_style
from onbeat.terminal.live import can_redraw
from onbeat.terminal.report import make_report

NUM_EXAMPLES = 4  # pairs: an answer that was mended, one still wrong, and the like


async def print_summary(client: AsyncClient, progress: JobProgress, console: Console) -> None:
    job, committed = progress.job, progress.committed
    report = make_report(job, committed, progress.scored, await client.jobs.weights(job.id))
    rows = [("state", Text(job.state, style=state_style(job.state)))]
    rows += [(label, Text(printable(text))) for label, text in total_rows(report)]
    if (rules := recorded_rules(job.config)) is not None:
        rows.append(
            (
                "answers",
                Text(f"compared by version {rules} of their rules" if rules else "compared without recorded rules"),
            )
        )
    rows.append(("audit", Text(printable(await audit_text(client, job.id)))))
    for finding in progress.diagnosis.findings if progress.diagnosis is not None else []:
        if finding.key:  # it names a key of the job to change
            rows.append(("learning", Text(printable(finding.sentence), style="red" if finding.is_problem else "")))
    console.print()
    print_rows(console, rows)
    if not committed:
        return
    try:
        before_after = await read_before_after(client, job)
    except OnbeatError as error:  # the report of the run is complete without them
        console.out(f"no example responses: {error}")
        return
    if before_after is not None:
        console.print()
        print_before_after(console, before_after, NUM_EXAMPLES)


def print_rows(console: Console, rows: Sequence[tuple[str, Text]]) -> None:
    """Print one line per row; on a terminal, long texts are folded below their beginning."""
    if not can_redraw(console):
        for label, text in rows:
            beginning, *rest = wrapped(f"{label:<12}{text.plain}", PIPE_WIDTH)
            console.print(Text.assemble(beginning[:12], (beginning[12:], text.style)), soft_wrap=True)
            for line in rest:
                console.print(Text(line, style=text.style), soft_wrap=True)
        return
    table = Table.grid(Column(), Column(overflow="fold"), padding=(0, 2))
    for row in rows:
        table.add_row(*row)
    console.print(table)


def total_rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    totals = report["totals"]
    if report["error"]:
        yield "reason", report["error"]
    yield "job", report["job_id"]
    yield "iterations", str(totals["iterations"])
    rewards = [record["reward_mean"] for record in report["iterations"] if record["reward_mean"] is not None]
    losses = [record["metrics"]["sft/loss"] for record in report["iterations"] if "sft/loss" in record["metrics"]]
    if losses:
        yield "examples", f"loss {losses[0]:.3f} (first) -> {losses[-1]:.3f} (last)  {sparkline(losses)}"
    if rewards or not losses:
        yield "reward", reward_text(rewards)
    held_out = [record["reward_mean"] for record in report["evaluations"] if record["reward_mean"] is not None]
    if held_out:
        yield "held out", f"{held_out[0]:.3f} (first) -> {held_out[-1]:.3f} (last)  {sparkline(held_out)}"
    if totals["staleness_max"]:
        yield "off-policy", f"by at most {totals['staleness_max']} versions"
    yield "time", duration(totals["job_s"] if totals["job_s"] is not None else totals["wall_s"])
    yield "tokens", f"{totals['tokens']} ({totals['response_tokens']} generated)"
    yield "speed", f"{number(totals['tpspd'], '.1f')} tokens/s per device"
    if report["overlap"]:
        yield "overlap", report["overlap"]
    if report["advice"]:
        yield "advice", report["advice"]
    if totals["weight_bytes_full"]:
        share = totals["weight_bytes_received"] / totals["weight_bytes_full"]
        open_s = totals["weight_open_s"]
        delay = f" {open_s:.1f} s an iteration," if open_s is not None else ""
        yield "weights", f"sync{delay} {share:.0%} of the model's bytes"
    remarks = {"stale": "num_stale", "duplicate": "num_duplicate", "failed": "num_failed_groups"}
    remarks |= {"replaced": "num_replaced", "not replaced for want of prompts": "num_not_replaced"}
    counts = [f"{totals[field]} {word}" for word, field in remarks.items() if totals[field]]
    if counts:
        yield "groups", ", ".join(counts)
    yield "checkpoint", report["checkpoint"] or "none"


def reward_text(rewards: Sequence[float]) -> str:
    """Return the means of the first and of the last iterations: five, or half of them if there are fewer than ten.

    >>> reward_text([0.0, 0.2, 0.5, 0.6, 0.8])
    '0.100 (first 2) -> 0.700 (last 2)  ▁▃▅▆█'
    """
    count = min(5, len(rewards) // 2)
    if count == 0:
        return number(rewards[0] if rewards else None, ".3f")
    first, last, num = fmean(rewards[:count]), fmean(rewards[-count:]), f" {count}" if count > 1 else ""
    return f"{first:.3f} (first{num}) -> {last:.3f} (last{num})  {sparkline(rewards)}"


async def audit_text(client: AsyncClient, job_id: str) -> str:
    """Return the result of the audit in words, or why there is none."""
    try:
        audit = await client.jobs.audit(job_id)
    except OnbeatError as error:
        return f"not done: {error}"
    if audit.violation is not None:
        return f"VIOLATION: {audit.violation}"
    failed = f"; {audit.num_failed_groups} failed groups, not trained" if audit.num_failed_groups else ""
    if not audit.is_clean:
        return f"nothing was trained: {audit.num_groups} groups accepted{failed}; the log breaks no rule"
    return f"clean: {audit.num_trained_groups} groups, each used once, on one policy version per iteration{failed}"


def print_examples(console: Console, title: str, samples: Sequence[Sample], *, is_decoded: bool = False) -> None:
    """Print one line per sample; on a terminal, a table. `is_decoded`: with prompts as the model saw them."""
    if not samples:
        return
    console.print()
    if not can_redraw(console):
        console.out(title)
        for sample in samples:
            line = f"{prompt_of(sample, is_decoded)} -> {text_of(sample)}".replace("\n", "\\n")
            console.out(f"reward {number(sample.reward, 'g')}  {line}")
        return
    texts = [Column(name, overflow="fold") for name in ("prompt", "response")]  # some scripts have no spaces to wrap at
    shared, prompts = without_shared_lines([prompt_of(sample, is_decoded) for sample in samples])
    title = above(title, shared)
    table = Table(
        *texts, "reward", title=Text(title, "table.title"), title_justify="left", expand=True, show_lines=True
    )
    for sample, prompt in zip(samples, prompts, strict=True):
        table.add_row(Text(prompt), Text(text_of(sample)), number(sample.reward, "g"))
    console.print(table)


def prompt_of(sample: Sample, is_decoded: bool) -> str:
    """Return the row's prompt, cut if it is long, or all of the prompt that the model saw."""
    if not is_decoded:
        return clip(sample.prompt)
    if sample.decoded_prompt is None:
        return f"(not recorded; the row has: {clip(sample.prompt)})"
    return "\n".join(map(printable, sample.decoded_prompt.splitlines()))
