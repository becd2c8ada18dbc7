"""Prompts chosen by the outcomes of earlier ones: estimates, choices of rows and levels, and what is refused."""

import json
import random
from itertools import product
from typing import Any

import pytest
from pydantic import ValidationError

from onbeat.config import JobConfig
from onbeat.config.data import DifficultyConfig
from onbeat.config.explain import explain_errors
from onbeat.streams.codec import Response, RolloutGroup
from onbeat.streams.outcomes import Outcome
from services.broker.datasets import DatasetSpec
from services.broker.datasets.choice import Choice, Chooser
from services.broker.datasets.difficulty import (
    OLDEST,
    SIGNAL,
    UNSEEN,
    Knowledge,
    Pick,
    choose_levels,
    choose_rows,
    explores,
    mixed_probability,
)
from services.broker.datasets.sources import SOURCE_BITS
from tests.world import job_body

ROWS = {"type": "jsonl", "path": "rows.jsonl", "order": "difficulty"}
GYM = {"type": "reasoning_gym", "task": "chain_sum", "order": "difficulty"}
LEVELS = [{"max_terms": 2}, {"max_terms": 3}, {"max_terms": 4}]
NUM_SAMPLES = 4
NO_EXPLORATION = DifficultyConfig(explore=1e-6)


def job(data: Any, **sections: Any) -> JobConfig:
    return JobConfig.model_validate(job_body(data=data, **sections))


def refusal(data: Any, **sections: Any) -> str:
    body = job_body(data=data, **sections)
    with pytest.raises(ValidationError) as caught:
        JobConfig.model_validate(body)
    errors = [{**error, "loc": ("body", *error["loc"])} for error in caught.value.errors()]
    return "; ".join(f"{field}: {message}" for field, message in explain_errors(errors, body))


def knowledge_of(visits: dict[int, int], settings: DifficultyConfig = NO_EXPLORATION, iteration: int = 0) -> Knowledge:
    """Return what one visit to each row tells. `visits`: row -> solved responses of NUM_SAMPLES."""
    knowledge = Knowledge(settings)
    knowledge.add_outcomes(iteration, [Outcome(row, num_solved, NUM_SAMPLES) for row, num_solved in visits.items()])
    return knowledge


# ---- the estimates -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "num_samples"), product([0.0, 0.1, 0.5, 0.75, 1.0], [1, 2, 4]))
def test_expected_signal_is_that_of_all_outcomes(share: float, num_samples: int) -> None:
    mixed = 0.0
    for outcome in product([0, 1], repeat=num_samples):
        probability = share ** sum(outcome) * (1 - share) ** (num_samples - sum(outcome))
        mixed += probability if 0 < sum(outcome) < num_samples else 0.0
    assert mixed_probability(share, num_samples) == pytest.approx(mixed, abs=1e-12)


def test_estimate_is_decayed_and_begins_with_the_prior() -> None:
    knowledge = Knowledge(DifficultyConfig(decay=0.5, prior=0.5))
    assert knowledge.solved_share(3) is None
    for iteration, num_solved in enumerate([4, 0, 1]):
        knowledge.add_outcomes(iteration, [Outcome(3, num_solved, NUM_SAMPLES)])
    solved, rewarded = 4 / 4 + 0 / 2 + 1, 4 / 4 + 4 / 2 + 4
    assert knowledge.solved_share(3) == (solved + 0.5) / (rewarded + 1)


def test_order_of_arrival_changes_nothing() -> None:
    outcomes = [Outcome(row % 5, row % 3, 3) for row in range(12)]
    states = set()
    for seed in range(5):
        random.Random(seed).shuffle(outcomes)
        knowledge = Knowledge(DifficultyConfig())
        knowledge.add_outcomes(0, outcomes)
        states.add(json.dumps([choose_rows(knowledge, range(9), range(4), 3, 3, 0)], default=str))
    assert len(states) == 1


