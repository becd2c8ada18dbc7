"""The pages of docs/reference are what the code says, and say all of it."""

import re

import pytest

from docs.generate import COMMAND, PAGES
from onbeat.config import JobConfig
from tests.docs.pages import text_of


@pytest.mark.parametrize("name", PAGES)
def test_page_is_up_to_date(name: str) -> None:
    assert text_of(f"docs/reference/{name}") == PAGES[name](), f"write the pages anew: {COMMAND}"


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
