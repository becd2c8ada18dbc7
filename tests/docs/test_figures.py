"""A measured figure stands on one page: on two, one of them would stay as it is when it is measured again."""

import re
from collections import defaultdict
from collections.abc import Iterator

from tests.docs.exceptions import SAME_BY_CHANCE
from tests.docs.pages import page_names, text_of

FENCED = re.compile(r"```.*?```", re.DOTALL)
FIGURE = re.compile(
    r"(?<![\w.,-])(?P<number>\d[\d,]*(?:\.\d+)?) ?"
    r"(?P<unit>%|(?:ms|s|min|kB|MB|GB|MiB|GiB|times|tokens/s|tokens per second|faults|GFLOP/s)\b(?!/))"
)
LIMITS = ("docs/operating.md", "docs/reference/")  # deadlines, and the defaults and limits of settings and jobs


def figures_of(page: str) -> Iterator[str]:
    """Yield figures with a unit outside of code, such as `1.16 times`. Those of one digit are often alike by chance."""
    for line in FENCED.sub("", text_of(page)).splitlines():
        if page == "README.md" and line.startswith("|"):
            continue  # test_readme.py compares its table with the results
        for figure in FIGURE.finditer(line):
            number = figure["number"].replace(",", "")
            if len(number.replace(".", "").strip("0")) > 1:
                yield f"{number} {figure['unit']}"


def test_a_measured_figure_stands_on_one_page() -> None:
    """Elsewhere there is a link, or a sentence without the figure."""
    of_their_day = "docs/decisions/"  # records that do not change

    def figures_on_several_pages() -> dict[str, set[str]]:
        limits = {figure for page in page_names() if page.startswith(LIMITS) for figure in figures_of(page)}
        pages_of: dict[str, set[str]] = defaultdict(set)
        for page in page_names():
            if not page.startswith((of_their_day, *LIMITS)):
                for figure in figures_of(page):
                    pages_of[figure].add(page)
        return {figure: pages for figure, pages in pages_of.items() if len(pages) > 1 and figure not in limits}

    twice = figures_on_several_pages()
    assert {figure: pages for figure, pages in twice.items() if figure not in SAME_BY_CHANCE} == {}
    assert sorted(SAME_BY_CHANCE.keys() - twice.keys()) == [], "no longer on several pages"


def test_a_figure_is_a_number_with_a_unit_outside_of_code() -> None:
    text = "79 s, 1,024 MB and 12%; not 5 s, 10 GB, 20% or `x-12 s`"
    figures = [figure[0] for figure in FIGURE.finditer(FENCED.sub("", f"```\n99 s\n```\n{text}"))]
    assert figures == ["79 s", "1,024 MB", "12%", "5 s", "10 GB", "20%"]
