"""Which span of the trainer is a group's micro-batch: worked cases, and none that is guessed."""

import pytest

from onbeat.types import MAX_TRAINER_SPANS, Span
from services.broker.tracing.steps import find_steps, update_of
from services.trainer.loop import shares
from tests.trainer_fixtures import job_config

COMMITTED_AT = 100.0


def spans(*kinds: str, start: float = 10.0) -> list[Span]:
    """One second each, one after the other."""
    return [
        Span(lane="trainer", kind=kind, start=start + index, end=start + index + 1, iteration=7)
        for index, kind in enumerate(kinds)
    ]


def found(told, recorded, num_updates=1, num_groups=4, num_replicas=1):
    return find_steps(told, recorded, num_updates, num_groups, num_replicas, COMMITTED_AT)


def test_micro_batches_are_the_spans_in_the_order_of_recording():
    told = spans("checkpoint", "micro_batch", "micro_batch", "optimizer", "publish", "publish")
    steps = found(told, [(0, ["7-2"]), (0, ["7-0", "7-1", "7-3"])])
    assert {id_: steps.of(id_, 9.0).start for id_ in ("7-0", "7-1", "7-2", "7-3")} == {
        **{"7-2": 11.0},
        **dict.fromkeys(("7-0", "7-1", "7-3"), 12.0),
    }
    step = steps.of("7-0", 9.0)
    assert (step.end, step.used_at, step.update, step.index, step.rank, step.is_timed) == (13.0, 14.0, 0, 1, 0, True)


def test_each_update_has_its_own_micro_batches_and_step():
    told = spans("micro_batch", "optimizer", "micro_batch", "micro_batch", "optimizer")
    recorded = [(0, ["7-1", "7-0"]), (0, ["7-3"]), (0, ["7-2"])]
    steps = found(told, recorded, num_updates=2)
    times = {id_: (steps.of(id_, 9.0).start, steps.of(id_, 9.0).used_at) for _, ids in recorded for id_ in ids}
    assert times == {"7-0": (10.0, 12.0), "7-1": (10.0, 12.0), "7-3": (12.0, 15.0), "7-2": (13.0, 15.0)}


def test_row_that_stands_for_an_update_without_signal_is_nobodys():
    told = spans("micro_batch", "micro_batch", "optimizer", "micro_batch", "optimizer")
    steps = found(told, [(0, ["7-0", "7-1"]), (0, ["7-2", "7-3"])], num_updates=2)
    assert (steps.of("7-0", 9.0).start, steps.of("7-2", 9.0).start) == (10.0, 13.0)


def test_group_of_another_replica_has_bounds_only():
    told = spans("micro_batch", "optimizer")
    steps = found(told, [(0, ["7-0", "7-1"]), (1, ["7-2", "7-3"])], num_replicas=2)
    assert steps.of("7-1", 9.0).is_timed
    step = steps.of("7-2", 9.0)
    assert (step.start, step.end, step.used_at, step.rank, step.is_timed) == (9.0, 11.0, 12.0, 1, False)


def test_micro_batch_of_a_replica_that_is_gone_is_the_first_ones():
    told = spans("micro_batch", "micro_batch", "optimizer")
    steps = found(told, [(0, ["7-0", "7-1"]), (1, ["7-2", "7-3"])], num_replicas=1)
    assert (steps.of("7-0", 9.0).start, steps.of("7-2", 9.0).start) == (10.0, 11.0)


@pytest.mark.parametrize("told", [spans("micro_batch", "optimizer"), spans(*["micro_batch"] * 4, "optimizer")])
def test_spans_that_do_not_fit_the_record_give_bounds_only(told):
    steps = found(told, [(0, ["7-0", "7-1"]), (0, ["7-2", "7-3"])])
    assert not steps.of("7-0", 9.0).is_timed
    assert steps.of("7-0", 9.0).used_at == told[-1].end


def test_merged_spans_give_bounds_only():
    recorded = [(0, [f"7-{index}"]) for index in range(MAX_TRAINER_SPANS - 1)]
    told = spans(*["micro_batch"] * (MAX_TRAINER_SPANS - 1), "optimizer")
    assert not found(told, recorded, num_groups=MAX_TRAINER_SPANS - 1).of("7-0", 9.0).is_timed


@pytest.mark.parametrize("told", [[], spans("optimizer", "optimizer"), spans("micro_batch")])
def test_trainer_that_tells_nothing_of_its_step_gives_the_commit(told):
    step = found(told, [(0, ["7-0"])]).of("7-0", 9.0)
    assert (step.start, step.end, step.used_at, step.is_timed) == (9.0, COMMITTED_AT, COMMITTED_AT, False)


@pytest.mark.parametrize(("num_prompts", "num_updates"), [(5, 2), (8, 3), (7, 7), (4, 1)])
def test_groups_are_shared_out_as_the_trainer_does(num_prompts, num_updates):
    sections = {"num_prompts_per_iteration": num_prompts}, {"num_updates_per_iteration": num_updates}
    config = job_config(rollout=sections[0], training=sections[1])
    shared = shares(config, 7)
    for number, group_ids in enumerate(shared):
        assert {update_of(group_id, num_updates, num_prompts) for group_id in group_ids} == {number}
