"""The summary of a finished run: a table of totals, and example responses of the first and the last iteration."""

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from onbeat.client import AsyncClient
from onbeat.contracts.errors import ApiError, OnbeatError
from onbeat.contracts.records import Sample
from onbeat.contracts.rewards import recorded_rules
from onbeat.terminal.answers import text_of
from onbeat.terminal.formatting import clip, duration, number, printable, sparkline
from onbeat.terminal.job_progress import JobProgress
from onbeat.terminal.job_view import state_style
from onbeat.terminal.live import can_redraw
from onbeat.terminal.report import make_report

NUM_EXAMPLES = 3


async def print_summary(client: AsyncClient, progress: JobProgress, console: Console) -> None:
    job, committed = progress.job, progress.committed
    report = make_report(job, committed, progress.scored, await client.jobs.weights(job.id))
    rows = [("state", Text(job.state, style=state_style(job.state)))]
    rows += [(label, Text(printable(text))) for label, text in total_rows(report)]
    if (rules := recorded_rules(job.config)) is not None:
        rows.append(("answers", Text(f"compared by rules {rules}" if rules else "compared without recorded rules")))
    rows.append(("audit", Text(printable(await audit_text(client, job.id)))))
    for finding in progress.diagnosis.findings if progress.diagnosis is not None else []:
        if finding.key:  # it names a key of the job to change
            rows.append(("learning", Text(printable(finding.sentence), style="red" if finding.is_problem else "")))
    console.print()
    print_rows(console, rows)
    if not committed:
        return
    first, last = committed[0].iteration, committed[-1].iteration
    evaluations = [record.evaluation for record in progress.scored]
    try:
        if pairs := await same_prompts(client, job.id, evaluations, float(job.config.get("solved_at", 1.0))):
            print_examples(console, "before training, on held-out prompts", [before for before, _ in pairs])
            print_examples(console, "after, on the same prompts", [after for _, after in pairs])
            return
        before = await examples(client, job.id, first)
        after = await examples(client, job.id, last) if last != first else []
    except OnbeatError as error:  # the report of the run is complete without them
        console.out(f"no example responses: {error}")
        return
    num_examples = min(len(before), len(after)) or max(len(before), len(after))
    print_examples(console, f"before training (iteration {first})", before[:num_examples])
    print_examples(console, f"after (iteration {last})", after[:num_examples])


def print_rows(console: Console, rows: Sequence[tuple[str, Text]]) -> None:
    """Print one line per row; on a terminal, long texts are folded below their beginning."""
    if not can_redraw(console):
        for label, text in rows:
            console.print(Text.assemble(f"{label:<12}", text), soft_wrap=True)
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


async def same_prompts(
    client: AsyncClient, job_id: str, evaluations: Sequence[int], solved_at: float
) -> list[tuple[Sample, Sample]]:
    """Return responses to the same held-out prompts in the first and the last evaluation; none without two of them."""
    if len(evaluations) < 2:
        return []
    first, last = [await client.jobs.evaluation_samples(job_id, number) for number in (evaluations[0], evaluations[-1])]
    return telling_pairs(first, last, solved_at)


def telling_pairs(first: Sequence[Sample], last: Sequence[Sample], solved_at: float) -> list[tuple[Sample, Sample]]:
    """Return a prompt that was not solved first and is solved now, and one that is not solved now, as far as there are
    such."""

    def place(sample: Sample) -> tuple[str, int]:
        return sample.group_id.rpartition("-")[2], sample.index

    later = {place(sample): sample for sample in last}
    pairs = [(sample, later[place(sample)]) for sample in first if place(sample) in later]
    learned = (pair for pair in pairs if pair[0].reward < solved_at <= pair[1].reward)
    unsolved = (pair for pair in pairs if pair[1].reward < solved_at)
    return [pair for pair in (next(learned, None), next(unsolved, None)) if pair is not None]


async def examples(client: AsyncClient, job_id: str, iteration: int) -> list[Sample]:
    """Return one response of each of the first few groups, or none of an iteration whose groups are no longer kept.

    Different prompts show more than one prompt three times.
    """
    try:
        samples = await client.jobs.samples(job_id, iteration=iteration, limit=100)
    except ApiError as error:
        if error.status != 410:
            raise
        return []
    by_group: dict[str, Sample] = {}
    for sample in samples:
        by_group.setdefault(sample.group_id, sample)
    return list(by_group.values())[:NUM_EXAMPLES]


def print_examples(console: Console, title: str, samples: Sequence[Sample], *, is_decoded: bool = False) -> None:
    """Print one line per sample; on a terminal, a table. `is_decoded`: with prompts as the model saw them."""
    if not samples:
        return
    console.print()
    if not can_redraw(console):
        console.out(title)
        for sample in samples:
            line = f"{prompt_of(sample, is_decoded)} -> {text_of(sample)}".replace("\n", "\\n")
            console.out(f"reward {sample.reward:g}  {line}")
        return
    texts = [Column(name, overflow="fold") for name in ("prompt", "response")]  # some scripts have no spaces to wrap at
    table = Table(*texts, "reward", title=title, title_justify="left", expand=True)
    for sample in samples:
        table.add_row(Text(prompt_of(sample, is_decoded)), Text(text_of(sample)), f"{sample.reward:g}")
    console.print(table)


def prompt_of(sample: Sample, is_decoded: bool) -> str:
    """Return the row's prompt, cut if it is long, or all of the prompt that the model saw."""
    if not is_decoded:
        return clip(sample.prompt)
    if sample.decoded_prompt is None:
        return f"(not recorded; the row has: {clip(sample.prompt)})"
    return "\n".join(map(printable, sample.decoded_prompt.splitlines()))
