"""The page `/docs`: the REST API as its OpenAPI document describes it, without a script or anything from elsewhere.

It is the same for every caller, as the dashboard's files are, and needs no key.
"""

import html
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response

from services.broker.api.dashboard import Asset, answer
from services.broker.auth import required_role

router = APIRouter()

Schema = dict[str, Any]
SCHEMAS = "#/components/schemas/"
OF_EVERY_ROUTE = ("401", "403", "429")
# The frame of the page; the style and the theme are those of the dashboard.
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>REST API · Onbeat</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" type="image/svg+xml" href="assets/icon.svg">
<link rel="stylesheet" href="assets/style.css">
<script src="assets/theme.js"></script>
</head>
<body>
<main class="page api">
<h1>REST API</h1>
<p>All that the dashboard and the commands do. Bodies are JSON; a job may also be sent as TOML. Refusals are problem
documents (RFC 9457) whose <code>errors</code> name each wrong field. Send an API key, where the broker has keys, as
<code>Authorization: Bearer KEY</code>. Any route may answer 401, 403 and 429. The same for programs:
<a href="openapi.json">openapi.json</a> (role read). <a href="./">The dashboard</a></p>
{body}
</main>
</body>
</html>
"""


@router.api_route("/docs", methods=["GET", "HEAD"], include_in_schema=False)
async def get_reference(request: Request) -> Response:
    return answer(request, page_of(request.app))


@lru_cache(maxsize=1)
def page_of(app: FastAPI) -> Asset:
    return Asset(PAGE.format(body="\n".join(sections(app.openapi()))).encode(), "text/html; charset=utf-8")


def sections(api: Schema) -> Iterator[str]:
    """Yield the list of routes, each route, and each record."""
    calls = [(method.upper(), path, call) for path, calls in api["paths"].items() for method, call in calls.items()]
    calls.sort(key=lambda call: call[1])
    yield heading("Routes")
    link, role = '<a href="#{}"><code>{} {}</code></a>', '<span class="role">{}</span>'
    rows = [
        (link.format(anchor(method, path), method, escaped(path)), role.format(role_of(method, path)), summary)
        for method, path, call in calls
        for summary in [prose(re.split(r"(?<=[.!?])\s", call.get("description") or call["summary"])[0])]
    ]
    yield table("Routes", ("route", "role", "effect"), rows)
    for method, path, call in calls:
        yield from route(method, path, call)
    yield heading("Records")
    for name, schema in sorted(api["components"]["schemas"].items()):
        yield from record(name, schema)


def route(method: str, path: str, call: Schema) -> Iterator[str]:
    yield f'<section class="stack"><h3 id="{anchor(method, path)}" class="mono">{method} {escaped(path)}</h3>'
    yield f"<p>{prose(call.get('description') or call['summary'])}</p>"
    body = call.get("requestBody", {}).get("content", {})
    sent = [f"{kind(content['schema'])} ({escaped(media)})" for media, content in body.items() if "schema" in content]
    taken = f" Body: {' or '.join(sent)}." if sent else ""
    yield f'<p class="help">Role: {role_of(method, path)}.{taken}</p>'
    parameters = [
        (
            code(parameter["name"]),
            parameter["in"],
            kind(parameter["schema"]),
            "required" if parameter.get("required") else default_of(parameter["schema"]),
        )
        for parameter in call.get("parameters", [])
    ]
    call_name, columns = f"{method} {path}", ("parameter", "in", "type", "default")
    yield table(f"Parameters of {call_name}", columns, parameters) if parameters else ""
    responses = [
        (status, answered(response)) for status, response in call["responses"].items() if status not in OF_EVERY_ROUTE
    ]
    yield table(f"Answers of {call_name}", ("status", "answer"), responses) + "</section>"


def record(name: str, schema: Schema) -> Iterator[str]:
    yield f'<section class="stack"><h3 id="{escaped(name)}">{escaped(name)}</h3>'
    yield f"<p>{prose(schema.get('description', ''))}</p>"
    fields = [
        (code(field), kind(value), default_of(value), prose(value.get("description", "")))
        for field, value in schema.get("properties", {}).items()
    ]
    columns = ("field", "type", "default", "meaning")
    yield (table(f"Fields of {name}", columns, fields) if fields else f"<p>{kind(schema)}</p>") + "</section>"


def answered(response: Schema) -> str:
    kinds = [
        kind(content.get("schema", {}))
        for media, content in response.get("content", {}).items()
        if media != "application/problem+json"
    ]
    return " or ".join(filter(None, kinds)) or prose(response.get("description", ""))


def kind(schema: Schema) -> str:
    """Return the type of a value in HTML, with links to records."""
    return type_in_words(schema, lambda name: f'<a href="#{escaped(name)}">{escaped(name)}</a>', code)


def type_in_words(schema: Schema, link: Callable[[str], str], mark: Callable[[str], str]) -> str:
    """Return the type of a value in words. `link`: of a record, by its name; `mark`: of a value that is allowed."""
    if "$ref" in schema:
        return link(schema["$ref"].removeprefix(SCHEMAS))
    choices = [choice for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ())) if choice != {"type": "null"}]
    if choices:
        return " or ".join(dict.fromkeys(type_in_words(choice, link, mark) for choice in choices))
    if schema.get("type") == "array":
        parts = schema.get("prefixItems") or [schema.get("items", {})]
        return "list of " + " and ".join(type_in_words(part, link, mark) for part in parts)
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"map to {type_in_words(schema['additionalProperties'], link, mark)}"
    if values := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
        return " or ".join(mark(str(value)) for value in values)
    name: str = schema.get("type", "anything")
    return "text" if name == "string" else name


def code(text: str) -> str:
    return f"<code>{escaped(text)}</code>"


def default_of(schema: Schema) -> str:
    value = schema.get("default")
    return "" if value is None else code(str(value))


def role_of(method: str, path: str) -> str:
    role = required_role(method, path.replace("{job_id}", "job"))
    return role.value if role else "none"


def anchor(method: str, path: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", f"{method}{path}".lower()).strip("-")


def heading(text: str) -> str:
    return f"<h2>{escaped(text)}</h2>"


def prose(text: str) -> str:
    """Escape a sentence, and mark its `code`."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escaped(text))


def escaped(text: str) -> str:
    return html.escape(text)


def table(label: str, columns: tuple[str, ...], rows: Sequence[tuple[Any, ...]]) -> str:
    """Return a table whose cells are HTML. `label`: what a screen reader calls it."""
    head = "".join(f'<th scope="col">{column}</th>' for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escaped(label)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
