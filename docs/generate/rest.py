"""docs/reference/rest.md from the broker's OpenAPI document and its table of roles."""

import re
from collections.abc import Iterator
from typing import Any

from docs.generate.markdown import code, generated_note, join, sentence, table
from onbeat.streams.connection import connect
from onbeat.streams.ledger import Ledger
from services.broker.api.reference import type_in_words
from services.broker.app import create_app
from services.broker.auth import required_role
from services.broker.settings import Settings

Schema = dict[str, Any]

INTRODUCTION = """# REST

This page is generated from the broker's OpenAPI document, `/openapi.json`. Bodies are JSON; a job may also be sent as
TOML. Every error is a problem document ([RFC 9457](https://www.rfc-editor.org/rfc/rfc9457)): `type`, `title`, `status`,
`detail`, and `errors` with one entry for each wrong field: `field`, `message` and, for TOML, `line`. Send the API key
in the header `Authorization: Bearer KEY`; [security](../security.md#api-keys) says what each role may do.
[The Python client](../sdk.md) has a method for nearly every call."""

EVERYWHERE = {"401", "403", "429"}
THE_JOB = "[the job](job.md)"


def document() -> Schema:
    """OpenAPI of a broker with default settings. Nothing is connected to."""
    return create_app(Settings(), Ledger(connect("redis://127.0.0.1:1", retry_s=1))).openapi()


def with_plain_values(schema: Any, schemas: Schema) -> Any:
    """References to what is no record, such as the states of a job, replaced by what they refer to."""
    if isinstance(schema, list):
        return [with_plain_values(item, schemas) for item in schema]
    if not isinstance(schema, dict):
        return schema
    target = schemas.get(str(schema.get("$ref", "")).rpartition("/")[2], {"properties": {}})
    if "properties" not in target:
        return target
    return {name: with_plain_values(value, schemas) for name, value in schema.items()}


def page() -> str:
    api = document()
    api = with_plain_values(api, api["components"]["schemas"])
    calls = list(operations(api))
    overview = [(code(f"{method} {path}"), role_of(method, path), first_sentence(call)) for method, path, call in calls]
    schemas = api["components"]["schemas"]
    return join(
        generated_note("the broker's OpenAPI document"),
        INTRODUCTION,
        "## All routes",
        table(["route", "role", "effect"], overview),
        "Any route may answer 401 (no valid key), 403 (insufficient role) and 429 (too many requests).",
        *(describe(method, path, call, schemas) for method, path, call in calls),
        "## Records",
        *(record(name, schemas[name]) for name in sorted(records(calls, schemas))),
    )


def operations(api: Schema) -> Iterator[tuple[str, str, Schema]]:
    for path, methods in sorted(api["paths"].items()):
        for method, call in methods.items():
            yield method.upper(), path, call


def role_of(method: str, path: str) -> str:
    role = required_role(method, path.replace("{job_id}", "job"))
    return code(role.value) if role else "none"


def first_sentence(call: Schema) -> str:
    return sentence(re.split(r"(?<=[.!?])\s", sentence(call.get("description") or call["summary"]))[0])


def describe(method: str, path: str, call: Schema, schemas: Schema) -> str:
    rows = [
        (
            code(parameter["name"]),
            parameter["in"],
            kind(parameter["schema"]),
            default(parameter),
            sentence(parameter.get("description", "")),
        )
        for parameter in call.get("parameters", [])
    ]
    body = call.get("requestBody", {}).get("content", {})
    sent = [
        f"Body: {kind(content['schema'])} ({code(media)})." for media, content in body.items() if "schema" in content
    ]
    return join(
        f"## `{method} {path}`",
        sentence(call.get("description") or call["summary"]),
        f"Role: {role_of(method, path)}.",
        *sent,
        table(["parameter", "in", "type", "default", "meaning"], rows) if rows else "",
        table(
            ["status", "answer"],
            [
                answer(*status_and_response)
                for status_and_response in call["responses"].items()
                if status_and_response[0] not in EVERYWHERE
            ],
        ),
    )


def answer(status: str, response: Schema) -> tuple[str, str]:
    media = [media_type for media_type in response.get("content", {}) if media_type != "application/problem+json"]
    kinds = [kind(response["content"][media_type].get("schema", {})) for media_type in media]
    text = " or ".join(filter(None, kinds)) if status.startswith("2") else ""
    return status, text or sentence(response.get("description", ""))


def kind(schema: Schema) -> str:
    """Return the type of a value in Markdown, with links to records."""
    return type_in_words(schema, lambda name: f"[{name}](#{name.lower()})" if name != "JobConfig" else THE_JOB, code)


def default(parameter: Schema) -> str:
    if parameter.get("required"):
        return "needed"
    value = parameter["schema"].get("default")
    return "" if value is None else code(str(value))


def records(calls: list[tuple[str, str, Schema]], schemas: Schema) -> set[str]:
    """Names of all records that a body, an answer or a record in them has; those of a job are in job.md."""
    wanted = [name for _, _, call in calls for name in refs([call["responses"], call.get("requestBody", {})])]
    wanted = [name for name in wanted if name != "JobConfig"]
    reachable: set[str] = set()
    while wanted:
        name = wanted.pop()
        if name not in reachable:
            reachable.add(name)
            wanted += refs(schemas[name])
    return reachable


def refs(schema: Any) -> list[str]:
    if isinstance(schema, dict):
        names = [schema["$ref"].rpartition("/")[2]] if isinstance(schema.get("$ref"), str) else []
        return names + [name for value in schema.values() for name in refs(value)]
    return [name for value in schema for name in refs(value)] if isinstance(schema, list) else []


def record(name: str, schema: Schema) -> str:
    rows = [
        (code(field), kind(value), sentence(value.get("description", "")))
        for field, value in schema["properties"].items()
    ]
    return join(f"### {name}", sentence(schema.get("description", "")), table(["field", "type", "meaning"], rows))
