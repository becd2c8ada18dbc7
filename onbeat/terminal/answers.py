"""A recorded response as text: the response alone, or the conversation of an episode."""

from collections.abc import Sequence
from itertools import takewhile

from onbeat.contracts.records import Sample
from onbeat.terminal.formatting import clip

MAX_ANSWER = 900  # characters of an answer beside another one


def without_shared_lines(prompts: Sequence[str]) -> tuple[str, list[str]]:
    """Return the lines that all prompts begin with, such as a system prompt, and the prompts without them.

    >>> without_shared_lines(["system: Be brief.\\nuser: 1 + 2", "system: Be brief.\\nuser: 3 + 4"])
    ('system: Be brief.', ['user: 1 + 2', 'user: 3 + 4'])
    >>> without_shared_lines(["the same", "the same"])
    ('', ['the same', 'the same'])
    """
    rows = [prompt.splitlines() or [""] for prompt in prompts]
    same = takewhile(lambda lines: len(set(lines)) == 1, zip(*rows, strict=False))
    count = min(sum(1 for _ in same), *(len(row) - 1 for row in rows)) if len(rows) > 1 else 0
    return "\n".join(rows[0][:count]) if rows else "", ["\n".join(row[count:]) for row in rows]


def above(title: str, shared: str) -> str:
    """Return the title of a table of prompts, with the lines that all of them begin with."""
    return f"{title}\nall prompts begin with: {clip(shared)}" if shared else title


def text_of(sample: Sample) -> str:
    """Return the response; of an episode its conversation behind the prompt. Each message is cut if it is long."""
    if not sample.turns:
        return clip(sample.response)
    lines = []
    for turn in sample.turns:
        if turn.is_fork:
            lines.append("-- the history was rewritten --")
        lines += [clip(f"{message.get('role', '?')}: {message.get('content') or ''}") for message in turn.messages]
        earned = "" if turn.reward is None else f" (reward {turn.reward:g})"
        lines.append(clip(f"policy{earned}: {turn.text.strip()}"))
    return "\n".join(lines)


def short_text_of(sample: Sample) -> str:
    """Return the response, cut if it is long; of an episode the end, where the policy's last words are."""
    text = text_of(sample) if sample.turns else clip(sample.response, MAX_ANSWER)
    return text if len(text) <= MAX_ANSWER or not sample.turns else "... " + text[-MAX_ANSWER:]
