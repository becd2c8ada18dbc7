"""docs/reference/job.md from the schema of JobConfig: one table for each section, or for each variant of a union."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from docs.generate.examples import EXAMPLES
from docs.generate.markdown import code, generated_note, join, sentence, table
from onbeat.config import JobConfig
from onbeat.objectives import BUILT_IN

Schema = dict[str, Any]

INTRODUCTION = """# The job file

A job is a TOML or JSON file. Unknown keys are refused, and every refusal names the field. A field without a default
must be given. [Training](../training.md) explains how the parts belong together. Start from
[quickstart.toml](../../examples/quickstart.toml), [from_jsonl.toml](../../examples/from_jsonl.toml) or
[bounded.toml](../../examples/bounded.toml). `GET /v1/job-schema` of a broker returns this page as a JSON schema.

If a section comes in several kinds, `type` or `mode` chooses one. The examples are fragments: put into the file of the
quick start, each gives a valid job."""

LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
    "minLength": "{} letters or more",
    "maxLength": "{} letters or fewer",
    "maxItems": "{} or fewer",
}


def page() -> str:
    schema = JobConfig.model_json_schema()
    definitions = schema["$defs"]
    sections = {name: field for name, field in schema["properties"].items() if variants(field, definitions)}
    plain = {name: field for name, field in schema["properties"].items() if name not in sections}
    top = [field_row(name, field, schema) for name, field in plain.items()]
    top += [section_row(name, field, schema) for name, field in sections.items()]
    return join(
        generated_note("onbeat/config/ and onbeat/objectives/"),
        INTRODUCTION,
        "## The whole file",
        table(HEADS, top),
        *(section(name, field, definitions) for name, field in sections.items()),
        "## Objectives and schedules",
        "Which objective runs in which `schedule.mode` ([a package](../objectives.md) can bring another one):",
        table(["objective", "modes"], [(code(o), ", ".join(map(code, kind.modes))) for o, kind in BUILT_IN.items()]),
    )


CHOOSERS = {"type", "mode"}
HEADS = ["field", "type", "default", "limits", "meaning"]


def section(name: str, field: Schema, definitions: dict[str, Schema]) -> str:
    kinds = variants(field, definitions)
    is_list = field.get("type") == "array"
    shared = shared_fields(kinds) if len(kinds) > 1 else set()
    parts = [f"## `[[{name}]]`" if is_list else f"## `[{name}]`", sentence(field.get("description", ""))]
    if shared:
        parts += ["Every kind has:", table(HEADS, fields(kinds[0], shared, definitions))]
    for definition in kinds:
        if len(kinds) > 1:
            parts.append(f"### {chooser(definition)}")
        keys = definition["properties"].keys() - shared - (CHOOSERS if len(kinds) > 1 else set())
        parts += [sentence(definition.get("description", "")), table(HEADS, fields(definition, keys, definitions))]
    if name in EXAMPLES:
        parts.append(f"```toml\n{EXAMPLES[name].strip()}\n```")
    return join(*parts)


def shared_fields(definitions: list[Schema]) -> set[str]:
    """Names of the fields that are the same in every kind."""
    names = set.intersection(*(set(definition["properties"]) for definition in definitions)) - CHOOSERS
    return {
        name for name in names if all(d["properties"][name] == definitions[0]["properties"][name] for d in definitions)
    }


def fields(
    definition: Schema, names: Iterable[str], definitions: dict[str, Schema], prefix: str = "", note: str = ""
) -> Iterator[tuple[str, ...]]:
    """Rows; of an inner section its fields, with their names in full. `note` begins their meaning."""
    for name in (name for name in definition["properties"] if name in set(names)):
        field = definition["properties"][name]
        inner = variants(field, definitions)
        if not inner:
            yield field_row(prefix + name, field, definition, note)
        elif len(inner) == 1:
            yield from fields(inner[0], inner[0]["properties"], definitions, f"{prefix}{name}.")
        else:
            yield from union_rows(prefix + name, field, definition, definitions)


def union_rows(name: str, field: Schema, owner: Schema, definitions: dict[str, Schema]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a field that holds one of several kinds of section; `data` has a section of its own."""
    inner = variants(field, definitions)
    default = default_of(name.rpartition(".")[2], field, owner)
    is_data = inner == variants(JobConfig.model_json_schema()["properties"]["data"], definitions)
    kinds = "as [data](#data)" if is_data else " or ".join(chooser(variant) for variant in inner)
    yield code(name), kinds, default, "", sentence(field.get("description", ""))
    for variant in [] if is_data else inner:
        keys = variant["properties"].keys() - CHOOSERS
        yield from fields(variant, keys, definitions, f"{name}.", f"Of {chooser(variant)}. ")


