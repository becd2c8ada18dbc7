"""Commands out of blocks of shell: each simple command as a list of words, with what it sets before it."""

import re
import shlex
from dataclasses import dataclass

from tests.docs.pages import Block

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=.*", re.DOTALL)
COMMENT = re.compile(r"(^|[ \t])#.*", re.MULTILINE)
SHELL = ("sh", "bash", "console")
PROGRAM = re.compile(r"(\$ )?(export |[A-Z_]+=\S* *)*(\.venv/bin/)?([\w./-]+)( |$)")


@dataclass(frozen=True)
class Command:
    page: str
    line: int  # line of the block
    words: tuple[str, ...]  # program first, without `.venv/bin/`
    sets: tuple[str, ...] = ()  # names of variables that are set for it, or by it

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {' '.join(self.words)}"

    @property
    def program(self) -> str:
        return self.words[0]


def is_shell(block: Block, programs: set[str]) -> bool:
    """Return whether a block is a shell's: if it has no language, a line begins with a program that pages use."""
    if block.language:
        return block.language in SHELL
    return any(program_of(line) in programs for line in block.text.splitlines())


def program_of(line: str) -> str:
    match = PROGRAM.match(line)
    return match[4] if match else ""


def commands_of(block: Block) -> list[Command]:
    """Return the commands, including those inside `$(...)`. Exported variables stay set for the commands that follow.

    A dialogue (`$ ...`) gives only its typed lines.
    """
    typed = [line.removeprefix("$ ") for line in block.text.splitlines(keepends=True) if line.startswith("$ ")]
    text = COMMENT.sub("", "".join(typed) or block.text).replace("\\\n", " ")
    lexer = shlex.shlex(text, posix=True, punctuation_chars="\n;|&()<>")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    commands: list[Command] = []
    words: list[str] = []
    exported: tuple[str, ...] = ()
    is_target = False  # the word is the target of a redirection
    for word in [*lexer, "\n"]:
        if set(word) <= set("<>&") and set(word) != {"&"}:
            is_target = True
        elif not set(word) <= set("\n;|&()"):
            words += [] if is_target else [word]
            is_target = False
        elif words:
            command = to_command(block, words, exported)
            commands.append(command)
            exported = command.sets if command.program == "export" else exported
            words, is_target = [], False
    return commands


def to_command(block: Block, words: list[str], exported: tuple[str, ...]) -> Command:
    """Build a command. An assignment alone is an export, too: the variable stays set."""
    words = words[words[0] == "export" :]
    sets = exported
    while words and (assignment := ASSIGNMENT.fullmatch(words[0])):
        sets += (assignment[1],)
        words = words[1:]
    program = words[0].removeprefix(".venv/bin/") if words else "export"
    return Command(block.page, block.line, (program, *words[1:]), sets)
