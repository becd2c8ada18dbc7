"""Iteration records with worked numbers, validation errors in a job's words, and log lines."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from onbeat.config import JobConfig
from onbeat.config.explain import FOREIGN_KEYS, explain_errors, named_by
from onbeat.process.logging import configure
from onbeat.streams.codec import Response, RolloutGroup, Turn
from onbeat.streams.inspection import IterationHashes
from onbeat.streams.records import (
    evaluation_record,
    evaluation_series,
    following_evaluation,
    iteration_record,
    metric_series,
)
from services.broker.evaluations import due_evaluation, score
from services.broker.samples import group_samples, turns_of
from services.broker.views.groups import group_detail
from tests.world import job_body

COMMITTED = {
    "iteration": "3",
    "state": "COMMITTED",
    "policy_version": "3",
    "num_groups": "8",
    "num_accepted": "8",
    "num_stale": "2",
    "opened_at": "100.5",
    "drained_at": "106.0",
    "committed_at": "110.0",
    "metrics": json.dumps(
        {"num_responses": 64, "prompt_tokens": 600, "response_tokens": 1400, "reward_mean": 0.5, "reward_std": 0.25}
        | {"train_s": 4.0, "staleness_max": 0, "mismatch_mean": 0.01, "num_training_devices": 2, "train/loss": 1.5}
        | {"mismatch_max": float("nan"), "train/broken": float("inf")}
    ),
}


def record_of(fields: dict[str, str], **sources: Any) -> Any:
    times = {"ready_at": 101.0, "published_at": 100.0, "previous_commit_at": 100.0}
    hashes = IterationHashes(fields, sources.pop("busy_s", {"a": 4.0, "b": 6.0}))
    return iteration_record(hashes, **(times | sources))


def test_committed_iteration_has_every_number():
    record = record_of(COMMITTED)
    assert record.wall_s == 10.0  # 100 -> 110
    assert record.weight_sync_s == 1.0  # 100 -> 101
    assert record.generate_s == 5.0  # 101 -> 106
    assert record.rollout_idle_frac == 0.5  # mean busy 5 of 10 s
    assert record.trainer_idle_frac == 0.6  # 4 of 10 s
    assert record.tpspd == 50.0  # 2000 tokens / 10 s / (2 training + 2 inference devices)
    assert (record.num_stale, record.num_responses, record.staleness_max, record.mismatch_mean) == (2, 64, 0, 0.01)
    assert record.metrics == {"train/loss": 1.5}
    assert record.mismatch_max is None  # not finite is not known


def test_weight_sync_counts_from_the_commit_of_the_version():
    record = record_of(COMMITTED | {"policy_version": "1"}, published_at=98.5)  # two iterations before
    assert (record.weight_sync_s, record.wall_s) == (2.5, 10.0)
    assert record_of(COMMITTED, published_at=None).weight_sync_s is None


# Generated from second 101 to 105 and from 106 to 107, that is for 5 s.
GENERATED = {"generated": "[[101.0, 105.0], [106.0, 107.0]]", "opened_epoch": "1", "committed_epoch": "1"}


def trained(*spans: Any) -> dict[str, str]:
    return COMMITTED | GENERATED | {"metrics": json.dumps({"spans": spans})}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (trained(("micro_batch", 104.0, 2.5), ("optimizer", 106.5, 1.0)), 0.3),  # 104-105 and 106-106.5
        (trained(("micro_batch", 101.0, 1.0), ("micro_batch", 101.5, 1.0), ("wait", 103.0, 1.0)), 0.3),
        (trained(("micro_batch", 108.0, 1.0)), 0.0),  # one after the other
        (trained(("micro_batch", "then", 1.0), ("micro_batch", 104.0), 7, ("micro_batch", 104.0, 1.0)), 0.2),
        (trained() | {"metrics": '{"spans": 5}'}, 0.0),
        (trained(("micro_batch", 104.0, 2.5)) | {"committed_epoch": "2"}, None),  # done again by another trainer
        (trained(("micro_batch", 104.0, 2.5)) | {"generated": "[]"}, None),
        (COMMITTED, None),  # a record of an older release
        ({name: value for name, value in trained().items() if name != "committed_epoch"}, None),  # not committed
    ],
)
def test_overlap_is_a_share_of_the_generation(fields, expected):
    record = record_of(fields)
    assert record.overlap_frac == (None if expected is None else pytest.approx(expected))
    points = metric_series([record]).get("iteration/overlap_frac")
    assert points == (None if expected is None else [(3, record.overlap_frac)])


def test_work_on_an_earlier_iteration_overlaps_as_well():
    before = trained(("micro_batch", 100.0, 3.0)) | {"iteration": "2"}
    record = record_of(trained(("micro_batch", 104.0, 1.0)), earlier=[before])
    assert record.overlap_frac == pytest.approx(0.6)  # 101-103 and 104-105, of 5 s


def test_shares_stay_between_zero_and_one():
    record = record_of(COMMITTED, busy_s={"a": 99.0}, ready_at=99.0)
    assert (record.rollout_idle_frac, record.weight_sync_s, record.generate_s) == (0.0, 0.0, 5.5)


def test_open_iteration_knows_only_what_happened():
    fields = {name: COMMITTED[name] for name in ("iteration", "state", "policy_version", "num_groups", "opened_at")}
    record = record_of(fields | {"state": "OPEN", "num_accepted": "1"}, ready_at=None, busy_s={})
    for name in ("wall_s", "generate_s", "weight_sync_s", "rollout_idle_frac", "trainer_idle_frac", "tpspd", "train_s"):
        assert getattr(record, name) is None, name
    assert record.num_accepted == 1


def test_iteration_without_workers_or_tokens_has_no_shares():
    record = record_of(COMMITTED | {"metrics": "{}"}, busy_s={})
    assert (record.rollout_idle_frac, record.trainer_idle_frac, record.tpspd) == (None, None, None)


def test_series_hold_the_records_numbers_and_the_trainers():
    series = metric_series([record_of(COMMITTED)])
    assert series["train/loss"] == [(3, 1.5)]
    assert series["iteration/reward_mean"] == [(3, 0.5)]
    assert "iteration/mismatch_max" not in series


# ---- evaluations -------------------------------------------------------------------------------------------------


def groups_of(*rewards: tuple[float, ...]) -> list[RolloutGroup]:
    """Build groups of a 3-token response for each reward; a reward of 0 was cut short. No rewards: a failed group."""
    return [
        RolloutGroup(
            responses=[
                Response(token_ids=[1, 2, 3], reward=reward, finish_reason="stop" if reward else "length")
                for reward in of_group
            ]
        )
        for of_group in rewards
    ]


def test_score_by_hand():
    assert score(groups_of((1.0, 0.0), (0.0, 0.0), ())) == {
        "reward_mean": 0.25,
        "reward_std": pytest.approx(0.1875**0.5),  # deviation of 1, 0, 0, 0
        "response_tokens_mean": 3.0,
        "truncated_frac": 0.75,
        "pass_at_k": 0.5,  # one of two prompts; the failed one is not scored
        "response_tokens_min": 3,
        "response_tokens_p95": 3,
        "response_tokens_max": 3,
        "solved_all_frac": 0.0,
        "solved_none_frac": 0.5,
    }
    assert "pass_at_k" not in score(groups_of((1.0,), (0.0,)))
    assert score(groups_of((), ())) == {}


def test_a_small_reward_solves_nothing():
    for_brevity = groups_of((0.1, 0.1), (1.1, 0.1))
    assert score(for_brevity)["pass_at_k"] == 0.5
    assert score(for_brevity, solved_at=0.1)["pass_at_k"] == 1.0


def test_scores_of_parts_are_series():
    groups = groups_of((1.0, 0.0))
    groups[0].responses[0].reward_parts["short"] = 1.0
    fields = {"evaluation": "4", "state": "DONE", "scores": json.dumps(score(groups))}
    series = evaluation_series([evaluation_record(fields)])
    assert series["eval/reward/short_mean"] == [(4, 1.0)]
    assert series["eval/response_tokens_max"] == [(4, 3)]
    assert series["eval/reward_mean"] == [(4, 0.5)]


def test_parts_of_a_reward_come_in_order():
    """Protobuf gives them in an order that differs from process to process."""
    names = ["form", "length", "right", "style", "tone", "units"]
    group = RolloutGroup(responses=[Response(reward_parts=dict.fromkeys(reversed(names), 1.0))])
    (sample,) = group_samples(group)
    assert list(sample.reward_parts) == names


@pytest.mark.parametrize(
    ("next_evaluation", "num_opened", "next_iteration", "due"),
    [
        (0, 0, 0, None),  # training's prompts go first
        (0, 1, 0, 0),
        (4, 4, 4, None),
        (4, 5, 4, 4),
        (4, 7, 3, None),  # bounded: iterations are open ahead of version 4
        (10, 10, 9, None),
        (10, 10, 10, 10),  # the end has no iteration of its own
        (11, 10, 10, None),
    ],
)
def test_evaluation_is_due_when_version_and_prompts_are_there(next_evaluation, num_opened, next_iteration, due):
    fields = {"next_evaluation": next_evaluation, "num_opened": num_opened, "next_iteration": next_iteration}
    assert due_evaluation({name: str(value) for name, value in fields.items()}, num_iterations=10) == due


@pytest.mark.parametrize(
    ("every", "num_iterations", "numbers"),
    [(4, 10, [0, 4, 8, 10]), (4, 8, [0, 4, 8]), (10, 5, [0, 5]), (1, 2, [0, 1, 2])],
)
def test_evaluations_are_every_so_many_iterations_and_at_the_end(every, num_iterations, numbers):
    evaluations, evaluation = [], 0
    while evaluation <= num_iterations:
        evaluations.append(evaluation)
        evaluation = following_evaluation(evaluation, every, num_iterations)
    assert evaluations == numbers


# ---- validation errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "change", "field", "message"),
    [
        ("data", {"tsk": 1}, "data.tsk", "did you mean task?"),
        ("data", {"path": "x"}, "data.path", "belongs to data.type = 'jsonl' or 'parquet' or 'hf'; leave it out, or"),
        ("data", {"type": "csv"}, "data", "has no type 'csv'; set data.type to one of: hf, jsonl, parquet, reasoning"),
        ("data", {"type": "jsonl", "task": None}, "data.path", "is required (path of the file in the data folder"),
        ("objective", {"type": "grpo", "clip_hi": 1}, "objective.clip_hi", "did you mean clip_high?"),
        ("objective", {"type": "grpo", "clip_low": "a"}, "objective.clip_low", "valid number"),
        ("objective", {"type": "grpo", "kl": {"coef": -1}}, "objective.kl.coef", "got -1 (factor of the"),
        ("rollout", {"num_samples_per_prompt": 1}, "rollout.num_samples_per_prompt", "set it to 2 or more"),
        ("rollout", {"num_samples_per_prompt": 0}, "rollout.num_samples_per_prompt", "got 0 (responses in a group"),
        ("rollout", {"max_response_tokens": "many"}, "rollout.max_response_tokens", "got 'many'"),
        ("rollout", {"num_samples_per_prompt": 10**30}, "rollout.num_samples_per_prompt", "or equal to 1024"),
        ("rollout", {"temperature": 0}, "rollout.temperature", "greater than or equal to 0.01"),
        ("optimizer", {"betas": [0.9, 2]}, "optimizer.betas.1", "got 2"),
        ("training", {"max_tokens_per_micro_batch": 0}, "training.max_tokens_per_micro_batch", "equal to 1, got 0"),
        ("training", {"max_tokens_per_micro_batch": "many"}, "training.max_tokens_per_micro_batch", "got 'many' ("),
        ("schedule", {"mode": "fast"}, "schedule", "has no mode 'fast'; set schedule.mode to one of: "),
        ("schedule", {"num_iterations": 0}, "schedule.num_iterations", "got 0"),
        ("schedule", {"num_iterations": 10**9}, "schedule.num_iterations", "or equal to 1000000"),
        ("schedule", {"num_iterations": True}, "schedule.num_iterations", "should be a number"),
        ("schedule", {"mode": "bounded", "publish_above_kl": 0.1}, "schedule.publish_above_kl", "to 2 or more"),
        ("evaluation", {"num_prompts": 10**6}, "evaluation.num_prompts", "or equal to 10000"),
        ("schedule", {"max_staleness": 2}, "schedule.max_staleness", "belongs to schedule.mode = 'bounded'"),
        ("rollout", {"num_iterations": 3}, "rollout.num_iterations", "did you mean schedule.num_iterations?"),
        ("rollout", {"seed": 3}, "rollout.seed", "did you mean seed at the top level?"),
        ("rollout", {"num_generations": 8}, "rollout.num_generations", "did you mean rollout.num_samples_per_prompt?"),
        ("schedule", {"mode": "bounded", "max_staleness": 0}, "schedule.max_staleness", "got 0 (largest number"),
        ("rollout", {"num_prompts": 3}, "rollout.num_prompts", "mean rollout.num_prompts_per_iteration?"),
        ("optimizer", {"epsilon": 1e-8}, "optimizer.epsilon", "did you mean optimizer.eps?"),
        ("evaluation", {"num_generations": 2}, "evaluation.num_generations", "mean evaluation.num_samples_per_prompt?"),
        (
            "objective",
            {"importance": {"type": "truncated", "low": 1}},
            "objective.importance.low",
            "belongs to objective.importance.type = 'band'; leave it out",
        ),
        ("evaluation", {"data": {"type": "csv"}}, "evaluation.data", "no type 'csv'; set evaluation.data.type to "),
        ("evaluation", {"data": {"task": 1}}, "evaluation.data", "set evaluation.data.type to one of: hf, jsonl, "),
        ("optimizer", {"betas": [0.9]}, "optimizer.betas.1", "is required"),
        ("rollout", {"top_p": 0.9}, "rollout.top_p", "training samples from the whole distribution, because"),
        ("data", {"type": "json"}, "data", "has no type 'json'; did you mean jsonl? set data.type to one of: hf, "),
    ],
)
def test_validation_error_names_field_value_and_remedy(section, change, field, message):
    good = job_body(data={"type": "reasoning_gym", "task": "chain_sum"})
    body = good | {section: good.get(section, {}) | change}
    with pytest.raises(ValidationError) as caught:
        JobConfig.model_validate(body)
    errors = [error | {"loc": ("body", *error["loc"])} for error in caught.value.errors()]
    explained = dict(explain_errors(errors, body))
    assert message in explained[field]


# ---- logging -----------------------------------------------------------------------------------------------------


@pytest.fixture
def root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.usefixtures("root_logger")
def test_json_log_is_one_object_per_line(capsys):
    configure("json", "info")
    logging.getLogger("a.b").info("two\nlines %d", 7, extra={"job_id": "j1"})
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("a.b").exception("it failed")
    logging.getLogger("a.b").debug("not shown")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["level"], first["logger"], first["message"], first["job_id"]) == ("INFO", "a.b", "two\nlines 7", "j1")
    assert "ValueError: broken" in second["exception"]


@pytest.mark.usefixtures("root_logger")
def test_text_log_and_unknown_format(capsys):
    configure("text")
    logging.getLogger("a.b").warning("hello")
    assert "WARNING a.b: hello" in capsys.readouterr().err
    with pytest.raises(ValueError, match="text or json"):
        configure("xml")


def test_turns_show_what_each_call_saw_and_said():
    seen = {"messages_json": json.dumps([{"role": "tool", "content": "9"}, "no message"]), "num_cached_tokens": 5}
    response = Response(
        text="add it now",
        turns=[
            Turn(num_shared=4, num_sampled=3, num_characters=6, finish_reason="stop"),
            Turn(parent=0, num_shared=7, observed_token_ids=[1, 2], num_sampled=1, num_characters=1, **seen),
            Turn(parent=1, num_shared=6, num_sampled=2, num_characters=3, messages_json="[{", reward=float("nan")),
        ],
    )
    turns = list(turns_of(response, num_prompt=4))
    assert [turn.text for turn in turns] == ["add it", " ", "now"]
    assert [turn.continues for turn in turns] == [None, 0, 1]
    assert [turn.is_fork for turn in turns] == [False, False, True]  # 6 of the 10 tokens to the end of turn 1
    assert [turn.num_cached_tokens for turn in turns] == [0, 5, 0]
    assert turns[1].messages == [{"role": "tool", "content": "9"}]
    assert (turns[2].messages, turns[2].reward) == ([], None)  # unreadable turns are left out


@pytest.mark.parametrize(
    "value", ['"\\ud800"', "[" * 300 + "]" * 300, "[" * 198 + "]" * 198, "9" * 5000, "1e999", "NaN"]
)
def test_messages_that_json_cannot_hold_leave_their_group_shown(value):
    asked = f'[{{"role": "tool", "content": {value}}}]'
    turn = Turn(num_shared=4, num_sampled=1, num_characters=2, messages_json=asked)
    response = Response(token_ids=[5], rollout_logprobs=[-1.0], text="ok", turns=[turn])
    shown = group_detail(RolloutGroup(group_id="0-0", prompt_token_ids=[1, 2, 3, 4], responses=[response]))
    assert json.loads(shown.model_dump_json())["responses"][0]["turns"][0]["text"] == "ok"


@pytest.mark.parametrize("place", sorted(set(FOREIGN_KEYS.values())))
def test_key_of_another_framework_leads_to_a_key_of_a_job(place):
    *above, key = place.split(".")
    assert key in named_by(above, [])


def test_list_in_place_of_a_section_is_explained():
    body = job_body(evaluation=[{"name": "easy"}], schedule=[{"num_iterations": 3}], objective=[{"type": "grpo"}])
    with pytest.raises(ValidationError) as caught:
        JobConfig.model_validate(body)
    explained = dict(
        explain_errors([{**error, "loc": ("body", *error["loc"])} for error in caught.value.errors()], body)
    )
    assert explained == {
        "evaluation": "is one section, and not a list: write [evaluation] with single brackets; several held-out sets "
        "go under [[evaluation.sets]]",
        "schedule": "is one section, and not a list: write [schedule] with single brackets",
        "objective": "is one section, and not a list: write [objective] with single brackets",
    }
