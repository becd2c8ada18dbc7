"""Any Python method is a tool as it is written: names, types and owners that are not common."""

import functools
import json
import math
import re
import typing
from collections import UserDict
from typing import Annotated, Any

import pytest
from pydantic import Field

from onbeat.environments import Task
from onbeat.environments.load import build_environment
from onbeat.environments.tool_schema import describe_method
from tests.scripted_session import ScriptedSession, calls, says

TASK = Task([{"role": "user", "content": "?"}], "?", "5")


def class_with(name: str, type_hint: str = "int") -> type:
    """Return a class whose tool `echo` has one parameter."""
    namespace: dict[str, Any] = {"typing": typing, "__name__": __name__}
    exec(f'def echo(self, {name}: {type_hint}) -> str:\n    """Repeat."""\n    return f"got {{{name}!r}}"', namespace)
    return type("Echo", (), {"echo": namespace["echo"], "get_reward": lambda _: 1.0})


class Counted:
    """A decorator that forgets to bind."""

    def __init__(self, method: Any) -> None:
        functools.update_wrapper(self, method)

    def __call__(self, *args: Any) -> None: ...


class Foreign:
    """A base of another package, such as Gym's Env."""

    __module__ = "gymnasium.core"

    def close(self):
        """Close the window."""

    def step(self, action: int) -> int:
        """Take a step."""
        return action

    @classmethod
    def make(cls):
        """Make one."""


class Base:
    def shared(self) -> str:
        """Return what all of the user's environments have."""
        return "shared"


class Shelf(Foreign, Base):
    def step(self, action: int) -> int:
        """Take a step of its own."""
        return 2 * super().step(action)

    @classmethod
    def kind(cls, number: int) -> str:
        """Return the kind."""
        return f"{cls.__name__} {number}"

    @staticmethod
    def double(number: int) -> int:
        """Double."""
        return 2 * number

    def get_reward(self) -> float:
        return 1.0


async def answer_of(of_class: type, tool: str, arguments: dict[str, Any], **options: Any) -> tuple[str, dict[str, Any]]:
    """Return what a tool says, and the descriptions of all tools."""
    session = ScriptedSession(calls(tool, arguments), says("done"))
    await build_environment(of_class, options).run(TASK, session)
    assert session.tools is not None
    return session.asked[1][-1]["content"], {tool["function"]["name"]: tool["function"] for tool in session.tools}


@pytest.mark.parametrize(
    "name",
    [
        *("model_config", "model_fields", "model_post_init", "copy", "json", "schema", "dict", "validate", "construct"),
        *(
            "_limit",
            "__",
            "from_",
            "class_",
            "self_",
            "cls",
            "method",
            "arguments",
            "argument_0",
            "func",
            "args",
            "kwargs",
        ),
    ],
)
async def test_parameter_may_have_any_name(name):
    said, tools = await answer_of(class_with(name), "echo", {name: 7})
    assert said == "got 7"
    assert tools["echo"]["parameters"] == {
        "type": "object",
        "additionalProperties": False,
        "properties": {name: {"type": "integer"}},
        "required": [name],
    }
    wrong, _ = await answer_of(class_with(name), "echo", {name: "x"})
    assert wrong.startswith(f"Error: wrong arguments for echo: {name}: Input should be a valid integer")
    missing, _ = await answer_of(class_with(name), "echo", {})
    assert missing == f"Error: wrong arguments for echo: {name}: Field required"


async def test_parameters_do_not_take_each_others_values():
    class Search:
        def find(self, argument_1: str, argument_0: str = "none", model_fields: str = "all") -> list[str]:
            """Find."""
            return [argument_1, argument_0, model_fields]

        def get_reward(self) -> float:
            return 1.0

    said, _ = await answer_of(Search, "find", {"model_fields": "c", "argument_1": "a"})
    assert said == '["a", "none", "c"]'


async def test_own_methods_are_tools_and_foreign_ones_are_not():
    said, tools = await answer_of(Shelf, "step", {"action": 3})
    assert said == "6"
    assert sorted(tools) == ["double", "kind", "shared", "step"]
    for name, answer in (("kind", "Shelf 4"), ("double", "8")):
        said, _ = await answer_of(Shelf, name, {"number": 4})
        assert said == answer


def test_foreign_methods_are_named_when_the_environment_starts():
    words = "Foreign.close, Foreign.make are not offered as tools: they are of another package; "
    assert build_environment(Shelf, {}).warning == f"{words}to offer one, define it in Shelf"
    assert "UserDict.copy" in build_environment(type("Bag", (UserDict,), {"get_reward": lambda _: 1.0}), {}).warning
    assert build_environment(class_with("a"), {}).warning == ""


async def test_tool_has_the_name_that_the_class_gives_it():
    def called(method):
        def call(self, number: int) -> int:
            """Call."""
            return method(self, number)

        return call

    class Named:
        @called
        def add(self, number: int) -> int:
            return number + 1

        def get_reward(self) -> float:
            return 1.0

    said, tools = await answer_of(Named, "add", {"number": 1})
    assert (said, list(tools)) == ("2", ["add"])


