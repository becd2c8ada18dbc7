"""The pages of the documentation, and what is in them: blocks of code, code inside sentences, links, headings."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]
TITLE = re.compile(r"# ([\w./-]+\.(?:py|toml|json))\b")


@dataclass(frozen=True)
class Block:
    page: str  # `docs/jobs.md`
    line: int  # number of the first line, from 1
    language: str  # '' where none is given
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def title(self) -> str | None:
        """The file that the block is, where its first line is a comment that says so: `# brevity.py`."""
        match = TITLE.match(self.text)
        return match[1] if match else None


def page_names() -> list[str]:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [str(page.relative_to(ROOT)) for page in pages]


@cache
def text_of(page: str) -> str:
    return (ROOT / page).read_text()


@cache
def tokens_of(page: str) -> tuple[Token, ...]:
    return tuple(MarkdownIt("commonmark").enable("table").parse(text_of(page)))


def blocks_of(page: str) -> list[Block]:
    """Return the blocks in order, indented ones included."""
    return [
        Block(page, (token.map or [0])[0] + (2 if token.type == "fence" else 1), token.info.strip(), token.content)
        for token in tokens_of(page)
        if token.type in ("fence", "code_block")
    ]


def all_blocks(*languages: str) -> list[Block]:
    return [block for page in page_names() for block in blocks_of(page) if block.language in languages]


def inline_tokens(page: str) -> Iterator[tuple[int, Token]]:
    """Each with the line that its paragraph begins on."""
    for token in tokens_of(page):
        for child in token.children or ():
            yield (token.map or [0])[0] + 1, child


def code_in_sentences(page: str) -> Iterator[tuple[int, str]]:
    """Also in the sentences of a drawing."""
    for line, token in inline_tokens(page):
        if token.type == "code_inline":
            yield line, token.content
    for block in blocks_of(page):
        if block.language in ("", "text"):
            yield from ((block.line, code) for code in re.findall("`([^`\n]+)`", block.text))


def links_of(page: str) -> Iterator[tuple[int, str]]:
    for line, token in inline_tokens(page):
        if token.type in ("link_open", "image"):
            yield line, str(token.attrGet("href") or token.attrGet("src"))


def anchors_of(page: str) -> set[str]:
    """Return the anchors of the headings, as code hosts make them."""
    anchors: set[str] = set()
    for token, inner in zip(tokens_of(page), tokens_of(page)[1:], strict=False):
        if token.type == "heading_open":
            text = "".join(child.content for child in inner.children or () if child.type in ("text", "code_inline"))
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            number = 1
            while slug in anchors:
                slug, number = f"{slug}-{number}", number + 1
            anchors.add(slug)
    return anchors
