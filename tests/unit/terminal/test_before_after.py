"""The same prompts before and after training, from recorded answers."""

import io
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from rich.console import Console

from onbeat.contracts.records import JobRecord, Sample
from onbeat.contracts.states import EvaluationState, IterationState
from onbeat.terminal.before_after import (
    BeforeAfter,
    pair_held_out,
    pair_training,
    print_before_after,
    read_before_after,
)
from tests.broker_thread import BrokerThread
from tests.unit.terminal.conftest import Command, FakeTerminal
from tests.world import job_body


def job(**sections: Any) -> JobRecord:
    fields = {"id": "j", "name": "n", "pool": "default", "state": "SUCCEEDED", "created_at": 0.0, "num_iterations": 4}
    return JobRecord.model_validate(fields | {"config": job_body(**sections)})


def sample(place: str, reward: float | None, text: str = "an answer", prompt: str = "") -> Sample:
    fields = {"policy_version": 0, "num_tokens": 3, "finish_reason": "stop"}
    group_id, _, index = place.partition("/")
    prompt = prompt or f"prompt {group_id.rpartition('-')[2]}"
    more = {"iteration": 0, "group_id": group_id, "index": int(index or 0), "prompt": prompt, "response": text}
    return Sample.model_validate(fields | more | {"reward": reward})


def held_out(before: list[float], after: list[float]) -> BeforeAfter:
    sides = [
        [sample(f"eval-{number}-{place}", reward) for place, reward in enumerate(rewards)]
        for number, rewards in ((0, before), (4, after))
    ]
    return BeforeAfter(0, 4, is_held_out=True, pairs=pair_held_out(job(), *sides))


def test_answers_to_the_same_prompt_are_a_pair() -> None:
    before = [sample("eval-0-0", 0), sample("eval-0-0/1", 1), sample("eval-0-2", 0)]
    after = [sample("eval-4-2", 1, "later"), sample("eval-4-1", 0), sample("eval-4-0/1", 0)]
    pairs = pair_held_out(job(), before, after)
    assert [(pair.prompt, pair.change) for pair in pairs] == [
        ("prompt 0", (True, False)),
        ("prompt 2", (False, True)),  # the others failed, or were not recorded, on one side
    ]
    assert pairs[1].after is not None
    assert pairs[1].after.sample.response == "later"


def test_answers_without_a_reward_are_in_no_pair() -> None:
    before = [sample("eval-0-0", None), sample("eval-0-1", 1), sample("eval-0-2", 0)]
    after = [sample("eval-4-0", 1), sample("eval-4-1", None), sample("eval-4-2", 1)]
    assert [pair.prompt for pair in pair_held_out(job(), before, after)] == ["prompt 2"]
    assert [pair.prompt for pair in pair_training(job(), before, after)] == ["prompt 2"]


def test_each_held_out_set_has_its_measure_of_right() -> None:
    data = job_body()["data"]
    sets = [{"name": "easy", "data": data, "num_prompts": 2}, {"name": "hard", "data": data, "num_prompts": 2}]
    sets[1]["solved_at"] = 0.5
    answers = [sample(f"eval-0-{place}", 0.75) for place in range(4)]
    pairs = pair_held_out(job(evaluation={"sets": sets}), answers, answers)
    assert [pair.change[0] for pair in pairs] == [False, False, True, True]


def test_every_kind_of_change_comes_first_once() -> None:
    pairs = held_out([0, 0, 0, 1, 1], [1, 1, 0, 0, 1]).telling(4)
    assert [pair.prompt for pair in pairs] == ["prompt 0", "prompt 2", "prompt 3", "prompt 4"]
    sentence = held_out([0, 0, 0, 1, 1], [1, 1, 0, 0, 1]).sentence()
    assert (
        sentence == "The same held-out prompts before and after 4 iterations: 2 of 5 answers are right before, 3 after."
    )


def test_held_out_prompts_that_were_answered_once_are_shown() -> None:
    once = held_out([0, 1], [])
    assert [pair.after for pair in once.pairs] == [None, None]
    assert once.sentence() == "Held-out prompts, answered once so far: 1 of 2 answers is right."


def test_training_pairs_prompts_that_came_again() -> None:
    before = [sample("0-0", 0, prompt="a"), sample("0-0/1", 1, prompt="a"), sample("0-1", 1, prompt="b")]
    again = pair_training(job(), before, [sample("3-1", 1, prompt="a")])
    assert [(pair.prompt, pair.change) for pair in again] == [("a", (False, True))]
    others = pair_training(job(), before, [sample("3-1", 0, prompt="c")])
    assert {pair.change for pair in others} == {(True, None), (False, None), (None, False)}
    assert "The prompts differ" in BeforeAfter(0, 3, False, others).sentence()


async def test_job_without_answers_has_none() -> None:
    client = Mock()
    client.jobs.evaluations = AsyncMock(return_value=[Mock(state=EvaluationState.FAILED)])
    client.jobs.iterations = AsyncMock(return_value=[Mock(state=IterationState.COMMITTED, iteration=0)])
    assert await read_before_after(client, job()) is None


@pytest.mark.parametrize("file", [io.StringIO(), FakeTerminal()])
def test_answers_are_printed_side_by_side(file: io.StringIO) -> None:
    console = Console(file=file, width=80, force_interactive=file.isatty(), color_system=None)
    print_before_after(console, held_out([0, 0], [1, 0]), 1)
    text = file.getvalue()
    assert text.index("wrong, reward 0") < text.index("right, reward 1")
    assert "prompt 1" not in text
    assert file.isatty() or "after: ✓ right, reward 1: an answer" in text.splitlines()


def test_command_shows_recorded_answers(onbeat: Command, broker: BrokerThread, trainer: None) -> None:
    evaluation = {"data": job_body()["data"], "num_prompts": 2, "every_iterations": 2}
    job_id = broker.create_job(evaluation=evaluation)
    onbeat("jobs", "watch", job_id)
    said = onbeat("jobs", "samples", job_id, "--before-after").out
    assert said.startswith("The same held-out prompts before and after 3 iterations: 0 of 4 answers are right before")
    assert "\x1b" not in said
    assert "leave out the other options" in onbeat("jobs", "samples", job_id, "--before-after", "--decoded", code=2).err
