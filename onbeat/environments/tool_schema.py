"""Tools that the policy may call, made of methods: schemas from type hints and docstrings, and checked arguments."""

import functools
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from onbeat.environments.calls import call

ARGUMENT = re.compile(r"^\s+(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")  # a line below "Args:" in a docstring
NEXT_SECTION = re.compile(r"^\S.*:\s*$", re.MULTILINE)  # a heading in a docstring: Returns, Raises, Example
MISTAKES = (ValueError, LookupError, ArithmeticError)  # exceptions of a tool that the policy called wrongly


@dataclass(frozen=True)
class Tool:
    """A tool that the policy may call."""

    name: str
    description: str
    parameters: dict[str, Any]  # JSON schema
    call: Callable[[Mapping[str, Any]], Awaitable[str]]  # it returns what the tool says, also about wrong arguments

    def schema(self) -> dict[str, Any]:
        """Return the tool as OpenAI's API describes it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


def methods_as_tools(instance: Any, reserved: set[str]) -> dict[str, Tool]:
    """Return the public methods of an object by name, but for those reserved."""
    methods = inspect.getmembers(type(instance), lambda item: inspect.isfunction(inspect.unwrap(item)))  # also cached
    names = [name for name, _ in methods if not name.startswith("_") and name not in reserved]
    return {name: tool_of(getattr(instance, name)) for name in names}


def tool_of(method: Callable[..., Any]) -> Tool:
    """Describe a method with type hints and a docstring in Google's style. Raises ValueError without them, and for a
    method that cannot be a tool."""
    if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
        raise ValueError(f"the tool {method.__name__} is a generator: it has to return what it says, not to yield it")
    about, _, arguments = (inspect.getdoc(method) or "").partition("Args:")
    described = describe_arguments(NEXT_SECTION.split(arguments, maxsplit=1)[0])
    hints = get_type_hints(method)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(method).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(
                f"the tool {method.__name__} has `{parameter}`: arguments are passed by name, one for each"
            )
        if name not in hints:
            raise ValueError(f"the tool {method.__name__} needs a type hint for its parameter {name}")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[name] = (hints[name], Field(default, description=described.get(name)))
    if not about.strip():
        raise ValueError(f"the tool {method.__name__} needs a docstring: it is the description that the policy reads")
    model = create_model(method.__name__, __config__=ConfigDict(extra="forbid"), **fields)
    parameters = model.model_json_schema()
    for named in (parameters, *parameters["properties"].values()):
        named.pop("title", None)
    description = " ".join(about.partition("Returns:")[0].split())
    return Tool(method.__name__, description, parameters, functools.partial(call_checked, method, model))


async def call_checked(method: Callable[..., Any], model: type[BaseModel], arguments: Mapping[str, Any]) -> str:
    """Call a method with arguments that the model checks. Return what it says, as text."""
    try:
        given = model.model_validate(arguments)
        result = await call(method, **{name: getattr(given, name) for name in given.model_fields_set})
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in error.errors())
        return f"Error: wrong arguments for {method.__name__}: {wrong}"
    except MISTAKES as error:
        return f"Error: {error}"
    return result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False)


def describe_arguments(text: str) -> dict[str, str]:
    """Return the descriptions of arguments by name; a line that begins no argument goes on with the one before."""
    described: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if match := ARGUMENT.match(line):
            name, described[match[1]] = match[1], match[2]
        elif name and line.strip():
            described[name] += f" {line.strip()}"
    return described
