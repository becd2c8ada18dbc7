"""The site builds without a warning, shows what the plain pages show, and loads nothing from another host."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, page_names, tokens_of

pytestmark = pytest.mark.slow

# A browser loads these by itself, in a page or in a style sheet; links are followed by people.
LOADED = re.compile(r"""<(?!a\b)\w+\b[^>]*\b(?:src|href|data)=["']?([^"' >]+)|(?:url\(|@import )["']?([^"');]+)""")
UNLOADED = re.compile(r"""<link[^>]* rel=["']?(?:canonical|next|prev)\b[^>]*>""")


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_site_loads_nothing_from_another_host_and_has_a_search(site: Path) -> None:
    files = [*site.rglob("*.html"), *site.rglob("*.css")]
    loaded: set[tuple[str, str]] = set()
    for path in files:
        references = LOADED.findall(UNLOADED.sub("", path.read_text()))
        loaded |= {(path.name, in_tag or in_style) for in_tag, in_style in references}
    assert len(loaded) > 5
    assert {reference for reference in loaded if re.match(r"(https?:)?//", reference[1])} == set()
    assert "policy version" in (site / "search" / "search_index.json").read_text().lower()


@pytest.mark.parametrize("page", [page for page in page_names() if page.startswith("docs/")])
def test_site_and_plain_page_have_equal_lists_tables_and_blocks(site: Path, page: str) -> None:
    """Two renderers: one of them wants a blank line before a list, and four blanks within one."""
    tags = {"list_item_open": "li", "table_open": "table", "fence": "pre", "code_block": "pre"}
    plain = Counter(tags[token.type] for token in tokens_of(page) if token.type in tags)
    built = (site / Path(page).relative_to("docs").with_suffix(".html")).read_text()
    article = built.partition("<article")[2].partition("</article>")[0]
    assert Counter(re.findall(r"<(li|table|pre)\b", article)) == plain


def test_navigation_fits_one_screen() -> None:
    entries = re.findall(r"^ +- .*\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert 20 < len(entries) <= 30
