"""The site builds without a warning, shows what the plain pages show, and loads nothing from another host."""

import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.docs.pages import ROOT, page_names, tokens_of

LOADING = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "object": "data",
}
LOADED_LINKS = {"stylesheet", "icon", "preload", "modulepreload", "preconnect", "dns-prefetch", "manifest", "prefetch"}
PAGES = [page for page in page_names() if page.startswith("docs/")]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


class Page(HTMLParser):
    """What a page loads, and how often each tag is in its article."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tags: Counter[str] = Counter()
        self._is_article = False
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag in LOADING and LOADING[tag] in values:
            self.loads.append(values[LOADING[tag]])
        if tag == "link" and LOADED_LINKS & set(values.get("rel", "").split()):
            self.loads.append(values["href"])
        self.loads += re.findall(r"url\(['\"]?([^)'\"]+)", values.get("style", ""))
        self._is_article |= tag == "article"
        self.tags[tag] += self._is_article

    def handle_endtag(self, tag: str) -> None:
        self._is_article &= tag != "article"


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > len(PAGES)
    for page in pages:
        for url in Page(page).loads:
            parts = urlsplit(url)
            assert parts.scheme in ("", "data"), f"{page.name} loads {url}"
            assert not parts.netloc, f"{page.name} loads {url}"
            if not parts.scheme:
                assert (page.parent / parts.path).resolve().is_file() or page.name == "404.html", f"{page.name}: {url}"


def test_no_style_sheet_loads_anything_from_another_host(site: Path) -> None:
    for sheet in site.rglob("*.css"):
        urls = re.findall(r"(?:url\(|@import )['\"]?([^)'\";]+)", sheet.read_text())
        assert [url for url in urls if urlsplit(url).netloc] == [], sheet.name


def test_search_is_local(site: Path) -> None:
    index = (site / "search" / "search_index.json").read_text()
    assert "periodic asynchrony" in index.lower() or "policy version" in index.lower()


@pytest.mark.parametrize("page", PAGES)
def test_site_and_plain_page_have_equal_lists_tables_and_blocks(site: Path, page: str) -> None:
    """Two renderers: one of them wants a blank line before a list, and four blanks within one."""
    plain: Counter[str] = Counter()
    for token in tokens_of(page):
        plain[
            {"list_item_open": "li", "table_open": "table", "fence": "pre", "code_block": "pre"}.get(token.type, "")
        ] += 1
    built = Page(site / Path(page).relative_to("docs").with_suffix(".html"))
    found = {tag: built.tags[tag] for tag in ("li", "table", "pre")}
    assert found == {tag: plain[tag] for tag in found}