def test_unseen_rows_are_expected_to_be_as_the_first_visits_were() -> None:
    knowledge = Knowledge(DifficultyConfig())
    assert knowledge.expected_signal(None, NUM_SAMPLES) == 0.5
    knowledge.add_outcomes(0, [Outcome(0, 2, 4), Outcome(1, 0, 4), Outcome(2, 4, 4)])
    assert knowledge.expected_signal(None, NUM_SAMPLES) == (1 + 0.5) / (3 + 1)
    knowledge.add_outcomes(1, [Outcome(0, 1, 4)])  # no first visit; what was known counts less
    assert knowledge.expected_signal(None, NUM_SAMPLES) == pytest.approx((0.9 + 0.5) / (2.7 + 1))


def test_expected_signal_is_corrected_by_what_came_true() -> None:
    knowledge = Knowledge(DifficultyConfig(prior=0.5))
    knowledge.add_outcomes(0, [Outcome(row, 4, 4) for row in range(3)])
    share = knowledge.solved_share(0)
    assert share == 0.9
    probability = mixed_probability(share, NUM_SAMPLES)
    assert knowledge.expected_signal(share, NUM_SAMPLES) == probability
    knowledge.add_outcomes(1, [Outcome(0, 4, 4), Outcome(1, 3, 4), Outcome(2, 4, 4), Outcome(9, 1, 4)])
    assert knowledge.expected_signal(share, NUM_SAMPLES) == (1 + probability) / (3 + 1)
    assert knowledge.expected_signal(0.5, NUM_SAMPLES) == mixed_probability(0.5, NUM_SAMPLES)
    knowledge.add_outcomes(2, [])
    assert knowledge.expected_signal(share, NUM_SAMPLES) == pytest.approx((0.9 + probability) / (2.7 + 1))


def test_unseen_rows_come_before_rows_that_are_always_solved() -> None:
    """A row that was solved four times of four has 0.34 by the probability alone, more than a new row's 0.13."""
    knowledge = knowledge_of(dict.fromkeys(range(40), 4), NO_EXPLORATION)
    for iteration in range(1, 3):
        knowledge.add_outcomes(iteration, [Outcome(row, 4, 4) for row in range(20 * iteration - 20, 20 * iteration)])
    knowledge.add_outcomes(3, [Outcome(row, row % 2, 4) for row in range(40, 50)])
    picks = choose_rows(knowledge, [*range(40), *range(50, 100)], range(8), 9, NUM_SAMPLES, 0)
    assert [pick.why for pick in picks] == [UNSEEN] * 8


def test_row_whose_groups_failed_is_expected_to_teach_nothing() -> None:
    knowledge = Knowledge(NO_EXPLORATION)
    knowledge.add_outcomes(0, [Outcome(0, 0, 0)])
    picks = choose_rows(knowledge, range(3), range(2), 9, NUM_SAMPLES, 0)
    assert {pick.row for pick in picks} == {1, 2}


# ---- rows --------------------------------------------------------------------------------------------------------


def test_rows_come_by_expected_signal() -> None:
    knowledge = knowledge_of({0: 0, 1: 2, 2: 4, 3: 1, 4: 2})
    picks = choose_rows(knowledge, range(5), range(4), 9, NUM_SAMPLES, 0)
    assert [pick.why for pick in picks] == [SIGNAL] * 4
    assert {picks[0].row, picks[1].row} == {1, 4}
    assert picks[2].row == 3
    assert picks[3].row in (0, 2)
    assert [pick.expected for pick in picks] == sorted((pick.expected for pick in picks), reverse=True)


def test_unseen_row_comes_before_a_weaker_one() -> None:
    knowledge = knowledge_of({0: 0, 1: 4, 2: 2, 3: 2})
    picks = choose_rows(knowledge, range(10), range(4), 9, NUM_SAMPLES, 0)
    assert [pick.why for pick in picks] == [SIGNAL, SIGNAL, UNSEEN, UNSEEN]
    assert picks[2].expected == knowledge.expected_signal(None, NUM_SAMPLES)
    assert picks[2].expected > knowledge.expected_signal(knowledge.solved_share(0), NUM_SAMPLES)


def test_row_rests_after_a_visit() -> None:
    knowledge = knowledge_of(dict.fromkeys(range(64), 2), iteration=0)
    knowledge.add_choice(5, range(4))
    chosen = {pick.row for pick in choose_rows(knowledge, range(64), range(4), 6, NUM_SAMPLES, 0)}
    assert not chosen & set(range(4))
    later = choose_rows(knowledge, range(64), range(64), 8, NUM_SAMPLES, 0)
    assert {pick.row for pick in later} == set(range(64))


