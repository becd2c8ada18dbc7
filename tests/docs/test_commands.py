"""Every command of every page could work: its program, options, files, services, routes and variables are there."""

import os
import re
import subprocess
from unittest.mock import patch

import pytest

from tests.docs import exceptions
from tests.docs.checks import (
    PROGRAMS,
    Wrong,
    check,
    check_call,
    check_path,
    command_in_code,
    parse_onbeat,
    unknown_variables,
)
from tests.docs.pages import Block, all_blocks, blocks_of, code_in_sentences, page_names, text_of
from tests.docs.shell import Command, commands_of, is_shell, program_of

CALL = re.compile(r"(GET|POST|PUT|DELETE) (/\S*)")


def shell_blocks(page: str) -> list[Block]:
    return [block for block in blocks_of(page) if is_shell(block, PROGRAMS)]


def commands_of_page(page: str) -> list[Command]:
    return [command for block in shell_blocks(page) for command in commands_of(block)]


@pytest.mark.parametrize("page", page_names())
def test_every_command_could_work(page: str) -> None:
    def problem_of(command: Command) -> str | None:
        try:
            check(command)
        except Wrong as error:
            return f"{command}: {error}"
        return None

    assert list(filter(None, map(problem_of, commands_of_page(page)))) == []


@pytest.mark.parametrize("page", page_names())
def test_everything_named_inside_a_sentence_is_there(page: str) -> None:
    """Commands as far as they are whole, calls of the broker, and paths."""

    def expanded(text: str) -> list[str]:
        """Expand braces: `a.{b,c}` becomes `a.b`, `a.c`."""
        match = re.fullmatch(r"(.*)\{([^{}]*)\}(.*)", text)
        return [f"{match[1]}{part}{match[3]}" for part in match[2].split(",")] if match else [text]

    # Words that a sentence has for a part of a command, not for the whole of it.
    placeholder = re.compile(r"COMMAND|\[|…")
    problems = []
    for line, text in code_in_sentences(page):
        try:
            if (command := command_in_code(page, line, text)) and not placeholder.search(text):
                check(command)
            if call := CALL.match(text):
                check_call(call[1], call[2])
            for path in expanded(text):
                check_path(page, path)
        except Wrong as error:  # arguments that a sentence leaves out are not asked for
            if not re.search("MissingParameter|NoArgsIsHelp", str(error)):
                problems.append(f"{page}:{line}: {text}: {error}")
    assert problems == []


@pytest.mark.parametrize("page", page_names())
def test_every_block_of_shell_has_right_syntax(page: str) -> None:
    for block in shell_blocks(page):
        text = re.sub(r"^\$ ", "", block.text, flags=re.M)
        if text == block.text:
            done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, timeout=10, check=False)
            assert done.returncode == 0, f"{block}: {done.stderr}"


@pytest.mark.parametrize("page", page_names())
def test_every_variable_is_known(page: str) -> None:
    assert list(unknown_variables(page)) == []


@pytest.mark.parametrize("page", [page for page in page_names() if not page.startswith("docs/reference/")])
def test_no_command_hides_in_a_block_of_text(page: str) -> None:
    for block in blocks_of(page):
        if block.language == "text":
            assert [line for line in block.text.splitlines() if program_of(line) in ("onbeat", "make", "curl")] == []


def test_no_exception_is_there_in_vain() -> None:
    pages = page_names()
    commands = [command for page in pages for command in commands_of_page(page)]
    programs = {command.program for command in commands}
    assert set(exceptions.FOREIGN_PROGRAMS) <= programs
    assert set(exceptions.PARSED_ONLY) <= {path_of(command) for command in commands}
    for page, start in exceptions.MADE_PATHS:
        assert start in text_of(page), (page, start)
    assert set(exceptions.NOT_A_JOB) <= {(block.page, block.text.splitlines()[0]) for block in all_blocks("toml")}


def path_of(command: Command) -> str:
    """Return the path of a right command of ours, such as `onbeat jobs list`, or ''."""
    try:
        with patch.dict(os.environ, dict.fromkeys(command.sets, "set")):
            return parse_onbeat(command.words[1:])[0] if command.program == "onbeat" else ""
    except Wrong:
        return ""
