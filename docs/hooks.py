"""For MkDocs: links of a page to files of the repository outside docs/ lead to copies of them in the site."""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()(?![a-z]+:)([^)\s#]+)(?=[)#])")


def outside_of(page: str, target: str) -> str | None:
    """Return the path in the repository of a page's link target (`reference/job.md`), or None for a file of docs/."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    return None if path.startswith("docs/") else path


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that pages link to. One that is not there is left to the strict build, which refuses the link."""
    paths = set()
    for page in files.documentation_pages():
        for target in LINK.findall(page.content_string):
            path = outside_of(page.src_uri, target)
            if path is not None and (ROOT / path).is_file():
                paths.add(path)
    for path in sorted(paths):
        files.append(File.generated(config, f"repository/{path}.txt", content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    def site_link(match: re.Match[str]) -> str:
        path = outside_of(page.file.src_uri, match[1])
        if path is None or not (ROOT / path).is_file():
            return match[1]
        return posixpath.relpath(f"repository/{path}.txt", posixpath.dirname(page.file.src_uri) or ".")

    return LINK.sub(site_link, markdown)