def test_rows_outside_the_band_come_to_explore_only() -> None:
    knowledge = knowledge_of({0: 0, 1: 1, 2: 2, 3: 4}, DifficultyConfig(explore=1e-6, band=(0.4, 0.6)))
    picks = choose_rows(knowledge, range(4), range(4), 9, NUM_SAMPLES, 0)
    assert [(pick.row, pick.why) for pick in picks[:1]] == [(2, SIGNAL)]
    assert [pick.why for pick in picks[1:]] == [OLDEST] * 3


def test_share_of_exploration_holds_after_every_prompt() -> None:
    for share in (0.05, 0.2, 1 / 3, 0.5, 1.0):
        count = 0
        for prompt in range(1000):
            count += explores(prompt, share)
            assert abs(count - share * (prompt + 1)) < 1 + 1e-6


def test_all_rows_are_seen_in_the_end() -> None:
    knowledge, iteration = Knowledge(DifficultyConfig(explore=0.25)), 0
    while len(knowledge.rows) < 40:
        prompts = range(8 * iteration, 8 * iteration + 8)
        rows = [pick.row for pick in choose_rows(knowledge, range(40), prompts, iteration, NUM_SAMPLES, 0)]
        assert len(set(rows)) == len(rows)
        knowledge.add_choice(iteration, rows)
        knowledge.add_outcomes(iteration, [Outcome(row, 2 if row < 8 else 0, NUM_SAMPLES) for row in rows])
        iteration += 1
    assert iteration <= 20  # two prompts of each iteration explore


def test_rows_repeat_where_there_are_too_few() -> None:
    picks = choose_rows(knowledge_of({0: 2, 1: 0}), range(2), range(5), 3, NUM_SAMPLES, 0)
    assert sorted(pick.row for pick in picks) in ([0, 0, 0, 1, 1], [0, 0, 1, 1, 1])


def test_rows_that_were_left_out_are_not_chosen() -> None:
    knowledge = knowledge_of(dict.fromkeys(range(6), 2))
    picks = choose_rows(knowledge, [1, 4, 7], range(3), 9, NUM_SAMPLES, 0)
    assert {pick.row for pick in picks} == {1, 4, 7}


# ---- levels ------------------------------------------------------------------------------------------------------


