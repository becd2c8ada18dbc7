"""The chat template of a model in a folder, rendered as transformers does it, which the broker does without."""

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import meta, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from onbeat.contracts.chat_check import Messages

FILE, MORE_FILES = "chat_template.jinja", "chat_templates/*.jinja"
DEFAULT = "default"


class Generation(Extension):
    """The block `{% generation %}`, which marks answers for those who train on them: its text, as it is."""

    tags = {"generation"}  # noqa: RUF012  as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("as_it_is"), [], [], body).set_lineno(line)

    def as_it_is(self, caller: Callable[[], str]) -> str:
        return caller()


def make_environment() -> ImmutableSandboxedEnvironment:
    """Return Jinja with the filters, functions and blocks of transformers (utils/chat_template_utils.py)."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    raise TemplateError(message)


def read_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """Return the template that transformers would take without tools; None if there is none at all. Templates in files
    come first. Raises TemplateError where there are several, and none is the default."""
    templates = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob(MORE_FILES)}
    if (folder / FILE).is_file():
        templates[DEFAULT] = (folder / FILE).read_text(encoding="utf-8")
    if not templates:
        named = tokenizer_config.get("chat_template")
        if isinstance(named, list):
            templates = {entry["name"]: entry["template"] for entry in named}
        elif named is not None:
            templates = {DEFAULT: named} if isinstance(named, str) else dict(named)
    if templates and DEFAULT not in templates:
        raise TemplateError(f"has several templates ({', '.join(sorted(templates))}), and none of them is {DEFAULT!r}")
    return templates.get(DEFAULT)


def names_in(template: str) -> set[str]:
    """Return the names that a template takes from outside. Raises TemplateError."""
    return meta.find_undeclared_variables(make_environment().parse(template))


def render_with(
    template: str, special_tokens: Mapping[str, str], options: Mapping[str, Any], now: str | None
) -> Callable[[Messages], str]:
    """Return a function that renders messages as a prompt. It raises what Jinja and the template raise.

    options, now: of the job, `data.template_options` and `data.now`.
    """

    def render(messages: Messages) -> str:
        compiled = make_environment().from_string(template)
        given = {"tools": None, "documents": None, **special_tokens, **options}
        if now is not None:
            given["strftime_now"] = datetime.fromisoformat(now).strftime
        return compiled.render(messages=messages, add_generation_prompt=True, **given)

    return render
