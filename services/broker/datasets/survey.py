"""A look at every row of a job's data: which are refused, which are changed, and what the job's events should say."""

import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from onbeat.config import RowData
from onbeat.config.explain import MAX_SHOWN
from onbeat.contracts.answers import GAPS, IS_NUMBER, MINUS, read_number
from onbeat.contracts.records import RowCounts
from onbeat.contracts.rewards import RewardConfig, compares_with_answer
from services.broker.datasets import DatasetError, PromptItem, Section, Survey, moved_field
from services.broker.datasets.files import FileDataset

MARK = "#### "  # mark of the answer at the end of a solution, as in GSM8K
KINDS: dict[type, str] = {list: "a list", dict: "a mapping", bytes: "bytes"}
NUMBER_LOOKS = {  # looks of texts that are numbers
    "look like numbers with commas": re.compile(r"[^,]*\d,\d.*"),
    "end in .0": re.compile(r".*\d\.0+"),
    "have a percent sign": re.compile(r".*%\s*"),
    "have a Unicode minus": re.compile(rf"\s*{MINUS}.*"),
    "have gaps between digits": re.compile(rf"[^{GAPS}]*\d[{GAPS}]\d.*"),
}
TEXT_LOOKS = {  # looks of texts that responses seldom have
    "begin with a currency sign": re.compile(r"\s*[$\u20ac\u00a3\u00a5]\s*\d.*"),
    "have digits of another script": re.compile(r".*(?![0-9])\d.*", re.DOTALL),
    "have invisible characters": re.compile(r".*[\u00ad\u200b-\u200f\u2060\ufeff].*", re.DOTALL),
    "stand in \\boxed{}": re.compile(r"\s*\\boxed\s*\{.*", re.DOTALL),
}
# Only the model's tokenizer knows its control tokens; most look like these.
CONTROL_TOKEN = re.compile(
    r"<[|\uff5c][^|\uff5c<>\s]{1,60}[|\uff5c]>|</?s>|\[/?INST\]|<(?:start|end)_of_turn>|<(?:bos|eos|image)>"
)


@dataclass
class Rows:
    """The rows of one data set, while they are looked at."""

    section: Section
    dataset: FileDataset
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)  # numbers by the field to blame and the message
    changed: Counter[str] = field(default_factory=Counter)
    num_changed: int = 0
    looks: Counter[str] = field(default_factory=Counter)  # numbers of answers that are texts
    examples: dict[str, tuple[int, str]] = field(default_factory=dict)  # the first row of each look, and its answer
    first_rows: dict[int, int] = field(default_factory=dict)  # rows by a hash of the prompt
    num_repeats: int = 0
    num_marked: int = 0  # prompts without a template that hold what looks like control tokens
    first_marked: tuple[int, str] | None = None  # the first such row, and the text
    first_repeat: tuple[int, int] | None = None  # the first row that repeats a prompt, and the row with that prompt


def survey(sections: list[tuple[Section, FileDataset]], deadline: float) -> Survey:
    """Look at the rows of the data sets, those for training first, until the deadline (of the monotonic clock)."""
    result, training = Survey(), list[Rows]()
    for section, dataset in sections:
        rows = Rows(section, dataset)
        numbers = dataset.rows[: section.spec.num_items] if section.spec.is_held_out else dataset.rows
        num_looked = look_at(rows, numbers, deadline)
        report(rows, num_looked, len(numbers), result)
        if not section.spec.is_held_out:
            training.append(rows)
            continue
        in_training: set[int] = set()
        for source in training:
            if shared := rows_in_both(rows, source):
                in_training.update(row for row, _ in shared)
                result.notes.append(overlap_note(rows, source, *shared[0], len(shared)))
        result.counts[-1].num_in_training = len(in_training)
    return result


