"""A job sent as `application/toml`: FastAPI reads it like JSON, and errors name the line that each field is on."""

import re
import tomllib
from collections.abc import Callable, Coroutine, Iterable
from itertools import accumulate
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel

from onbeat.contracts.errors import OnbeatError
from services.broker.admission.model_files import Complaint

MEDIA_TYPE = "application/toml"
MAX_CHARACTERS = 65_536  # tomllib takes about a second for a million
# a.b.c...: the time that it takes to be read grows with the square of its parts.
LONG_KEY = re.compile(r"""(?<![^\s.=])(?:(?:"[^"\n]*+"|'[^'\n]*+'|[^\s.="']++)\s*+\.\s*+){32}""")
AT_LINE = re.compile(r"\(at line (\d+), column \d+\)")
NAME = r"""(?P<path>(?:[\w-]+|"[^"]*"|'[^']*')(?:[ \t]*\.[ \t]*(?:[\w-]+|"[^"]*"|'[^']*'))*)"""
HEADER = re.compile(rf"[ \t]*(?P<brackets>\[\[?)[ \t]*{NAME}[ \t]*\]{{1,2}}[ \t]*$")
KEY = re.compile(rf"[ \t]*{NAME}[ \t]*=")
# A comment, a string that may go over several lines, or a short one.
OPAQUE = re.compile(r'''(?s:#[^\n]*|"""(?:\\.|[^\\])*?"""+|'{3}.*?'{3,}|(?P<short>"(?:\\.|[^"\\])*"|'[^']*'))''')

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class FieldError(BaseModel):
    field: str
    message: str
    line: int | None = None  # where it is in the TOML that was sent


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
            media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if self.body_field is None or media_type != MEDIA_TYPE:
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
        match = AT_LINE.search(str(error))
        raise MalformedToml(str(error), int(match[1]) if match else None) from error


def field_errors(request: Request, complaints: Iterable[Complaint]) -> list[FieldError]:
    """Return the complaints, if TOML was sent with the line of each field, or of the section that it is missing in."""
    lines = lines_of(getattr(request.state, "toml", ""))
    return [FieldError(field=field, message=message, line=line_of(field, lines)) for field, message in complaints]


def line_of(field: str, lines: dict[str, int]) -> int | None:
    """Return the line of a field, or else of the innermost section around it that has one.

    >>> line_of("model.dtype", {"model": 4, "model.path": 5})
    4
    """
    while field and field not in lines:
        field = field.rpartition(".")[0]
    return lines.get(field)


def lines_of(text: str) -> dict[str, int]:
    """Return the line of each table and key that begins a line, by its dotted path. The text is valid TOML.

    >>> lines_of('name = "a"\\n[model]\\npath = "b"\\n[[tracking]]\\ntype = "wandb"')
    {'name': 1, 'model': 2, 'model.path': 3, 'tracking': 4, 'tracking.0': 4, 'tracking.0.type': 5}
    """
    lines: dict[str, int] = {}
    arrays: dict[str, int] = {}  # arrays of tables so far, and the number of their last table
    section = ""
    text = OPAQUE.sub(lambda match: match["short"] or "\n" * match[0].count("\n"), text)
    for number, line in enumerate(text.split("\n"), start=1):
        if not (match := HEADER.match(line) or KEY.match(line)):
            continue
        path = ".".join(part.strip(" \t\"'") for part in match["path"].split("."))
        if match.re is KEY:
            for name in accumulate(path.split("."), "{}.{}".format):  # tags.run also begins the table of the tags
                lines.setdefault(f"{section}.{name}".lstrip("."), number)
            continue
        *outer, name = path.split(".")
        path = ""
        for part in outer:
            path += part
            path += f".{arrays[path]}." if path in arrays else "."
        path += name
        lines.setdefault(path, number)
        if match["brackets"] == "[[":
            arrays[path] = arrays.get(path, -1) + 1
            path = f"{path}.{arrays[path]}"
            lines[path] = number
        section = path
    return lines
