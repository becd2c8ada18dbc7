"""Tools of a class: what the policy learns about them, and what happens when it calls them."""

import asyncio
import functools
import re
import traceback
from dataclasses import replace
from typing import Any, Literal

import pytest

from onbeat.environments import EpisodeOver, Outcome, Task
from onbeat.environments.load import build_environment
from onbeat.environments.text_calls import read_arguments
from onbeat.environments.tool_schema import describe_method
from tests.scripted_session import ScriptedSession, calls, says

TASK = Task([{"role": "user", "content": "2 + 3 ="}], "2 + 3 =", "5", {"level": 7}, seed=11)


class Calculator:
    """Tools in the shape of TRL's environment_factory."""

    def __init__(self, bonus: float = 0.0) -> None:
        self.bonus, self.said = bonus, []

    def reset(self, **row: Any) -> str:
        self.row = row
        return f" (level {row['level']})"

    def add(self, a: int, b: int = 0) -> int:
        """Add two numbers.

        Args:
            a: the first
                of them
            b (int): the second

        Raises:
            OverflowError: never

        Returns:
            The sum.
        """
        self.said.append(a + b)
        return a + b

    async def look(self, at: Literal["left", "right"]) -> dict[str, str]:
        """Look somewhere."""
        await asyncio.sleep(0)
        return {"seen": at, "där": "中文"}

    def divide(self, a: float, b: float) -> float:
        """Divide."""
        return a / b

    def stop(self) -> str:
        """End the conversation."""
        raise EpisodeOver("enough")

    def fail(self) -> str:
        """Break."""
        raise ConnectionError("the database is gone")

    def get_reward(self) -> float:
        return self.row["seed"] + self.row["answer"].count("5") + self.bonus + len(self.said)

    def _hidden(self) -> None: ...


async def play(session: ScriptedSession, target: Any = Calculator, task: Task = TASK, **options: Any) -> Outcome:
    return await build_environment(target, options).run(task, session)


async def test_tools_are_described_by_hints_and_docstrings():
    session = ScriptedSession(says("5"))
    await play(session)
    described = {tool["function"]["name"]: tool["function"] for tool in session.tools}
    assert sorted(described) == ["add", "divide", "fail", "look", "stop"]
    assert described["add"] == {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "a": {"type": "integer", "description": "the first of them"},
                "b": {"type": "integer", "description": "the second", "default": 0},
            },
            "required": ["a"],
        },
    }
    assert described["look"]["parameters"]["properties"]["at"]["enum"] == ["left", "right"]


async def test_results_of_calls_go_back_until_an_answer_without_one():
    session = ScriptedSession(calls("add", {"a": 2, "b": 3}, "let me see"), calls("look", {"at": "left"}), says("5"))
    outcome = await play(session, bonus=0.25)
    assert outcome == Outcome(11 + 1 + 0.25 + 1)
    assert session.asked[0] == [{"role": "user", "content": "2 + 3 = (level 7)"}]
    first, second = session.asked[2][1:3], session.asked[2][3:5]
    assert first[0] == calls("add", {"a": 2, "b": 3}, "let me see")
    assert first[1] == {"role": "tool", "tool_call_id": "call-1", "name": "add", "content": "5"}
    assert second[1]["content"] == '{"seen": "left", "där": "中文"}'
    assert TASK.messages == [{"role": "user", "content": "2 + 3 ="}]


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("multiply", {}, "Error: there is no tool 'multiply'; there are: add, divide, fail, look, stop"),
        ("_hidden", {}, "Error: there is no tool '_hidden'"),
        ("reset", {}, "Error: there is no tool 'reset'"),
        ("add", {"a": "two"}, "Error: wrong arguments for add: a: Input should be a valid integer"),
        ("add", {"a": 1, "c": 2}, "Error: wrong arguments for add: c: Extra inputs are not permitted"),
        ("add", {}, "Error: wrong arguments for add: a: Field required"),
        ("add", "[1, 2]", "Error: the arguments of add are no JSON object"),
        ("add", "{", "Error: the arguments of add are no JSON object"),
        ("divide", {"a": 1, "b": 0}, "Error: float division by zero"),
    ],
)
async def test_wrong_call_is_reported_to_the_policy(name, arguments, words):
    session = ScriptedSession(calls(name, arguments), says("well"))
    await play(session)
    assert session.asked[1][-1]["content"].startswith(words)


