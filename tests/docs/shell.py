"""Commands out of blocks of shell: each simple command as a list of words, with what it sets before it."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.docs.pages import Block

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
SEPARATORS = re.compile(r"[();|&]+")
REDIRECTIONS = re.compile(r"[<>]+&?")
SUBSTITUTION = re.compile(r"\$\(([^()]*)\)")
SHELL = ("sh", "bash", "console")
PROGRAM = re.compile(r"(\$ )?(export |[A-Z_]+=\S* *)*(\.venv/bin/)?([\w./-]+)( |$)")


@dataclass(frozen=True)
class Command:
    page: str
    line: int
    words: tuple[str, ...]  # program first, without `.venv/bin/`
    sets: tuple[str, ...] = ()  # names of variables that are set for it, or by it

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {' '.join(self.words)}"

    @property
    def program(self) -> str:
        return self.words[0]


def is_shell(block: Block, programs: set[str]) -> bool:
    """A block without a language is one when a line of it begins with a program that pages use."""
    if block.language:
        return block.language in SHELL
    return any(program_of(line) in programs for line in block.text.splitlines())


def program_of(line: str) -> str:
    found = PROGRAM.match(line)
    return found[4] if found else ""


def commands_of(block: Block) -> list[Command]:
    """What is exported stays set for the commands that follow."""
    found: list[Command] = []
    exported: tuple[str, ...] = ()
    for line, text in statements(block):
        for command in commands_in(text, block.page, line):
            found.append(replace(command, sets=exported + command.sets))
            exported += command.sets if command.program == "export" else ()
    return found


def statements(block: Block) -> Iterator[tuple[int, str]]:
    """Lines, joined where a quote or a pipe is open. Of a dialogue (`$ ...`) the typed lines only."""
    lines = block.text.splitlines()
    is_dialogue = any(line.startswith("$ ") for line in lines)
    text, first = "", block.line
    for number, line in enumerate(lines, start=block.line):
        if is_dialogue and not line.startswith("$ "):
            continue
        if not text:
            first = number
        text += line.removeprefix("$ ") if is_dialogue else line
        if text.endswith("\\"):
            text = text[:-1] + " "
        elif is_open(text):
            text += "\n"
        else:
            yield first, text
            text = ""
    assert not text.strip(), f"{block}: a quote or a pipe stays open: {text}"


def is_open(text: str) -> bool:
    try:
        words = split(text)
    except ValueError:  # no closing quotation
        return True
    return bool(words) and words[-1] in ("|", "&&", "||")


def split(text: str) -> list[str]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    return list(lexer)


def commands_in(text: str, page: str, line: int) -> list[Command]:
    """Of a statement, those inside `$(...)` included."""
    found: list[Command] = []
    for inner in SUBSTITUTION.findall(text):
        found += commands_in(inner, page, line)
    words: list[str] = []
    for word in [*split(SUBSTITUTION.sub("SUBSTITUTED", text)), ";"]:
        if not SEPARATORS.fullmatch(word):
            words.append(word)
        elif words:
            command = to_command(without_redirections(words), page, line)
            found += [command] if command else []
            words = []
    return found


def without_redirections(words: list[str]) -> list[str]:
    kept: list[str] = []
    is_target = False
    for word in words:
        if REDIRECTIONS.fullmatch(word):
            is_target = True
        elif not is_target:
            kept.append(word)
        else:
            is_target = False
    return kept


def to_command(words: list[str], page: str, line: int) -> Command | None:
    """None for an assignment alone."""
    sets = []
    is_export = words[:1] == ["export"]
    words = words[is_export:]
    while words and (assignment := ASSIGNMENT.fullmatch(words[0])):
        sets.append(assignment[1])
        words = words[1:]
    if not words and not sets:
        return None
    program = words[0].removeprefix(".venv/bin/") if words else "export"  # or an assignment alone
    return Command(page, line, (program, *words[1:]), tuple(sets))
