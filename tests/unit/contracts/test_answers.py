"""Texts that are numbers, and the rules that answers are compared by."""

from decimal import Decimal

import pytest
from pydantic import ValidationError

from onbeat.contracts.answers import ANSWER_RULES, is_number, number_text, read_number
from onbeat.contracts.rewards import RewardConfig, recorded_rules
from onbeat.contracts.section import IS_ACCEPTED


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", "42"),
        ("42.0", "42"),
        (" 42. ", "42"),
        (".5", "0.5"),
        ("1,234", "1234"),
        ("1,234,567.50", "1234567.5"),
        ("12,34,567", "1234567"),
        ("1 234", "1234"),
        ("1\N{NARROW NO-BREAK SPACE}234", "1234"),
        ("\N{MINUS SIGN}7", "-7"),
        ("+7", "7"),
        ("50%", "0.5"),
        ("12.5 %", "0.125"),
        ("1e21", "1000000000000000000000"),
        ("1.5E-3", "0.0015"),
        ("12345678901234567890123", "12345678901234567890123"),
    ],
)
def test_text_is_read_as_its_number(text, number):
    assert read_number(text) == Decimal(number)


@pytest.mark.parametrize(
    "text",
    ["", "seven", "1,2", "1,23", "1 2", "true", "nan", "inf", "1/2", "$5", "5 cm", "--5", ".", "1e99999", "0x10"],
)
def test_other_text_is_no_number(text):
    assert read_number(text) is None


def test_true_is_no_number_and_exponents_are_written_out():
    assert [is_number(value) for value in (True, False, 1, 42.0, "1", None, [1])] == [False, False, True, True] + [
        False
    ] * 3
    assert [number_text(value) for value in (42, 42.0, 1e21, -1e-9)] == ["42", "42.0", "1" + "0" * 21, "-0.000000001"]


def test_rules_are_recorded_and_others_are_refused_by_name():
    recorded = RewardConfig(name="exact").model_dump(mode="json")
    assert recorded_rules({"reward": recorded}) == recorded_rules({"reward": [recorded]}) == ANSWER_RULES
    other = recorded | {"answer_rules": 99}
    with pytest.raises(ValidationError, match=f"compared by rules {ANSWER_RULES} here, not by rules 99"):
        RewardConfig.model_validate(other)
    assert RewardConfig.model_validate(other, context=IS_ACCEPTED).answer_rules == 99


def test_jobs_of_before_have_no_rules_and_others_need_none():
    assert recorded_rules({"reward": {"name": "math"}}) == 0
    assert recorded_rules({"reward": {"name": "http"}}) is None
    assert recorded_rules({"environment": {"name": "guess"}}) is None


def test_rules_of_held_out_sets_count_as_well():
    recorded = RewardConfig(name="exact").model_dump(mode="json")
    config = {
        "reward": recorded,
        "evaluation": {"sets": [{"name": "easy"}, {"name": "hard", "reward": {"name": "math"}}]},
    }
    assert recorded_rules(config) == 0