@pytest.mark.parametrize(
    ("reset", "reward", "words"),
    [
        (5, 1.0, "reset returned 5; it has to return a text"),
        (None, {"score": 1.0}, "the reward is a mapping without 'reward', it has only ['score']"),
    ],
)
async def test_method_that_returns_something_else_is_named(reset, reward, words):
    class Odd:
        def reset(self) -> Any:
            return reset

        def get_reward(self) -> Any:
            return reward

    with pytest.raises(ValueError, match=re.escape(words)):
        await play(ScriptedSession(says("5")), Odd)


async def test_parameters_and_fields_may_have_any_name():
    class Web:
        def reset(self, **row: Any) -> None:
            self.row = row

        def request(self, method: str) -> str:
            """Ask a server."""
            return f"{method} is done"

        def get_reward(self) -> float:
            return float(self.row["method"])

    session = ScriptedSession(calls("request", {"method": "GET"}), says("ok"))
    outcome = await play(session, Web, Task(TASK.messages, "", metadata={"method": 2}))
    assert session.asked[1][-1]["content"] == "GET is done"
    assert outcome.reward == 2.0


async def test_decorated_and_cached_methods_are_tools():
    def counted(method):
        @functools.wraps(method)
        def call(*args, **kwargs):
            return method(*args, **kwargs)

        return call

    class Wrapped(Calculator):
        look = counted(Calculator.look)  # hides that it is asynchronous

        @functools.cache  # noqa: B019
        def twice(self, a: int) -> int:
            """Double."""
            return 2 * a

    session = ScriptedSession(calls("look", {"at": "left"}), calls("twice", {"a": 4}), says("8"))
    await play(session, Wrapped)
    assert '"seen": "left"' in session.asked[1][-1]["content"]
    assert session.asked[2][-1]["content"] == "8"


@pytest.mark.parametrize(
    ("raised", "error", "words"),
    [
        (ConnectionError("the database is gone"), ConnectionError, "the database is gone"),
        (StopIteration(), RuntimeError, "StopIteration was raised; give `next` a default value"),
    ],
)
async def test_broken_tool_is_a_failure_not_a_reward_or_a_wait(raised, error, words):
    class Broken(Calculator):
        def fail(self) -> str:
            """Break."""
            raise raised

    with pytest.raises(error, match=words) as caught:
        async with asyncio.timeout(5.0):
            await play(ScriptedSession(calls("fail", {}), says("well")), Broken)
    assert traceback.extract_tb(caught.tb)[-1].name == "fail"  # messages name the place


@pytest.mark.parametrize("answers", [[calls("stop", {}), says("never asked")], [calls("add", {"a": 1})]])
async def test_end_of_the_episode_still_gives_a_reward(answers):
    outcome = await play(ScriptedSession(*answers))
    assert outcome.reward >= 12


async def test_class_without_reward_takes_an_installed_one():
    class Bare:
        def look(self) -> str:
            """Look."""
            return "5"

    assert (await play(ScriptedSession(calls("look", {}), says("5")), Bare, reward="exact")).reward == 1.0
    assert (await play(ScriptedSession(), Bare, reward="exact")).reward == 0.0
    fields = {"answer": "3 + 2 = 5", "question": "?"}  # fields of the row, beside the one that has the answer
    task = replace(TASK, metadata=fields)
    assert (await play(ScriptedSession(says("5")), Bare, task, reward="exact")).reward == 1.0