@pytest.mark.parametrize(
    ("type_hint", "reason"),
    [
        ("'Missing'", "name 'Missing' is not defined"),
        ("list['Missing']", "name 'Missing' is not defined"),
        ("'list['", "Forward reference must be an expression"),
        ("object.nothing if False else 'typing.Nothing'", "module 'typing' has no attribute 'Nothing'"),
        ("type('Own', (), {})", "Unable to generate pydantic-core schema for <class '"),
        ("typing.Callable[[int], int]", "Cannot generate a JsonSchema for core_schema.CallableSchema"),
    ],
)
def test_type_that_cannot_be_described_is_refused_at_the_start(type_hint, reason):
    with pytest.raises(ValueError, match=re.escape(reason)) as caught:
        build_environment(class_with("item", type_hint), {})
    assert str(caught.value).startswith("Echo: the tool echo: the type ")
    assert " of its parameter item cannot be described: " in str(caught.value)
    assert str(caught.value).endswith("; use a type that JSON can hold and whose name the module knows")


def test_typed_dict_of_typing_is_described_or_refused_by_name():
    from pydantic import PydanticUserError, TypeAdapter

    hint = "typing.TypedDict('Row', {'x': int})"
    try:
        TypeAdapter(typing.TypedDict("Row", {"x": int}))
    except PydanticUserError:  # Python is older than 3.12
        with pytest.raises(ValueError, match=r"parameter item .*`typing_extensions\.TypedDict` instead"):
            build_environment(class_with("item", hint), {})
    else:
        build_environment(class_with("item", hint), {})


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (lambda: 5, "Odd: the tool look needs the parameter `self`, or the decorator @staticmethod"),
        (lambda self, a: 5, "Odd: the tool look needs a type hint for its parameter a"),
        (Counted(class_with("a").echo), "Odd: the tool look needs a type hint for its parameter self"),
    ],
)
def test_method_that_is_no_tool_is_refused_at_the_start(method, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        build_environment(type("Odd", (), {"look": method, "get_reward": lambda _: 1.0}), {})


async def test_tools_answer_is_json_also_with_nan():
    class Statistics:
        def mean(self, limit: float = math.inf) -> Any:
            """Return numbers."""
            return {"mean": math.nan, "range": [-math.inf, limit], "name": "NaN, é"}

        def get_reward(self) -> float:
            return 1.0

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    said, tools = await answer_of(Statistics, "mean", {"limit": "Infinity"})
    assert json.loads(said, parse_constant=refuse) == {
        "mean": "NaN",
        "range": ["-Infinity", "Infinity"],
        "name": "NaN, é",
    }
    assert "é" in said
    assert tools["mean"]["parameters"]["properties"]["limit"]["default"] == "Infinity"


# ---- constraints of annotations ----------------------------------------------------------------------------------


class Shop:
    def buy(
        self,
        number: Annotated[int, Field(ge=1, le=9)],
        words: "Annotated[list[Annotated[str, Field(max_length=3)]], Field(max_length=2)]",
        code: Annotated[str, Field(pattern="^[a-z]+$", description="letters")] = "a",
        rate: Annotated[float, "not a constraint"] = 0.5,
        maybe: Annotated[int, Field(gt=0)] | None = None,
    ) -> str:
        """Buy things.

        Args:
            number: how many
        """
        return f"{number} {words} {code} {rate} {maybe}"


def test_constraints_of_annotations_are_announced():
    properties = describe_method("buy", Shop().buy).parameters["properties"]
    assert properties["number"] == {"type": "integer", "minimum": 1, "maximum": 9, "description": "how many"}
    words = {"type": "array", "maxItems": 2, "items": {"type": "string", "maxLength": 3}}
    assert properties["words"] == words
    code = {"type": "string", "pattern": "^[a-z]+$", "description": "letters", "default": "a"}
    assert properties["code"] == code
    assert properties["rate"] == {"type": "number", "default": 0.5}
    assert {"type": "integer", "exclusiveMinimum": 0} in properties["maybe"]["anyOf"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "1 ['a'] a 0.5 None"),
        ({"number": 9, "code": "bc", "maybe": 1}, "9 ['a'] bc 0.5 1"),
        ({"number": 0}, "Error: wrong arguments for buy: number: Input should be greater than or equal to 1"),
        ({"words": ["a", "b", "c"]}, "Error: wrong arguments for buy: words: List should have at most 2 items"),
        ({"words": ["long"]}, "Error: wrong arguments for buy: words.0: String should have at most 3 characters"),
        ({"code": "7"}, "Error: wrong arguments for buy: code: String should match pattern '^[a-z]+$'"),
        ({"maybe": 0}, "Error: wrong arguments for buy: maybe: Input should be greater than 0"),
    ],
)
async def test_constraints_of_annotations_hold_for_calls(arguments, said):
    tool = describe_method("buy", Shop().buy).on(Shop())
    assert (await tool.call({"number": 1, "words": ["a"]} | arguments)).startswith(said)
