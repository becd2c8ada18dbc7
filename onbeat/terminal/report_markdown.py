"""The report of a job as Markdown for a pull request: the verdict, the numbers, the audit, the differences."""

import re

from onbeat.config.differences import as_lines
from onbeat.terminal.run_report import RunReport

SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&$@])")


def markdown_of(run: RunReport) -> str:
    """Return the text. Names and errors may come from users, and are escaped."""
    parts = [f"### {plain(run.job.name)}", plain(run.verdict)]
    if run.numbers:
        rows = [f"| {plain(row.name)} | {plain(row.first)} | {plain(row.last)} |" for row in run.numbers]
        parts.append("\n".join(["| | first | last |", "|---|---:|---:|", *rows]))
        parts += filter(None, [run.note_on_numbers()])
    if run.before_after is not None and run.before_after.is_held_out:
        parts.append(plain(run.before_after.sentence()))
    parts.append(f"**Audit:** {plain(run.audit)}")
    if run.findings:
        parts.append("\n".join(f"- {plain(finding)}" for finding in run.findings))
    settings = "\n".join(as_lines(run.differences))
    parts.append(f"Other than the defaults:\n\n```toml\n{settings}\n```")
    return "\n\n".join(parts) + "\n"


def plain(text: str) -> str:
    """Return text in one line that Markdown shows as it is.

    >>> plain("a|b <i>")
    'a\\\\|b \\\\<i\\\\>'
    """
    return SPECIAL.sub(r"\\\1", " ".join(text.split()))
