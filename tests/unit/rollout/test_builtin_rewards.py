"""The built-in rewards on worked examples."""

import json

import pytest
import reasoning_gym as rg

from services.rollout.rewards import builtin
from services.rollout.rewards.child import InvalidReward, load_reward, score


@pytest.mark.parametrize(
    ("response", "ignore_case", "reward"),
    [("4 apples", False, 1.0), ("  4\n apples ", False, 1.0), ("4 Apples", False, 0.0), ("4 Apples", True, 1.0)],
)
def test_exact_ignores_white_space_and_on_request_case(response, ignore_case, reward):
    assert builtin.exact(response, {"answer": "4 apples"}, ignore_case=ignore_case) == reward


def test_exact_without_an_answer_is_an_error_not_a_zero():
    with pytest.raises(ValueError, match="no answer"):
        builtin.exact("4", {"question": "2+2"})


@pytest.mark.parametrize(
    ("pattern", "response", "reward"),
    [
        (r"<answer>(.*?)</answer>", "<answer>3</answer> no, <answer> 4 </answer>", 1.0),
        (r"<answer>(.*?)</answer>", "<answer>4</answer> no, <answer>3</answer>", 0.0),
        (r"<answer>(.*?)</answer>", "4", 0.0),
        (r"\bfour\b", "it is four, of course", 1.0),
        (r"\bfour\b", "fourteen", 0.0),
    ],
)
def test_regex_compares_the_last_capture_or_only_matches(pattern, response, reward):
    assert builtin.regex(response, {"answer": "4"}, pattern=pattern) == reward


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        ("1/2", r"So the answer is $\boxed{\frac{1}{2}}$.", 1.0),
        ("1/2", "The answer is 0.5", 1.0),
        (r"\frac{3}{4}", "that is $0.75$", 1.0),
        ("18", "first 17, then 18", 1.0),
        ("18", "17", 0.0),
        ("18", "I do not know", 0.0),
        ("x^2+1", "$1+x^2$", 1.0),
        ("1,000", "1000", 1.0),
    ],
)
def test_math_compares_values_not_texts(answer, response, reward):
    assert builtin.math(response, {"answer": answer}) == reward


def chain_sum_context() -> dict:
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    entry = rg.create_dataset("chain_sum", size=1, seed=7, **options)[0]
    return {**entry, "task": "chain_sum", "options": options}


def test_reasoning_gym_scores_with_the_tasks_own_scorer():
    context = chain_sum_context()
    right = context["answer"]
    assert builtin.reasoning_gym(f" {right}\n", context) == 1.0
    assert builtin.reasoning_gym(f"it is {right}", context) < 1.0
    assert builtin.reasoning_gym(f"it is {right}", context, answer_pattern=r"-?\d+") == 1.0
    assert builtin.reasoning_gym(f"{right}, no, {int(right) + 1}", context, answer_pattern=r"-?\d+") == 0.0
    assert builtin.reasoning_gym("none", context, answer_pattern=r"-?\d+") == 0.0


def test_reasoning_gym_scores_entries_that_json_cannot_preserve():
    entry = rg.create_dataset("rearc", size=3, seed=7)[2]
    facts = json.loads(json.dumps({name: entry[name] for name in ("question", "answer", "metadata")}, default=str))
    context = {**facts, "task": "rearc", "options": {}, "seed": 7, "size": 3, "index": 2}
    assert builtin.reasoning_gym(entry["answer"], context) == 1.0
    other_version = {**context, "question": "another one"}
    assert builtin.scorer_and_entry(other_version)[1]["question"] == "another one"


@pytest.mark.parametrize("name", ["exact", "regex", "math", "reasoning_gym"])
def test_built_in_rewards_are_installed_by_name(name):
    assert load_reward(name) is getattr(builtin, name)


def test_unknown_reward_is_refused_with_the_installed_names():
    with pytest.raises(ValueError, match=r"no reward 'os\.system' .* exact, math"):
        load_reward("os.system")


@pytest.mark.parametrize("result", [float("nan"), float("inf"), None, "1", {"format": 1.0}, {"reward": 1, "x": None}])
def test_what_is_no_finite_number_is_refused(result):
    with pytest.raises(InvalidReward):
        score(lambda response, context: result, "", {"context": {}, "options": {}})


def test_a_mapping_gives_the_reward_and_its_parts():
    result = {"reward": 1, "format": True}
    answer = score(lambda response, context: result, "", {"context": {}, "options": {}})
    assert answer == {"reward": 1.0, "parts": {"format": 1.0}}