def field_row(name: str, field: Schema, owner: Schema, note: str = "") -> tuple[str, ...]:
    default = default_of(name.rpartition(".")[2], field, owner)
    return code(name), type_of(field), default, limits_of(field), note + sentence(field.get("description", ""))


def section_row(name: str, field: Schema, schema: Schema) -> tuple[str, ...]:
    kind = "sections" if field.get("type") == "array" else "section"
    default = default_of(name, field, schema) and ("none" if field.get("default", 0) is None else "see there")
    anchor = f"[{name}](#{name})"
    return code(name), f"{kind} {anchor}", default or "", "", sentence(field.get("description", ""))


def variants(field: Schema, definitions: dict[str, Schema]) -> list[Schema]:
    """Return the sections that a field may hold; none for a plain value."""
    alternatives = [field, *field.get("anyOf", []), *field.get("oneOf", []), field.get("items", {})]
    alternatives += [
        inner
        for alternative in alternatives[1:]
        for inner in (*alternative.get("oneOf", []), *alternative.get("anyOf", []))
    ]
    names = [
        alternative["$ref"].rpartition("/")[2]
        for alternative in alternatives
        if isinstance(alternative, dict) and "$ref" in alternative
    ]
    return [definitions[name] for name in dict.fromkeys(names) if "properties" in definitions[name]]


def chooser(definition: Schema) -> str:
    """Return the text of the field by which this kind is chosen, such as `type = "grpo"`."""
    for name in ("type", "mode"):
        field = definition["properties"].get(name, {})
        values = [field["const"]] if "const" in field else field.get("enum", []) if name == "type" else []
        if values:
            return f"`{name} = " + "` or `".join(json.dumps(value) for value in values) + "`"
    return ""


def type_of(field: Schema) -> str:
    if "const" in field:
        return code(json.dumps(field["const"]))
    if "enum" in field:
        return " or ".join(code(json.dumps(value)) for value in field["enum"])
    kinds_of_value = (*field.get("anyOf", []), *field.get("oneOf", []))
    if alternatives := [alternative for alternative in kinds_of_value if alternative != {"type": "null"}]:
        return " or ".join(type_of(alternative) for alternative in alternatives)
    if field.get("type") == "array":
        inner = field.get("prefixItems") or [field["items"]]
        kinds = dict.fromkeys(type_of(item) for item in inner)
        return (f"{len(inner)} " if "prefixItems" in field else "list of ") + " or ".join(kinds)
    return {"object": "table", "number": "number", "integer": "integer", "boolean": "true or false"}.get(
        field.get("type", ""), "text"
    )


def default_of(name: str, field: Schema, owner: Schema) -> str:
    """Empty: has to be given. A default that a validator or a factory makes is in the description."""
    if name in owner.get("required", []):
        return ""
    if field.get("default", {}) is None:
        return "none"
    if "default" not in field:
        return {"object": "`{}`", "array": "`[]`"}.get(field.get("type", ""), "see there")
    return code(json.dumps(field["default"]))


def limits_of(field: Schema) -> str:
    limits = [text.format(field[key]) for key, text in LIMITS.items() if key in field]
    limits += [f"matches {code(field['pattern'])}"] if "pattern" in field else []
    for inner in (*field.get("anyOf", []), *field.get("oneOf", []), *field.get("prefixItems", [])[:1]):
        limits += [limits_of(inner)] if limits_of(inner) else []
    return ", ".join(limits)
