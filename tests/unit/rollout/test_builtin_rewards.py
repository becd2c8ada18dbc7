"""The built-in rewards on worked examples."""

import json
import sys

import pytest
import reasoning_gym as rg

from onbeat.environments.final_reward import reward_of_answer
from onbeat.streams.codec import PromptTask
from services.rollout.episodes.runner import to_request
from services.rollout.rewards import answers_as_code, builtin, child


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
        ("42.0", "42", 1.0),
        ("42", "42.0", 1.0),
        ("1234", "1,234", 1.0),
        ("1,234", "1234.00", 1.0),
        ("-3", "\N{MINUS SIGN}3", 1.0),
        ("0.5", "50%", 1.0),
        ("1000000000000000000000", "1e21", 1.0),
        ("42", "42.5", 0.0),
        ("42", "forty-two", 0.0),
        ("0.000000001", "0.000000002", 0.0),
        ("1", "true", 0.0),
    ],
)
def test_numbers_are_compared_as_numbers(answer, response, reward):
    context, text = {"answer": answer}, f"so: {response}!"
    assert builtin.exact(response, context | {"answer_is_number": True}) == reward
    assert builtin.exact(response, context, as_number=True) == reward
    assert builtin.regex(text, context | {"answer_is_number": True}, pattern="so: (.*)!") == reward
    assert builtin.regex(text, context, pattern="so: (.*)!", as_number=True) == reward


@pytest.mark.parametrize(("answer", "response"), [("42.0", "42"), ("1,234", "1234"), ("1e3", "1000")])
def test_text_stays_text(answer, response):
    assert builtin.exact(response, {"answer": answer}) == 0.0
    assert builtin.regex(response, {"answer": answer}, pattern="(.*)$") == 0.0


def test_answer_that_is_no_number_is_an_error_not_a_zero():
    with pytest.raises(ValueError, match="'four' is no number; leave out as_number"):
        builtin.exact("4", {"answer": "four"}, as_number=True)


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


def context_of(task: str, size: int = 1, index: int = 0, **options: int) -> dict:
    entry = rg.create_dataset(task, size=size, seed=7, **options)[index]
    facts = json.loads(json.dumps({name: entry[name] for name in ("question", "answer", "metadata")}, default=str))
    return {**facts, "task": task, "options": options, "seed": 7, "size": size, "index": index}


def test_reasoning_gym_scores_with_the_tasks_own_scorer():
    context = context_of("chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    right = context["answer"]
    assert builtin.reasoning_gym(f" {right}\n", context) == 1.0
    assert builtin.reasoning_gym(f"it is {right}", context) < 1.0
    assert builtin.reasoning_gym(f"it is {right}", context, answer_pattern=r"-?\d+") == 1.0
    assert builtin.reasoning_gym(f"{right}, no, {int(right) + 1}", context, answer_pattern=r"-?\d+") == 0.0
    assert builtin.reasoning_gym("none", context, answer_pattern=r"-?\d+") == 0.0


def test_reasoning_gym_scores_entries_that_json_cannot_preserve():
    context = context_of("rearc", size=3, index=2)
    assert builtin.reasoning_gym(context["answer"], context) == 1.0
    other_version = {**context, "question": "another one"}
    assert builtin.scorer_and_entry(other_version)[1]["question"] == "another one"


async def test_reasoning_gym_scores_the_last_answer_of_an_environment():
    context = context_of("chain_sum")
    task = to_request(PromptTask(text=context["question"], reward_context_json=json.dumps(context))).task
    conversation = [{"role": "assistant", "content": context["answer"]}]
    assert await reward_of_answer("reasoning_gym", {}, task, conversation) == 1.0


CODE_RUNNERS = sorted(answers_as_code.READ_BY_EVAL | answers_as_code.PARSED)


@pytest.mark.parametrize("task", CODE_RUNNERS)
def test_right_answers_of_these_tasks_are_scored_as_before(task):
    dataset = rg.create_dataset(task, size=10, seed=7)
    for index in range(10):
        entry = dataset[index]
        answer = entry["answer"] if entry["answer"] is not None else entry["metadata"]["expression"]
        assert builtin.reasoning_gym(answer, context_of(task, 10, index)) == dataset.score_answer(answer, entry) > 0.9


@pytest.mark.parametrize("task", CODE_RUNNERS)
@pytest.mark.parametrize(
    "text", ["[open({0!r}, 'w').write('x')]", "open({0!r}, 'w').close()", "7 + open({0!r}, 'w').close()"]
)
def test_answer_is_never_run_as_code(task, text, tmp_path):
    builtin.reasoning_gym(text.format(str(tmp_path / "written")), context_of(task))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("3*x**2 + sin(x)/2 + C", True),
        ("-alpha*beta + 2.5", True),
        ("x**12*y**3 - (x**2 + 1)**3", True),
        ("2**10 + 5! - 3!*4!", True),
        ("1000*(3 + 4)*5", True),
        ("exp(1000)*E**(-x**2)*2**x**2", True),
        ("9**9**9**9", False),
        ("9**(-9**9)", False),
        ("(9**9)**(9**9)", False),
        ("2**(99999999)", False),
        ("99999999!", False),
        ("(99999999)!", False),
        ("(9!)!", False),
        ("9!!!", False),
        ("exec(chr(112))", False),
        ("x.free_symbols", False),
        ("x. free_symbols", False),
        ("sympify(x)", False),
        ("lambdify(x, y)", False),
        ("__import__", False),
        ("[x for x in y]", False),
        ("(lambda x: x)(1)", False),
        ("(x for x in y)", False),
    ],
)
def test_expressions_do_nothing_but_small_arithmetic(text, is_one):
    assert answers_as_code.is_expression(text) is is_one


def test_options_that_may_be_code_make_no_task():
    with pytest.raises(ValueError, match="an option of task simple_integration may be code"):
        builtin.task_dataset("simple_integration", '{"symbols": ["print(1)"]}', seed=0, size=1)


@pytest.mark.parametrize(("reward", "module"), builtin.MODULES.items())
def test_heavy_modules_are_imported_before_the_first_deadline(monkeypatch, reward, module):
    loaded = []

    class Answers:
        def send(self, request, step, **_):
            loaded.append((step, module in sys.modules))

    monkeypatch.setattr(child, "grant_cpu_time", lambda seconds: None)
    monkeypatch.delitem(sys.modules, module, raising=False)
    child.answer({"request": 1, "reward": reward, "options": {}, "responses": []}, Answers(), 1.0)
    assert loaded == [("loaded", True)]
