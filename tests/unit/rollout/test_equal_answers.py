"""Equal and different mathematical answers: the verdicts follow the table in docs/rewards.md, not the code."""

import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from math_verify import parse, verify

from services.rollout.rewards import builtin

PAIRS = [json.loads(line) for line in (Path(__file__).parent / "answer_pairs.jsonl").read_text("utf-8").splitlines()]
KINDS: dict[str, list[dict[str, Any]]] = defaultdict(list)
for pair in PAIRS:
    KINDS[pair["kind"]].append(pair)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_verdicts_are_those_of_the_table(kind):
    """A pair with `read_as_other` is equal, and known not to be recognised; no pair is equal that should not be."""
    wrong = []
    for pair in KINDS[kind]:
        reward = builtin.math(pair["response"], {"answer": pair["answer"]})
        if reward != float(pair["equal"] and "read_as_other" not in pair):
            wrong.append((pair["answer"], pair["response"], reward))
    assert wrong == []


def test_corpus_is_large_and_names_what_is_not_recognised():
    assert len(PAIRS) == 498
    assert len(KINDS) >= 25
    assert all(pair["equal"] for pair in PAIRS if "read_as_other" in pair)
    assert sum("read_as_other" in pair for pair in PAIRS) < 0.05 * len(PAIRS)


def test_library_alone_confuses_different_answers():
    """The check exists for these; when the library tells them apart, a part of the check can go."""
    pairs = [("$0.000000001$", "$0.000000002$"), (r"$\frac{1}{2004!}$", r"$\frac{1}{2006!}$"), ("$8$", "$3x+2=8$")]
    assert [verify(parse(answer), parse(response)) for answer, response in pairs] == [True, True, True]


@pytest.mark.parametrize(
    "response",
    [
        "9**9**9**9",
        r"\boxed{9^{9^{9^9}}}",
        r"\boxed{(10^{9})!}",
        r"\boxed{(((9!)!)!)!}",
        r"\boxed{\binom{1000000000}{500000000}}",
        r"\boxed{\prod_{i=1}^{10^{10}} i}",
        r"\boxed{\sum_{i=1}^{10^{10}} i!}",
        r"\boxed{2^{-99999999999}}",
    ],
)
def test_large_numbers_are_never_computed(response):
    start = time.process_time()
    assert builtin.math(response, {"answer": "5"}) == 0.0
    assert time.process_time() - start < 3.0  # the powers would take hours, or all memory


def test_answer_that_is_too_large_equals_its_own_text():
    assert builtin.math(r"\boxed{9^{9^{9}}}", {"answer": "9^{9^9}"}) == 0.0
    assert builtin.math(r"\boxed{9^{9^9} }", {"answer": "9^{9^9}"}) == 1.0


def test_answer_in_dollars_is_mathematics():
    assert builtin.math(r"It costs \boxed{\$18.90}.", {"answer": r"\$18.90"}) == 1.0
