"""A job sent as `application/toml`: FastAPI reads it like JSON, and errors name the line that each field is on."""

import re
import tomllib
from collections.abc import Callable, Coroutine, Iterator
from email.message import Message
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from onbeat.errors import OnbeatError
from services.broker.admission.review import FieldError

MEDIA_TYPE = "application/toml"
MAX_CHARACTERS = 65_536  # tomllib takes about a second for a million
MAX_LINES, MAX_STATEMENT_LINES = 2000, 50  # lines that are searched for a field
LONG_KEY = re.compile(r"(?:[^\s.=]+\s*\.\s*){33}")  # a.b.c...: its time grows with the square of its parts
AT_LINE = re.compile(r"\(at line (\d+), column \d+\)")

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class MalformedToml(OnbeatError):
    """The body cannot be read as TOML."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


class TomlRoute(APIRoute):
    """A route whose JSON body may be sent as TOML instead."""

    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()

        async def handle_either(request: Request) -> Response:
            if self.body_field is None or media_type_of(request) != MEDIA_TYPE:
                return await handle(request)
            text = decode(await request.body())
            request.state.toml = text
            return await handle(TomlRequest(request, parse(text)))

        return handle_either


class TomlRequest(Request):
    """A request whose TOML body has been parsed; its content type says JSON."""

    def __init__(self, request: Request, parsed: dict[str, Any]) -> None:
        headers = [header for header in request.scope["headers"] if header[0] != b"content-type"]
        scope = {**request.scope, "headers": [*headers, (b"content-type", b"application/json")]}
        super().__init__(scope, request.receive)
        self._parsed = parsed

    async def body(self) -> bytes:
        return b"{}"  # FastAPI only looks whether there is one

    async def json(self) -> Any:
        return self._parsed


def media_type_of(request: Request) -> str:
    header = Message()
    header["content-type"] = request.headers.get("content-type", "")
    return header.get_content_type()


def decode(body: bytes) -> str:
    """Decode UTF-8, with or without a byte order mark, and unify line ends. Raises MalformedToml."""
    try:
        return body.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise MalformedToml(f"it is not UTF-8 (byte {error.start})") from error


def parse(text: str) -> dict[str, Any]:
    """Parse TOML. Raises MalformedToml, with the line where it is known."""
    if len(text) > MAX_CHARACTERS:
        raise MalformedToml(f"at most {MAX_CHARACTERS} characters of TOML are taken; send a larger job as JSON")
    if LONG_KEY.search(text):
        raise MalformedToml("a key has more than 32 parts")
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise MalformedToml("it is nested too deep") from error
    except ValueError as error:  # TOMLDecodeError, or a number with thousands of digits
        found = AT_LINE.search(str(error))
        raise MalformedToml(str(error), int(found[1]) if found else None) from error


def name_lines(request: Request, errors: list[FieldError]) -> list[FieldError]:
    """Add to each error the line of its field, or of the section that the field is missing in, if TOML was sent."""
    text = getattr(request.state, "toml", None)
    if text is None:
        return errors
    lines = dict(lines_of(text))
    return [error.model_copy(update={"line": line_of(error.field, lines)}) for error in errors]


def line_of(field: str, lines: dict[str, int]) -> int | None:
    """Return the line of a field, or else of the innermost section around it that has one.

    >>> line_of("model.dtype", {"model": 4, "model.path": 5})
    4
    """
    while field and field not in lines:
        field = field.rpartition(".")[0]
    return lines.get(field)


def lines_of(text: str) -> Iterator[tuple[str, int]]:
    """Yield (dotted path, line) of each table and key. Stops at a statement that is longer than MAX_STATEMENT_LINES.

    >>> dict(lines_of('name = "a"\\n[model]\\npath = "b"'))
    {'name': 1, 'model': 2, 'model.path': 3}
    """
    section: tuple[str, ...] = ()
    counts: dict[tuple[str, ...], int] = {}  # tables of each array so far
    for number, statement in statements(text):
        parsed = tomllib.loads(statement)
        if not statement.lstrip().startswith("["):
            yield from ((".".join(section + path), number) for path in paths_in(parsed))
            continue
        *_, name = paths_in(parsed)
        if statement.lstrip().startswith("[["):
            name = name[:-1]  # without the index of the only table
            counts[name] = counts.get(name, -1) + 1
        section = numbered(name, counts)
        yield ".".join(section), number


def statements(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each header or key with its value, which may go over several lines."""
    pending, start = "", 0
    for number, line in enumerate(text.split("\n")[:MAX_LINES], start=1):
        if not pending:
            start = number
        pending += line + "\n"
        try:
            is_empty = not tomllib.loads(pending)
        except tomllib.TOMLDecodeError:
            if number - start >= MAX_STATEMENT_LINES:
                return
            continue
        if not is_empty:
            yield start, pending
        pending = ""


def paths_in(parsed: dict[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every table, list item and value, outer ones first.

    >>> list(paths_in({"a": {"b": [{}]}}))
    [('a',), ('a', 'b'), ('a', 'b', '0')]
    """
    for key, value in parsed.items():
        yield (path := (*before, key))
        inner = {str(index): item for index, item in enumerate(value)} if isinstance(value, list) else value
        if isinstance(inner, dict):
            yield from paths_in(inner, path)


def numbered(name: tuple[str, ...], counts: dict[tuple[str, ...], int]) -> tuple[str, ...]:
    """
    >>> numbered(("tracking", "tags"), {("tracking",): 1})
    ('tracking', '1', 'tags')
    """
    path: tuple[str, ...] = ()
    for end in range(1, len(name) + 1):
        path = (*path, name[end - 1])
        if name[:end] in counts:
            path = (*path, str(counts[name[:end]]))
    return path
