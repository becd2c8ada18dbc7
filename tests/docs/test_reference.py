"""The pages that are generated are what the code says, and say all of it."""

import pytest

from docs.generate import COMMAND, PAGES
from tests.docs.pages import text_of


@pytest.mark.parametrize("name", PAGES)
def test_page_is_up_to_date(name: str) -> None:
    assert text_of(f"docs/{name}") == PAGES[name](), f"write the pages anew: {COMMAND}"
