"""Numbers that foreign code returns: what counts as one, and what is refused by its name and type."""

from decimal import Decimal
from fractions import Fraction

import numpy
import pytest
import torch

from services.rollout.children.numbers import InvalidReward, check_numbers


@pytest.mark.parametrize(
    "number",
    [
        *(1, 1.0, True, Decimal("1.0"), Fraction(2, 2)),
        *(numpy.float32(1), numpy.float64(1), numpy.int8(1), numpy.bool_(True), numpy.array(1), numpy.array([[1.0]])),
        *(torch.tensor(1), torch.tensor([1.0], dtype=torch.bfloat16), torch.ones(1, 1, requires_grad=True)),
    ],
    ids=repr,
)
def test_numbers_of_every_kind_become_floats(number):
    checked = check_numbers({"reward": number, "form": number})
    assert checked == {"reward": 1.0, "form": 1.0}
    assert {type(value) for value in checked.values()} == {float}


@pytest.mark.parametrize(
    ("result", "words"),
    [
        *((value, "reward is .*, not a number from -1000000 to 1000000") for value in (1e39, 10**400, Decimal("1e7"))),
        *((value, "reward is .*, not a number from") for value in (float("nan"), float("inf"), Decimal("sNaN"))),
        ("1", r"reward is '1' \(str\), not a number"),
        ([1.0], r"reward is \[1.0\] \(list\), not a number"),
        (1j, r"reward is 1j \(complex\), not a number"),
        (numpy.array(["1"]), r"reward is array.* \(ndarray of shape \(1,\)\), not a number"),
        (numpy.zeros(2), r"reward is array.* \(ndarray of shape \(2,\)\), not a number"),
        (torch.zeros(2, 1), r"reward is tensor.*"),
        (torch.zeros(0), r"reward is tensor.* \(Tensor of shape \(0,\)\), not a number"),
        ({"reward": 1.0, "length": -1e39}, r"length is -1e\+39, not a number from"),
        ({"reward": 1.0, chr(0xD800): 1.0}, r"the part named '\\ud800' has a name that is no text"),
    ],
)
def test_what_is_no_finite_number_is_refused(result, words):
    with pytest.raises(InvalidReward, match=words):
        check_numbers(result if isinstance(result, dict) else {"reward": result})