async def test_calls_as_text_for_models_without_tools():
    session = ScriptedSession(says("I call add(2, b=3) now"), says("it is 5"))
    await play(session, tool_calls="text")
    assert session.tools is None
    assert "add(a, b): Add two numbers." in session.asked[0][0]["content"]
    assert session.asked[1][-1] == {"role": "user", "content": "add(2, b=3) = 5"}
    wrong = ScriptedSession(says("add(1, 2, 3)"), says("divide(b=2)"), says("5"))
    await play(wrong, tool_calls="text")
    assert "wrong arguments for add: argument 3: Extra inputs" in wrong.asked[1][-1]["content"]
    assert "wrong arguments for divide: a: Field required" in wrong.asked[2][-1]["content"]


@pytest.mark.parametrize(
    ("written", "seen"),
    [
        ('the price("lamp (red)") is (perhaps) low', 'price("lamp (red)") = lamp (red)'),
        ("price(price('cup'))", "price(price('cup')) = price('cup')"),
        ("price(it's) or (not)", "price(it's) = it's"),
        ("price('a'); price('b')", "price('a') = a"),
    ],
)
async def test_call_in_text_ends_at_the_bracket_that_closes_it(written, seen):
    class Prices:
        def price(self, item: str) -> str:
            """Look up a price."""
            return item

        def get_reward(self) -> float:
            return 1.0

    session = ScriptedSession(says(written), says("ok"))
    await play(session, Prices, tool_calls="text")
    assert session.asked[1][-1]["content"] == seen


async def test_text_full_of_calls_without_an_end_holds_up_nobody():
    """Each of them would read the rest of its line, in an event loop that all episodes of a group share."""
    endless = ScriptedSession(says("add(" * 100_000 + "\n) so add(1, 2)"), says("3"))
    await play(endless, tool_calls="text")
    assert endless.asked[1][-1]["content"] == "add(1, 2) = 3"


def test_arguments_in_text_are_literals_or_the_text_itself():
    assert read_arguments(["a", "b"], "1, b='x')") == ("1, b='x'", {"a": 1, "b": "x"})
    assert read_arguments(["expression"], "37 + 48)") == ("37 + 48", {"expression": "37 + 48"})
    assert read_arguments(["item"], "the lamp) is") == ("the lamp", {"item": "the lamp"})
    assert read_arguments([], "1)") == ("1", {"argument 1": 1})


def test_method_that_cannot_be_a_tool_is_refused_with_the_reason():
    def no_hint(a):
        """Do it."""

    def no_text(a: int) -> int:
        return a

    def parts(*args: int) -> int:
        """Add them."""

    def options(**kwargs: int) -> int:
        """Set them."""

    def pages(a: int):
        """Turn them."""
        yield a

    for method, words in (
        (no_hint, "needs a type hint for its parameter a"),
        (no_text, "needs a docstring"),
        (parts, r"has `\*args: int`"),
        (options, r"has `\*\*kwargs: int`"),
        (pages, "is a generator"),
    ):
        with pytest.raises(ValueError, match=f"the tool {method.__name__} {words}"):
            describe_method(method.__name__, method)


def test_class_or_options_that_cannot_work_are_refused_by_name():
    class Programmer:
        def run(self, code: str) -> str:
            """Run a program."""

    class Bare:
        """A class without a reward."""

    for target, options, words in (
        (Programmer, {}, r"Programmer.run has to be run\(task, policy\): .*; a tool needs another name"),
        (Calculator, {"reward": "exact"}, "Calculator has get_reward: leave out options.reward"),
        (Calculator, {"tool_calls": "xml"}, 'tool_calls is \'xml\'; it has to be "native" or "text"'),
        (Calculator, {"bonnus": 1.0}, "unexpected keyword argument 'bonnus'; there are: bonus, tool_calls, reward, "),
        (Bare, {}, r"write get_reward, or name an installed one in options\.reward"),
        (Bare, {"reward": "exakt"}, "no reward 'exakt' is installed here; there are: exact, "),
    ):
        with pytest.raises(ValueError, match=words):
            build_environment(target, options)


async def test_methods_may_name_the_fields_that_they_want():
    class Picky:
        def reset(self, answer: str) -> None:
            assert answer == "5"

        def get_reward(self, response: str) -> dict[str, float]:
            return {"reward": 2.0, "right": response == "5"}

    assert await play(ScriptedSession(says("5")), Picky) == Outcome(2.0, {"right": True})
