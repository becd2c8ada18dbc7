"""Example responses in a terminal: whole, in every script and at every width."""

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from onbeat.contracts.records import AuditReport, EpisodeTurn, Sample
from onbeat.terminal.summary import audit_text, print_examples
from tests.unit.terminal.conftest import FakeTerminal

VALUES = {"iteration": 0, "group_id": "0-0", "policy_version": 0, "num_tokens": 1, "finish_reason": "stop"}
GERMAN = "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft ist ein Wort."


@pytest.mark.parametrize("width", [30, 60, 81, 100, 200])
@pytest.mark.parametrize(
    "text",
    ["小明有三个苹果、妈妈又给了他五个苹果、他吃掉了两个、请问现在他一共还有多少个苹果。答案是六个苹果🍎🍏。", GERMAN],
)
def test_a_long_text_is_never_cut(text: str, width: int) -> None:
    lines = printed(Sample(prompt="", response=text, reward=1.0, **VALUES), width)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def printed(sample: Sample, width: int) -> list[str]:
    """Return the lines of the column `response`."""
    out = FakeTerminal()
    console = Console(file=out, width=width, force_interactive=True, color_system=None)
    print_examples(console, "iteration 0", [sample])
    return [line.split("│")[2].strip() for line in out.getvalue().splitlines() if "│" in line]


def test_a_pipe_gets_one_line_for_each_sample() -> None:
    out = io.StringIO()
    sample = Sample(prompt="2 + 2 =\nThink.", response=f"{GERMAN} [bold]4\n", reward=0.5, **VALUES)
    print_examples(Console(file=out, width=30), "iteration 0", [sample, sample])
    line = rf"reward 0.5  2 + 2 =\nThink. -> {GERMAN} [bold]4"
    assert out.getvalue().splitlines() == ["", "iteration 0", line, line]


def test_each_message_of_an_episode_is_cut_by_itself() -> None:
    answer = {"num_observed_tokens": 5, "num_tokens": 3, "finish_reason": "stop"}
    question = {"role": "user", "content": "please " * 200}
    turns = [
        EpisodeTurn(text='price("lamp")', messages=[question], reward=0.5, **answer),
        EpisodeTurn(text="12", messages=[{"role": "tool", "content": "7"}], continues=0, is_fork=True, **answer),
    ]
    first, *others = printed(Sample(prompt="", response="", reward=1.0, turns=turns, **VALUES), width=2000)
    assert first.endswith(" ...")
    assert others == ['policy (reward 0.5): price("lamp")', "-- the history was rewritten --", "tool: 7", "policy: 12"]


def test_prompts_are_shown_whole_as_the_model_saw_them() -> None:
    out = io.StringIO()
    seen = Sample(prompt="Hi", decoded_prompt=f"<|user|>\n{'Hi' * 300}\x1b", response="Ho", reward=0.5, **VALUES)
    older = Sample(prompt="Hi", response="Ho", reward=0.5, **VALUES)
    print_examples(Console(file=out, width=30), "iteration 0", [seen, older], is_decoded=True)
    first, second = out.getvalue().splitlines()[2:]
    assert first.startswith(rf"reward 0.5  <|user|>\n{'Hi' * 300}")
    assert "\x1b" not in first
    assert second == "reward 0.5  (not recorded; the row has: Hi) -> Ho"


async def test_summary_does_not_call_a_job_without_training_clean() -> None:
    report = AuditReport(
        is_clean=False, num_entries=4, num_groups=2, num_failed_groups=2, num_commits=0, num_contents=2,
        num_contents_gone=0, head="",
    )  # fmt: skip

    async def audit(_: str) -> AuditReport:
        return report

    client: Any = SimpleNamespace(jobs=SimpleNamespace(audit=audit))
    text = await audit_text(client, "job-1")
    assert text == "nothing was trained: 2 groups accepted; 2 failed groups, not trained; the log breaks no rule"
    report.is_clean, report.num_trained_groups, report.num_groups = True, 3, 5
    text = await audit_text(client, "job-1")
    assert text == (
        "clean: 3 groups, each used once, on one policy version per iteration; 2 failed groups, not trained"
    )