def look_at(rows: Rows, numbers: Any, deadline: float) -> int:
    """Look at rows until the deadline. Return how many there were."""
    section, data = rows.section, rows.section.spec.data
    assert isinstance(data, RowData)
    compared = {name: reward for name, reward in section.rewards.items() if compares(reward)}
    for place, row in enumerate(numbers):
        if place % 1_000 == 0 and time.monotonic() > deadline:
            return place
        try:
            item = rows.dataset.to_item(row)
        except DatasetError as error:
            rows.refused[error.field, error.message] += 1
            continue
        for blamed, message in refusals(item.context, compared):
            rows.refused[blamed, f"{data.path}, {rows.dataset.place(row)} {message}"] += 1
            break
        else:
            rows.changed.update(changes := list(changes_of(item, data)))
            rows.num_changed += bool(changes)
        note_look(rows, row, item.context)
        note_prompt(rows, row, item)
        if data.control_tokens == "tokens" and item.text and (mark := CONTROL_TOKEN.search(item.text)):
            rows.num_marked += 1
            rows.first_marked = rows.first_marked or (row, mark[0])
    return len(numbers)


def compares(reward: RewardConfig) -> bool:
    """Return whether the reward compares with answers. Its pattern has been checked, or is refused elsewhere."""
    try:
        num_groups = re.compile(reward.options["pattern"]).groups if reward.name == "regex" else 0
    except (re.error, KeyError, TypeError, RecursionError, OverflowError):
        num_groups = 0
    return compares_with_answer(reward, num_groups)


def refusals(context: dict[str, Any], compared: dict[str, RewardConfig]) -> Iterator[tuple[str, str]]:
    """Yield why a reward cannot compare this answer: the field to blame, and a message that goes behind the row's
    name."""
    answer = context["answer"]
    for reward_field, reward in compared.items():
        if not isinstance(answer, str | None):
            shown = json.dumps(answer, default=str)[:MAX_SHOWN]
            kind = KINDS.get(type(answer), "neither text nor a number")
            message = f"has the answer {shown}, which is {kind}, and reward {reward.name} compares text"
            yield "data.answer_field", f"{message}; name a field with text, such as answer.value, or write one"
        elif isinstance(answer, str) and MARK in answer:
            message = f"has an answer that ends with {answer[-MAX_SHOWN:]!r}, which reward {reward.name} compares as "
            yield "data.answer_pattern", message + "a whole; set it to '#### (.+)'"
        elif isinstance(answer, str) and not answer.strip() and not reward.options.get("as_number"):
            yield "data.answer_field", f"has an empty answer, which reward {reward.name} cannot compare; remove the row"
        elif reward.options.get("as_number") and isinstance(answer, str) and read_number(answer) is None:
            message = (
                f"has the answer {answer[:MAX_SHOWN]!r}, which is no number, and {reward_field}.options.as_number "
            )
            yield "data.answer_field", message + "compares numbers; remove the row, or leave as_number out"


def changes_of(item: PromptItem, data: RowData) -> Iterator[str]:
    """Yield what was made of a row that is not what stands in it."""
    yield from item.changes
    if item.context.get(IS_NUMBER):
        yield "the answer is a JSON number, which exact and regex compare as a number"
    if data.answer_pattern is not None:
        yield "answer_pattern took the answer out of its field"


def note_look(rows: Rows, row: int, context: dict[str, Any]) -> None:
    answer = context["answer"]
    if isinstance(answer, str) and not context.get(IS_NUMBER):
        for look, pattern in (TEXT_LOOKS if read_number(answer) is None else NUMBER_LOOKS).items():
            if pattern.fullmatch(answer):
                rows.looks[look] += 1
                rows.examples.setdefault(look, (row, answer))


def note_prompt(rows: Rows, row: int, item: PromptItem) -> None:
    prompt = json.dumps(item.model_dump(include={"messages", "text"})).encode()
    key = int.from_bytes(hashlib.blake2b(prompt, digest_size=8).digest(), "big")
    first = rows.first_rows.setdefault(key, row)
    if first != row:
        rows.num_repeats += 1
        rows.first_repeat = rows.first_repeat or (row, first)


