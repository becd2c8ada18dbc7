"""Documented `onbeat` commands, run against a live stack. What is too dear to run is in exceptions.PARSED_ONLY."""

import re
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from onbeat.cli import main
from onbeat.contracts.states import JobState
from tests.docs.checks import parse_onbeat, shown_files
from tests.docs.conftest import Workplace
from tests.docs.exceptions import PARSED_ONLY, STORIES
from tests.docs.pages import page_names
from tests.docs.shell import Command
from tests.docs.test_commands import commands_of_page, path_of

pytestmark = pytest.mark.slow

JOB = re.compile(r"\$?\{?JOB\}?|job-[0-9a-f]{12}")


def live_commands() -> list[Command]:
    """Each once; where it is the same on several pages, of the first."""
    commands = {}
    for page in [name for name in page_names() if name not in STORIES]:
        for command in commands_of_page(page):
            if command.program == "onbeat" and (path := path_of(command)) and path not in PARSED_ONLY:
                words = [
                    re.sub(r"num_iterations=\d+", "num_iterations=N", JOB.sub("JOB", word)) for word in command.words
                ]
                commands.setdefault(" ".join(words), command)
    return list(commands.values())


@pytest.mark.parametrize("command", live_commands(), ids=lambda command: " ".join(command.words[1:]))
def test_command_does_what_it_says(workplace, in_page_folder, capsys, command):
    may_find_problems = {"onbeat doctor"}  # this machine is busy with other things: exit code 1
    # A job in this state is what the command wants; elsewhere the finished one does.
    wants = {
        "onbeat jobs pause": JobState.RUNNING,
        "onbeat jobs cancel": JobState.RUNNING,
        "onbeat jobs resume": JobState.PAUSED,
        "onbeat jobs delete": JobState.SUCCEEDED,
    }
    path = parse_onbeat(command.words[1:])[0]
    folder = in_page_folder(command.page)
    write_shown_files(workplace, command.page, folder)
    wanted = JobState.SUCCEEDED if "--iterations" in command.words else wants.get(path)
    job_id = workplace.job_in(wanted) if wanted else workplace.finished
    before = {job.id for job in workplace.stack.client.jobs.list()}
    try:
        code = run([JOB.sub(job_id, workplace.shortened(word)) for word in command.words])
    finally:
        for job in workplace.stack.client.jobs.list():
            if job.id not in before or job.id == job_id:
                workplace.end(job.id)
    output = capsys.readouterr()
    assert code == 0 or (path in may_find_problems and code == 1), output.out + output.err


def write_shown_files(workplace: Workplace, page: str, folder: Path) -> None:
    """Write the files that the page shows, and run its Python, which makes the others."""
    for name, text in shown_files(page).items():
        (folder / name).write_text(workplace.shortened(text))
        if name.startswith("make_"):
            exec(compile(workplace.shortened(text), name, "exec"), {})


def run(words: list[str]) -> int:
    """Run a command in this process and return its exit code."""
    words = [word for word in words if word not in ("--ca-file", "ca.pem")]  # the stack speaks plain HTTP
    words = ["transformers" if word == "plain" else word for word in words]  # test_own_engine_trains_a_job installs it
    with patch.object(sys, "argv", words), pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)
