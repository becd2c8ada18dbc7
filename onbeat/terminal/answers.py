"""A recorded response as text: the response alone, or the conversation of an episode."""

from onbeat.contracts.records import Sample
from onbeat.terminal.formatting import clip

MAX_ANSWER = 900  # characters of an answer beside another one


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