def report(rows: Rows, num_looked: int, num_rows: int, result: Survey) -> None:
    """Add what these rows have shown."""
    num_refused = sum(rows.refused.values())
    for blamed, message in list(rows.refused)[:1]:
        more = f" ({num_refused} of {num_looked} rows are refused)" if num_refused > 1 else ""
        result.complaints.append((moved_field(blamed, rows.section.field), message + more))
    result.counts.append(count_rows(rows, num_looked, num_rows))
    path, place = result.counts[-1].path, rows.dataset.place
    if num_looked < num_rows:
        result.notes.append(f"{path}: only the first {num_looked} of {num_rows} rows could be looked at in time")
    if rows.first_repeat is not None:
        repeat, first = map(place, rows.first_repeat)
        sentence = f"{rows.num_repeats} of {num_looked} rows in {path} repeat the prompt of an earlier row"
        result.notes.append(f"{sentence}; the first is {repeat}, as in {first}")
    if rows.first_marked is not None:
        row, mark = rows.first_marked
        sentence = f"{rows.num_marked} of {num_looked} prompts in {path} hold text like {mark!r} ({place(row)})"
        remedy = "a model that knows it gets a control token; set data.control_tokens = 'text' if it is plain text"
        result.notes.append(f"{sentence}; {remedy}")
    texts = [name for name, reward in rows.section.rewards.items() if compares_as_text(reward)]
    for look, count in rows.looks.items() if texts else ():
        row, answer = rows.examples[look]
        share = f"{100 * count / num_looked:.0f}%" if count >= 0.005 * num_looked else f"{count} of {num_looked}"
        sentence = f"{share} of the answers in {path} {look}, such as {answer[:MAX_SHOWN]!r} in {place(row)}"
        remedy = f"{texts[0]} compares text; set {texts[0]}.options.as_number = true to compare numbers"
        if look in TEXT_LOOKS:
            remedy = f"{texts[0]} compares text as it stands; {rows.section.field}.answer_pattern can take a part of it"
        result.notes.append(f"{sentence}, and {remedy}")


def count_rows(rows: Rows, num_looked: int, num_rows: int) -> RowCounts:
    data = rows.section.spec.data
    assert isinstance(data, RowData)
    num_refused, num_long = sum(rows.refused.values()), rows.dataset.num_rows - len(rows.dataset.rows)
    reasons = rows.changed + Counter(
        f"refused: {moved_field(blamed, rows.section.field)}" for blamed, _ in rows.refused.elements()
    )
    if num_long:
        reasons[f"left out: more than {data.max_prompt_tokens} tokens"] = num_long
    return RowCounts(
        field=rows.section.field,
        path=data.path,
        num_accepted=num_looked - num_refused,
        num_changed=rows.num_changed,
        num_refused=num_refused + num_long,
        num_not_looked_at=num_rows - num_looked,
        num_repeated=rows.num_repeats,
        reasons=dict(reasons),
    )


def compares_as_text(reward: RewardConfig) -> bool:
    return reward.name in ("exact", "regex") and compares(reward) and not reward.options.get("as_number")


def rows_in_both(held_out: Rows, training: Rows) -> list[tuple[int, int]]:
    """Return the held-out rows whose prompts are trained on as well, with the rows for training."""
    first_rows = training.first_rows
    return [(row, first_rows[key]) for key, row in held_out.first_rows.items() if key in first_rows]


def overlap_note(held_out: Rows, training: Rows, row: int, other: int, num_shared: int) -> str:
    place, training_place = held_out.dataset.place(row), training.dataset.place(other)
    source = "" if training.section.field == "data" else f" of {training.section.field}"
    return (
        f"{num_shared} of the {len(held_out.first_rows)} held-out prompts of {held_out.section.field} are in the "
        f"training data{source}, too; the first is {place}, as in {training_place}: scores on them do not show what "
        "was learnt"
    )
