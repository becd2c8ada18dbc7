"""The rewards that come with Onbeat. Heavy imports are inside them: a scoring process pays only for what it uses."""

import functools
import json
import re
from typing import Any

from onbeat.contracts.answers import IS_NUMBER, read_number
from onbeat.contracts.task_options import find_code
from onbeat.process.extras import require_extra
from services.rollout.rewards.answers_as_code import score_as_text

# Heavy modules by reward: a scoring process imports them before the deadline of the first response begins.
MODULES = {"math": "services.rollout.rewards.equal_answers", "reasoning_gym": "reasoning_gym"}

Context = dict[str, Any]


def exact(response: str, context: Context, *, ignore_case: bool = False, as_number: bool = False) -> float:
    """Return 1 if the response is the answer, up to white space, else 0.

    `as_number`: both are compared as numbers, which an answer that is a JSON number always is.

    >>> exact(" 4  apples", {"answer": "4 apples"}), exact("1,234.0", {"answer": "1234"}, as_number=True)
    (1.0, 1.0)
    """
    if as_number or context.get(IS_NUMBER):
        return float(is_same_number(response, context))

    def normalise(text: str) -> str:
        text = " ".join(text.split())
        return text.casefold() if ignore_case else text

    return float(normalise(response) == normalise(expected_answer(context)))


def regex(response: str, context: Context, *, pattern: str, as_number: bool = False) -> float:
    """Return 1 if the pattern's last match captures the answer; a pattern without a group only has to match somewhere.

    `as_number`: as for `exact`.

    >>> regex("so x = 3, no: x = 4", {"answer": "4"}, pattern=r"x = (\\d+)")
    1.0
    """
    compiled = re.compile(pattern)
    matches = list(compiled.finditer(response))
    if not matches or compiled.groups == 0:
        return float(bool(matches))
    captured = matches[-1].group(1) or ""
    if as_number or context.get(IS_NUMBER):
        return float(is_same_number(captured, context))
    return float(captured.strip() == expected_answer(context).strip())


def math(response: str, context: Context) -> float:
    """Return 1 if the mathematical answer in the response equals the expected one: fractions, LaTeX, sets, intervals.

    >>> math("The answer is $\\\\boxed{0.5}$", {"answer": "1/2"})
    1.0
    """
    try:
        from math_verify import parse, verify
    except ImportError:
        require_extra("math", user="the reward math")
        raise

    from services.rollout.rewards.answer_texts import prepare
    from services.rollout.rewards.equal_answers import is_equal

    answer, given = prepare(expected_answer(context)), prepare(response)
    plain = answer.replace("\\$", "")  # a dollar sign that is a currency
    has_math_marks = "$" in plain or "\\boxed" in plain
    expected = parse(plain if has_math_marks else f"${plain}$") or parse(plain)
    if not expected:
        raise ValueError(f"the expected answer {answer!r} is no mathematical expression")
    return float(is_equal(answer, expected, given, parse, verify))


def reasoning_gym(response: str, context: Context, *, answer_pattern: str | None = None) -> float:
    """Return the score that the task's own scorer gives the answer.

    `answer_pattern`: its last match in the response (its first group, if it has one) is the answer, no match scores 0;
    without a pattern the whole response is the answer.
    """
    answer = response.strip()
    if answer_pattern is not None:
        matches = list(re.finditer(answer_pattern, response))
        if not matches:
            return 0.0
        answer = matches[-1].group(1 if matches[-1].re.groups else 0)
    dataset, entry = scorer_and_entry(context)
    return score_as_text(dataset, answer, entry)


def scorer_and_entry(context: Context) -> tuple[Any, dict[str, Any]]:
    """Return the task's scorer and the entry as it made it: JSON turns tuples into lists, which matters to arc_agi."""
    options = json.dumps(context.get("options") or {}, sort_keys=True)
    given = {name: context[name] for name in ("question", "answer", "metadata")}
    if "index" not in context:
        return task_dataset(context["task"], options, seed=0, size=1), given
    dataset = task_dataset(context["task"], options, context["seed"], context["size"])
    made = task_entry(dataset, context["index"])
    is_same = made["question"] == given["question"]  # another version of reasoning_gym may make another
    return dataset, made if is_same else given


@functools.lru_cache(maxsize=64)
def task_dataset(task: str, options_json: str, seed: int, size: int) -> Any:
    try:
        from reasoning_gym import create_dataset
    except ImportError:
        require_extra("reasoning-gym", user="the reward reasoning_gym")
        raise

    options = json.loads(options_json)
    if (code := find_code(options)) is not None:
        raise ValueError(f"an option of task {task} may be code: {code[:80]!r}")
    return create_dataset(task, **options, seed=seed, size=size)


@functools.lru_cache(maxsize=64)
def task_entry(dataset: Any, index: int) -> dict[str, Any]:
    entry: dict[str, Any] = dataset[index]
    return entry


def is_same_number(text: str, context: Context) -> bool:
    """Return whether the text is the number that is the prompt's answer."""
    answer = expected_answer(context)
    if (number := read_number(answer)) is None:
        raise ValueError(f"the expected answer {answer!r} is no number; leave out as_number, or write a number")
    return number == read_number(text)


def expected_answer(context: Context) -> str:
    answer = context.get("answer")
    if answer is None:
        raise ValueError("this prompt has no answer to compare with; set data.answer_field or take another reward")
    return str(answer)
