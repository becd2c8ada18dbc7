"""The pages of docs/reference are what the code says, and say all of it."""

import re

import pytest

from docs.generate import COMMAND, PAGES
from docs.generate.cli import commands
from docs.generate.rest import document, operations
from docs.generate.settings import SERVICES
from onbeat.config import JobConfig
from tests.docs.pages import text_of


@pytest.mark.parametrize("name", PAGES)
def test_page_is_up_to_date(name: str) -> None:
    assert text_of(f"docs/reference/{name}") == PAGES[name](), f"write the pages anew: {COMMAND}"


def test_every_setting_is_there() -> None:
    page = text_of("docs/reference/settings.md")
    names = {f"`ONBEAT_{name}`".upper() for settings in SERVICES.values() for name in settings.model_fields}
    assert {name for name in names if name not in page} == set()


def test_every_route_is_there() -> None:
    page = text_of("docs/reference/rest.md")
    assert [path for method, path, _ in operations(document()) if f"## `{method} {path}`" not in page] == []


def test_every_command_and_option_is_there() -> None:
    import typer

    from onbeat.cli import app

    page = text_of("docs/reference/cli.md")
    for path, command in commands(typer.main.get_command(app), ("onbeat",)):
        section = page.partition(f"\n## `{' '.join(path)}`\n")[2].partition("\n## ")[0]
        assert [name for each in command.params for name in each.opts if each.param_type_name == "option"
                and f"`{name}`" not in section] == []  # fmt: skip


def test_every_field_of_a_job_is_there() -> None:
    """Each definition's own fields, wherever it is used."""
    page = text_of("docs/reference/job.md")
    for definition in JobConfig.model_json_schema()["$defs"].values():
        missing = [
            name
            for name in definition["properties"]
            if name not in ("type", "mode") and not re.search(rf"[`.]{name}[`.]", page)
        ]
        assert missing == [], definition["title"]
