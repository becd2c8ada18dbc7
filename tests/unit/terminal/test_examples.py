"""Example responses in a terminal: whole, in every script and at every width."""

import io

import pytest
from rich.console import Console

from onbeat.terminal.summary import print_examples
from onbeat.types import EpisodeTurn, Sample

CHINESE = "小明有三个苹果、妈妈又给了他五个苹果、他吃掉了两个、请问现在他一共还有多少个苹果。答案是六个苹果🍎🍏。"
VALUES = {"iteration": 0, "group_id": "0-0", "policy_version": 0, "num_tokens": 1, "finish_reason": "stop"}
GERMAN = "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft ist ein Wort."


@pytest.mark.parametrize("width", [30, 60, 81, 100, 200])
@pytest.mark.parametrize("text", [CHINESE, GERMAN])
def test_a_long_text_is_never_cut(text: str, width: int) -> None:
    lines = printed(Sample(prompt="", response=text, reward=1.0, **VALUES), width)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def printed(sample: Sample, width: int) -> list[str]:
    """Return the lines of the column `response`."""
    out = io.StringIO()
    print_examples(Console(file=out, width=width), "iteration 0", [sample])
    return [line.split("│")[2].strip() for line in out.getvalue().splitlines() if "│" in line]


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
