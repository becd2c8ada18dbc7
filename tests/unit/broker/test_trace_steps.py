"""Matching of the trainer's spans to the micro-batches of a group: worked cases, and no guesses."""

import pytest

from onbeat.contracts.records import Span
from services.broker.tracing.tree import find_steps, update_of
from services.trainer.loop import shares
from tests.trainer_fixtures import job_config


def spans(*kinds: str) -> list[Span]:
    """Return spans of one second each, one after the other, from 10 on."""
    return [
        Span(lane="trainer", kind=kind, start=start, end=start + 1, iteration=7) for start, kind in enumerate(kinds, 10)
    ]


def starts(told, recorded, num_updates=1, num_replicas=1):
    """Return the starts of each group's micro-batch and optimizer step; None where they are unknown."""
    steps = find_steps(told, recorded, num_updates, 4, num_replicas)
    return {
        group_id: tuple(span.start if span else None for span in (step.micro_batch, step.optimizer))
        for group_id, step in steps.items()
    }


def test_micro_batches_are_the_spans_in_the_order_of_recording():
    told = spans("checkpoint", "micro_batch", "micro_batch", "optimizer", "publish", "publish")
    recorded = [(0, ["7-2"]), (0, ["7-0", "7-1"])]
    assert starts(told, recorded) == {"7-2": (11, 13), "7-0": (12, 13), "7-1": (12, 13)}
    names = {"onbeat.update": 0, "onbeat.micro_batch": 1, "onbeat.trainer_rank": 0}
    assert find_steps(told, recorded, 1, 4, 1)["7-0"].attributes() == names


def test_each_update_has_its_own_micro_batches_and_step():
    told = spans("micro_batch", "optimizer", "micro_batch", "micro_batch", "optimizer")
    recorded = [(0, ["7-1", "7-0"]), (0, ["7-3"]), (0, ["7-2"])]
    expected = {"7-1": (10, 11), "7-0": (10, 11), "7-3": (12, 14), "7-2": (13, 14)}
    assert starts(told, recorded, num_updates=2) == expected


def test_rounding_moves_no_micro_batch_out_of_its_update():
    """A trainer rounds starts and durations: the second micro-batch seems to begin before the first step is over."""
    moments = [("micro_batch", 10, 11), ("optimizer", 11, 12.0001), ("micro_batch", 12, 13), ("optimizer", 13, 14)]
    told = [Span(lane="trainer", kind=kind, start=start, end=end, iteration=7) for kind, start, end in moments]
    expected = {"7-0": (10, 11), "7-2": (12, 13)}
    assert starts(told, [(0, ["7-0"]), (0, ["7-2"])], num_updates=2) == expected


def test_row_that_stands_for_an_update_without_signal_is_nobodys():
    told = spans("micro_batch", "micro_batch", "optimizer", "micro_batch", "optimizer")
    expected = {"7-0": (10, 12), "7-2": (13, 14)}
    assert starts(told, [(0, ["7-0"]), (0, ["7-2"])], num_updates=2) == expected


def test_micro_batch_of_another_replica_is_at_an_unknown_time():
    told, recorded = spans("micro_batch", "optimizer"), [(0, ["7-0"]), (1, ["7-2"])]
    assert starts(told, recorded, num_replicas=2) == {"7-0": (10, 11), "7-2": (None, 11)}
    assert find_steps(told, recorded, 1, 4, 2)["7-2"].attributes()["onbeat.is_timed"] is False


def test_micro_batch_of_a_replica_that_is_gone_is_the_first_ones():
    told = spans("micro_batch", "micro_batch", "optimizer")
    assert starts(told, [(0, ["7-0"]), (1, ["7-2"])]) == {"7-0": (10, 12), "7-2": (11, 12)}


@pytest.mark.parametrize("told", [spans("micro_batch", "optimizer"), spans(*["micro_batch"] * 4, "optimizer")])
def test_spans_that_do_not_fit_the_record_are_nobodys(told):
    recorded = [(0, ["7-0"]), (0, ["7-2"])]
    assert starts(told, recorded) == {"7-0": (None, told[-1].start), "7-2": (None, told[-1].start)}


@pytest.mark.parametrize("told", [[], spans("optimizer", "optimizer"), spans("micro_batch")])
def test_unexpected_number_of_optimizer_steps_gives_none(told):
    assert starts(told, [(0, ["7-0"])]) == {"7-0": (None, None)}


@pytest.mark.parametrize(("num_prompts", "num_updates"), [(5, 2), (8, 3), (7, 7), (4, 1)])
def test_groups_are_shared_out_as_the_trainer_does(num_prompts, num_updates):
    sections = {"num_prompts_per_iteration": num_prompts}, {"num_updates_per_iteration": num_updates}
    config = job_config(rollout=sections[0], training=sections[1])
    shared = shares(config, 7)
    for number, group_ids in enumerate(shared):
        assert {update_of(group_id, num_updates, num_prompts) for group_id in group_ids} == {number}
