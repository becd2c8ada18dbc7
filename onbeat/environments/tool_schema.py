"""Tools that the policy may call, made of methods: schemas from type hints and docstrings, and checked arguments."""

import functools
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticUserError

from onbeat.environments.calls import call

ARGUMENT = re.compile(r"^\s+(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")  # a line below "Args:" in a docstring
NEXT_SECTION = re.compile(r"^\S.*:\s*$", re.MULTILINE)  # a heading in a docstring: Returns, Raises, Example
MISTAKES = (ValueError, LookupError, ArithmeticError)  # exceptions of a tool that the policy called wrongly
UNDESCRIBED = (
    PydanticUserError,
    NameError,
    AttributeError,
    TypeError,
    SyntaxError,
)  # exceptions of pydantic and typing


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


@dataclass(frozen=True)
class ToolMethod:
    """A method of a class that is a tool: described once, and called on the object of each episode."""

    name: str
    description: str
    parameters: dict[str, Any]  # JSON schema
    model: type[BaseModel]  # model of the arguments: its fields have names of their own, and the parameters' as aliases

    def on(self, instance: Any) -> Tool:
        """Return the tool of one object."""
        call_method = functools.partial(self._call, getattr(instance, self.name))
        return Tool(self.name, self.description, self.parameters, call_method)

    async def _call(self, method: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
        """Call a method with arguments that the model checks. Return what it says, as text."""
        try:
            given = self.model.model_validate(arguments)
            aliases = {str(self.model.model_fields[name].alias): name for name in given.model_fields_set}
            result = await call(method, **{alias: getattr(given, name) for alias, name in aliases.items()})
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in error.errors())
            return f"Error: wrong arguments for {self.name}: {wrong}"
        except MISTAKES as error:
            return f"Error: {error}"
        return result if isinstance(result, str) else write_json(result)


def tools_of_class(of_class: type, reserved: set[str]) -> tuple[list[ToolMethod], list[str]]:
    """Return the public methods that a class offers as tools, but for those reserved, and the names of those left out:
    it inherits them from another package. Raises ValueError for one that cannot be a tool."""
    tools, left_out = [], []
    for name, attribute in inspect.getmembers_static(of_class):
        if name.startswith("_") or name in reserved or not inspect.isfunction(inspect.unwrap(attribute)):
            continue
        owner = next(base for base in of_class.__mro__ if name in vars(base))
        if package_of(owner) != package_of(of_class):
            left_out.append(f"{owner.__name__}.{name}")
            continue
        unused = object()  # the method is described as bound to an object, and not called on it
        method = attribute.__get__(unused, of_class) if hasattr(attribute, "__get__") else attribute
        try:
            tools.append(describe_method(name, method))
        except ValueError as error:
            raise ValueError(f"{of_class.__name__}: {error}") from error
    return tools, left_out


def package_of(of_class: type) -> str:
    return of_class.__module__.partition(".")[0]


def describe_method(tool: str, method: Callable[..., Any]) -> ToolMethod:
    """Describe a method with type hints and a docstring in Google's style. Raises ValueError without them, and for a
    method that cannot be a tool."""
    if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
        raise ValueError(f"the tool {tool} is a generator: it has to return what it says, not to yield it")
    try:
        signature = inspect.signature(method)
    except ValueError as error:
        raise ValueError(f"the tool {tool} needs the parameter `self`, or the decorator @staticmethod") from error
    about, _, arguments = (inspect.getdoc(method) or "").partition("Args:")
    described = describe_arguments(NEXT_SECTION.split(arguments, maxsplit=1)[0])
    fields: dict[str, Any] = {}
    for name, parameter in signature.parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"the tool {tool} has `{parameter}`: arguments are passed by name, one for each")
        if parameter.annotation is parameter.empty:
            raise ValueError(f"the tool {tool} needs a type hint for its parameter {name}")
        default = ... if parameter.default is parameter.empty else parameter.default
        about_it: dict[str, Any] = (
            {"description": described[name]} if name in described else {}
        )  # else that of an annotation stays
        field = Field(default, alias=name, **about_it)
        fields[f"argument_{len(fields)}"] = (hint_of(tool, method, parameter), field)  # pydantic keeps some names
    if not about.strip():
        raise ValueError(f"the tool {tool} needs a docstring: it is the description that the policy reads")
    model = create_model(tool, __config__=ConfigDict(extra="forbid"), **fields)
    parameters = json.loads(write_json(model.model_json_schema()))  # a default may be inf
    for schema in (parameters, *parameters["properties"].values()):
        schema.pop("title", None)
    return ToolMethod(tool, " ".join(about.partition("Returns:")[0].split()), parameters, model)


def hint_of(tool: str, method: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """Return the type of a parameter, with its constraints. Raises ValueError for one that JSON schema cannot
    describe."""
    annotated = SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    names = getattr(inspect.unwrap(method), "__globals__", {})
    try:
        hint = get_type_hints(annotated, globalns=names, include_extras=True)[parameter.name]
        TypeAdapter(hint).json_schema()
    except UNDESCRIBED as error:
        reason = str(error).partition(". ")[0].rstrip(".")
        type_hint = parameter.annotation if isinstance(parameter.annotation, str) else repr(parameter.annotation)
        about = f"the tool {tool}: the type {type_hint} of its parameter {parameter.name} cannot be described"
        raise ValueError(f"{about}: {reason}; use a type that JSON can hold and whose name the module knows") from error
    return hint


def write_json(value: Any) -> str:
    """Return a value as JSON, which has no numbers for nan and inf: they are texts there.

    >>> write_json({"mean": float("nan")})
    '{"mean": "NaN"}'
    """
    return json.dumps(json.loads(json.dumps(value, default=str), parse_constant=str), ensure_ascii=False)


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
