"""Links between pages, and to files of the repository, are right in the plain files."""

import pytest

from tests.docs.pages import ROOT, anchors_of, links_of, page_names, text_of


@pytest.mark.parametrize("page", page_names())
def test_every_link_leads_to_a_file_and_a_heading(page: str) -> None:
    def problems(page: str) -> list[str]:
        problems = []
        for line, link in links_of(page):
            if link.startswith(("http://", "https://", "mailto:")):
                continue
            path, _, anchor = link.partition("#")
            target = (ROOT / page).parent / path if path else ROOT / page
            if not target.is_file():
                problems.append(f"{page}:{line}: {link} is no file")
            elif anchor and anchor not in anchors_of(str(target.resolve().relative_to(ROOT))):
                problems.append(f"{page}:{line}: {link} has no such heading")
        return problems

    assert problems(page) == []


@pytest.mark.parametrize("page", [page for page in page_names() if not page.startswith("docs/reference/")])
def test_no_page_names_a_place_of_one_machine(page: str) -> None:
    assert "/home/" not in text_of(page)
    assert "/root/" not in text_of(page)