def test_levels_get_harder_as_the_policy_gets_better() -> None:
    knowledge, chosen = Knowledge(DifficultyConfig(explore=0.25)), []
    for iteration in range(30):
        prompts = range(8 * iteration, 8 * iteration + 8)
        picks = choose_levels(knowledge, 3, prompts, NUM_SAMPLES)
        chosen.append([pick.row for pick in picks if pick.why == SIGNAL])
        solved = {level: min(4, max(0, iteration // 4 - 3 * level)) for level in range(3)}
        knowledge.add_outcomes(iteration, [Outcome(pick.row, solved[pick.row], NUM_SAMPLES) for pick in picks])
    hardest = [max(levels) for levels in chosen]
    assert hardest[0] == 0
    assert hardest[-1] == 2
    assert hardest == sorted(hardest)


def test_levels_are_explored_in_turn() -> None:
    picks = choose_levels(Knowledge(DifficultyConfig(explore=0.5)), 3, range(12), NUM_SAMPLES)
    explored = [pick.row for pick in picks if pick.why != SIGNAL]
    assert explored == [0, 1, 2, 0, 1, 2]


def test_pick_says_what_was_chosen_and_why() -> None:
    assert Pick(17, SIGNAL, 0.43, 0.84).words == "Row 17 was chosen for its expected signal of 84%; 43% solved before."
    assert Pick(3, UNSEEN, None, 0.5).words == "Row 3 was chosen because no iteration had it yet."
    level = choose_levels(Knowledge(DifficultyConfig(explore=1.0)), 2, range(1), NUM_SAMPLES)[0]
    assert level.words == "Level 0 was chosen to explore the levels."


# ---- the record --------------------------------------------------------------------------------------------------


def test_outcome_is_that_of_the_source() -> None:
    data = [ROWS | {"name": "a", "solved_at": 2}, ROWS | {"name": "b"}, ROWS | {"name": "c", "order": "shuffled"}]
    config = job(data)
    responses = [Response(reward=1.0), Response(reward=2.0), Response(has_no_reward=True)]
    group = RolloutGroup(source="a", data_row=7, responses=responses)
    assert Outcome.of_group(config, group) == Outcome(7, 1, 2)
    group.source, group.data_row = "b", (1 << SOURCE_BITS) + 7
    outcome = Outcome.of_group(config, group)
    assert outcome == Outcome((1 << SOURCE_BITS) + 7, 2, 2)
    assert Outcome.read(str(outcome)) == outcome
    group.source = "c"
    assert Outcome.of_group(config, group) is None


def test_choice_survives_its_record() -> None:
    chooser = Chooser(job(ROWS))
    choice = chooser.choose(0, {0: range(10)})
    assert Choice.from_json(choice.to_json()).to_json() == choice.to_json()
    assert choice.num_rows == {"0": 10}
    assert Chooser(job(ROWS)).choose(0, {0: [0, 2, 3]}).num_rows == {}  # the audit cannot make it again


def test_knowledge_survives_its_record() -> None:
    chooser = Chooser(job([ROWS | {"name": "a"}, GYM | {"name": "b", "levels": LEVELS}]))
    chooser.add_choice(0, chooser.choose(0, {0: range(10)}))
    chooser.add_outcomes(0, [Outcome(3, 1, 4), Outcome((1 << SOURCE_BITS) + 2, 1, 4)])
    stored = chooser.to_json(lambda source: 0 if source.name == "a" else 1)
    again = Chooser(chooser.config, stored)
    assert again.choose(5, {0: range(10)}) == chooser.choose(5, {0: range(10)})
    assert Chooser(chooser.config).to_json(lambda source: 0) == ""


# ---- the configuration -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (ROWS | {"order": "dificulty"}, "data.order"),
        (ROWS | {"order": "shuffled", "difficulty": {}}, "has no effect without order = 'difficulty'"),
        (ROWS | {"difficulty": {"explore": 0}}, "data.difficulty.explore"),
        (ROWS | {"difficulty": {"band": [0.9, 0.1]}}, "give two from 0 to 1, the lower one first"),
        (ROWS | {"difficulty": {"exlore": 0.1}}, "unknown key; did you mean explore?"),
        (ROWS | {"levels": LEVELS}, "data.levels: belongs to data.type = 'reasoning_gym'"),
        (GYM, "chooses between levels"),
        (GYM | {"levels": LEVELS[:1]}, "give at least two"),
        (GYM | {"order": "in_order", "levels": LEVELS}, "have no effect without order = 'difficulty'"),
        (ROWS | {"shuffle": True}, "shuffle: is the old name of order"),
        ({"type": "jsonl", "path": "rows.jsonl", "shuffle": "no"}, "is the old name of order"),
    ],
)
def test_order_that_means_nothing_is_refused(data: Any, sentence: str) -> None:
    assert sentence in refusal(data)


def test_held_out_prompts_are_not_chosen() -> None:
    assert "held-out prompts are the same each time" in refusal(ROWS, evaluation={"data": ROWS})


@pytest.mark.parametrize(("shuffle", "order"), [(True, "shuffled"), (False, "in_order")])
def test_old_jobs_are_read_as_before(shuffle: bool, order: str) -> None:
    config = job({"type": "jsonl", "path": "rows.jsonl", "shuffle": shuffle})
    assert config.data.order == order
    assert "shuffle" not in config.model_dump(mode="json")["data"]
    assert JobConfig.model_validate_json(config.model_dump_json()) == config


def test_chosen_rows_share_the_data_set_with_rows_in_order() -> None:
    config = job(ROWS | {"difficulty": {"explore": 0.5}})
    in_order = job(ROWS | {"order": "in_order"})
    chosen, spec = DatasetSpec.of_job(config), DatasetSpec.of_job(in_order)
    assert without_count(chosen) == without_count(spec)


def without_count(spec: DatasetSpec) -> DatasetSpec:
    return spec.model_copy(update={"num_items": 0})
