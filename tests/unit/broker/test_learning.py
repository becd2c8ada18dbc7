"""A run that cannot learn is not healthy, one that learns raises no alarm; a problem names the key to change."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from onbeat.config import JobConfig
from onbeat.contracts.records import EvaluationRecord, Finding, IterationRecord
from onbeat.contracts.states import EvaluationState, IterationState
from services.broker.doctor.course import NUM_RECENT, Course, best_of
from services.broker.doctor.learning import findings_of, look_at_young
from tests.world import job_body

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
RECORDED = [
    run
    for name in ("time_to_reward.json", "time_to_reward_float32.json")
    for run in json.loads((RESULTS / name).read_text(encoding="utf-8"))["onbeat"]
]
DULL = {"rollout/uniform_groups": 4.0, "rollout/solved_none_frac": 1.0, "train/entropy": 2.0}


def iteration(number: int, reward: float, **metrics: float) -> IterationRecord:
    return IterationRecord(
        iteration=number,
        state=IterationState.COMMITTED,
        policy_version=number,
        num_groups=4,
        opened_at=0.0,
        reward_mean=reward,
        mismatch_mean=0.01,
        metrics=metrics,
    )


def find(
    records: Sequence[IterationRecord], held_out: Sequence[EvaluationRecord] = (), **sections: Any
) -> list[Finding]:
    best = best_of(held_out)
    around = records[best.evaluation :][:NUM_RECENT] if best else []
    sections.setdefault("model", {"dtype": "bfloat16"})
    config = JobConfig.model_validate(job_body(**sections))
    recent = records[-NUM_RECENT:]
    return findings_of(Course("job-1", config, len(records), records[:NUM_RECENT], recent, held_out, around))


def test_a_job_with_a_teacher_is_judged_by_its_gap() -> None:
    """Equal rewards, or none, are no problem there: the teacher has something to say on every response."""
    gaps = [iteration(number, 0.0, **DULL, **{"train/teacher_gap": 1.0 / (number + 1)}) for number in range(20)]
    (finding,) = find(gaps, objective={"type": "distill"}, teacher={"path": "/t"}, solved_at=1.0)
    assert not finding.is_problem
    assert "gap to its teacher (train/teacher_gap, nats per token) of 0.056, and had 0.457 at first" in finding.sentence
    assert any(finding.is_problem for finding in find(gaps))


def test_truncation_is_a_note_from_the_second_iteration_on() -> None:
    config = JobConfig.model_validate(job_body(rollout={"max_response_tokens": 16}))
    cut = [iteration(number, 0.3, **{"rollout/truncated_frac": 0.94}) for number in range(3)]
    assert look_at_young("job-1", config, cut[:1]) == []
    (note,) = look_at_young("job-1", config, cut[:2])
    assert note.sentence.startswith("94% of the responses of job-1 were truncated so far: if that stays, raise ")
    assert (note.key, note.is_problem) == ("rollout.max_response_tokens", False)
    few = [iteration(number, 0.3, **{"rollout/truncated_frac": 0.4}) for number in range(3)]
    assert look_at_young("job-1", config, few) == []


def problems(findings: Sequence[Finding]) -> dict[str, str]:
    return {finding.key: finding.sentence for finding in findings if finding.is_problem}


def course_of(num: int, **metrics: float) -> list[IterationRecord]:
    return [iteration(number, 0.0, **(DULL | metrics)) for number in range(num)]


def learning(num: int = 40, **metrics: float) -> list[IterationRecord]:
    """Return the course of a quick start: noise, and most groups solved at the end."""
    rng, records = random.Random(0), []
    for number in range(num):
        share = min(1.0, number / (0.5 * num))
        reward = min(1.0, max(0.0, 0.3 + 0.68 * share + rng.gauss(0, 0.05)))
        values = {"rollout/uniform_groups": float(round(4 * share)), "rollout/solved_all_frac": share}
        values |= {"train/entropy": 2.1 * (1 - share) + 0.02, "rollout/truncated_frac": 0.47 - 0.3 * share}
        records.append(iteration(number, reward, **(values | metrics)))
    return records


def test_a_run_without_signal_is_no_healthy_one():
    findings = find(course_of(40))
    sentence = problems(findings)["reward"]
    assert (
        "job-1 learns nothing: in the last 8 iterations the responses of each group had equal rewards, 0 on" in sentence
    )
    assert "raise rollout.num_samples_per_prompt above 2" in sentence


def test_steps_that_are_nearly_all_skipped_are_a_problem():
    def problems_of(num_skipped: float) -> dict[str, str]:
        return problems(find(learning(**{"train/gac_skip": num_skipped}), training={"num_updates_per_iteration": 2}))

    assert "GAC skipped 100% of the steps of job-1 in the last 8 iterations" in problems_of(2)["gac.c_high"]
    assert problems_of(1) == {}


def test_nothing_is_said_about_the_first_iterations():
    assert find(course_of(4, **{"rollout/truncated_frac": 1.0})) == []
    assert problems(find(course_of(5)))


@pytest.mark.parametrize("num", range(1, 41))
def test_no_alarm_while_a_quick_start_learns(num):
    findings = find(learning()[:num], evaluation={"data": {"type": "jsonl", "path": "prompts.jsonl"}})
    assert problems(findings) == {}
    assert bool(findings) == (num >= 5)


@pytest.mark.parametrize("num", range(5, 13))
def test_no_alarm_while_responses_learn_to_be_short(num):
    rewards = [0.25, 0.25, 0.5, 0.69, 0.77, 0.88, 0.92, 0.66, 0.81, 0.92, 0.93, 0.97]  # quick start, seed 0
    truncated = [0.81, 0.92, 0.8, 0.75, 0.73, 0.5, 0.28, 0.36, 0.09, 0.05, 0.06, 0.03]
    course = [
        iteration(number, reward, **(DULL | {"rollout/uniform_groups": 1.0, "rollout/truncated_frac": share}))
        for number, (reward, share) in enumerate(zip(rewards, truncated, strict=True))
    ]
    assert problems(find(course[:num])) == {}


@pytest.mark.parametrize("run", RECORDED, ids=lambda run: f"{run['dtype']}-{run['seed']}")
def test_no_alarm_in_a_recorded_quick_start_cut_anywhere(run):
    """`benchmarks/time_to_reward.py` recorded what the doctor reads of quick starts, which all learned it."""
    scores, cut = (run["held_out"][name][-1] for name in ("reward_mean", "truncated_frac"))
    assert scores >= 0.85
    assert cut <= 0.05
    course = [
        iteration(number, record["reward_mean"], **record["metrics"]).model_copy(
            update={"mismatch_mean": record["mismatch_mean"], "num_groups": record["num_groups"]}
        )
        for number, record in enumerate(run["iterations"])
    ]
    for num in range(1, len(course) + 1):
        assert problems(find(course[:num], model={"dtype": run["dtype"]})) == {}, f"after {num} iterations"


def test_a_young_job_that_rises_may_have_cut_responses():
    """The first and the last eight iterations of it are mostly the same ones."""
    rewards = [0.25, 0.3, 0.28, 0.4, 0.5, 0.62, 0.7, 0.8, 0.83, 0.81]
    course = [iteration(number, reward, **{"rollout/truncated_frac": 0.96}) for number, reward in enumerate(rewards)]
    for num in range(5, len(course) + 1):
        assert problems(find(course[:num])) == {}, f"after {num} iterations"


@pytest.mark.parametrize(("reward", "is_problem"), [(0.9, False), (0.3, True)])
def test_cut_responses_are_a_note_while_the_reward_is_high(reward, is_problem):
    course = [iteration(number, reward, **{"rollout/truncated_frac": 0.96}) for number in range(10)]
    (finding,) = [finding for finding in find(course) if finding.key == "rollout.max_response_tokens"]
    assert finding.is_problem is is_problem


@pytest.mark.parametrize(("num_short", "num_equal", "is_said"), [(6, 5.0, True), (5, 5.0, False), (8, 8.0, False)])
def test_dynamic_sampling_that_runs_out_of_prompts_is_said(num_short, num_equal, is_said):
    """Eight of eight prompts with equal rewards are another finding."""
    course = [
        iteration(number, 0.5, **(DULL | {"rollout/uniform_groups": num_equal})).model_copy(
            update={"num_groups": 8, "num_replaced": 4, "num_not_replaced": int(number < num_short)}
        )
        for number in range(8)
    ]
    rollout = {"num_prompts_per_iteration": 4, "max_prompts_per_iteration": 8}
    said = [finding for finding in find(course, rollout=rollout) if finding.key == "rollout.max_prompts_per_iteration"]
    assert [finding.is_problem for finding in said] == [False] * is_said
    if is_said:
        start = "in the last 8 iterations of job-1, 6 used all 8 prompts, and 0.75 of 4 groups with signal"
        assert said[0].sentence.startswith(start)


def test_a_run_that_learns_is_summed_up():
    (finding,) = [finding for finding in find(learning()[:25]) if not finding.key]
    assert finding.sentence.startswith("job-1 has a mean reward of 0.9")
    assert "25 iterations ago" in finding.sentence


def test_ends_of_a_young_job_do_not_overlap():
    (finding,) = [finding for finding in find([iteration(n, n / 10) for n in range(5)]) if not finding.key]
    assert finding.sentence.startswith("job-1 has a mean reward of 0.350, and had 0.050 at first, 5 iterations ago")


def test_truncation_names_the_limit():
    sentences = problems(find(course_of(8, **{"rollout/truncated_frac": 0.71})))
    key, sentence = next(iter(sentences.items()))  # before what follows from it
    assert key == "rollout.max_response_tokens"
    assert "71% of the responses of job-1 were truncated in the last 8 iterations: raise" in sentence
    assert "rollout.max_response_tokens above 8" in sentence
    findings = find(learning(**{"rollout/truncated_frac": 0.6}))  # it learns in spite of it
    assert "60% of the responses were truncated" in findings[0].sentence
    assert "rollout.max_response_tokens" not in problems(findings)
    assert "rollout.max_response_tokens" in [finding.key for finding in findings]


@pytest.mark.parametrize(
    ("rollout", "is_said"),
    [
        ({"truncated": "zero"}, True),
        ({"truncated": "zero", "truncated_reward": -1.0}, False),
        ({"truncated": "score"}, False),
    ],
)
def test_being_cut_that_pays_is_a_problem(rollout, is_said):
    course = [iteration(number, -0.25, **{"rollout/truncated_frac": 0.2}) for number in range(8)]
    sentence = problems(find(course, rollout=rollout)).get("rollout.truncated_reward", "")
    words = "the mean reward was -0.25, and a response that is cut gets 0: set rollout.truncated_reward"
    assert (words in sentence) is is_said
    uncut = [iteration(number, -0.25, **{"rollout/truncated_frac": 0.0}) for number in range(8)]
    assert "rollout.truncated_reward" not in problems(find(uncut, rollout=rollout))


def test_a_solved_task_is_no_problem_unless_it_always_was():
    solved = {"rollout/uniform_groups": 4.0, "rollout/solved_all_frac": 1.0, "rollout/solved_none_frac": 0.0}
    always = [iteration(number, 1.0, **solved) for number in range(20)]
    assert "its task is too easy" in problems(find(always))["data"]
    by_now = learning(20)[:10] + [iteration(number, 1.0, **solved) for number in range(10, 20)]
    findings = find(by_now)
    assert problems(findings) == {}
    assert any("has solved its task" in finding.sentence for finding in findings)


def test_equal_groups_of_a_mixed_task_ask_for_more_samples():
    sentences = problems(find(course_of(8, **{"rollout/solved_none_frac": 0.5, "rollout/solved_all_frac": 0.5})))
    assert list(sentences) == ["rollout.num_samples_per_prompt"]
    (finding,) = [candidate for candidate in find(course_of(8, **{"rollout/uniform_groups": 3.0})) if candidate.key]
    assert (finding.is_problem, finding.sentence[:31]) == (False, "75% of the groups of job-1 had ")


def test_collapsed_entropy_is_a_problem_unless_it_learns():
    start = [iteration(number, 0.4, **{"train/entropy": 2.0, "rollout/uniform_groups": 1.0}) for number in range(8)]
    end = [iteration(number, 0.4, **{"train/entropy": 0.01, "rollout/uniform_groups": 1.0}) for number in range(8, 16)]
    sentence = problems(find(start + end))["optimizer.learning_rate"]
    assert "has collapsed, from 2 to 0.01 nats" in sentence
    assert "below 1e-06" in sentence
    assert (
        problems(find(start + [record.model_copy(update={"reward_mean": record.iteration / 10}) for record in end]))
        == {}
    )


def test_a_large_mismatch_names_dtype_and_correction():
    apart = [record.model_copy(update={"mismatch_mean": 0.4}) for record in learning(20)]
    assert 'model.dtype = "float32"' in problems(find(apart))["model.dtype"]
    assert list(problems(find(apart, model={"dtype": "float32"}))) == ["objective.importance"]


def test_parts_that_never_vary_are_named():
    parts = {"reward/format_mean": 0.1, "reward/format_std": 1e-9, "reward/right_mean": 0.5, "reward/right_std": 0.5}
    (finding,) = [candidate for candidate in find(learning(10, **parts)) if candidate.key == "reward"]
    assert "part format of the reward gave every response the same value, so it teaches nothing" in finding.sentence
    assert not finding.is_problem


PARTS = [{"name": "exact"}, {"name": "regex", "options": {"pattern": "x"}, "part": "short", "weight": 0.1}]


def shaped(num_groups: float, right: Sequence[float], **metrics: float) -> list[IterationRecord]:
    """Return iterations of four groups, of which so many differ in the part short while no answer is solved."""
    values = {"rollout/uniform_groups": 0.0, "rollout/mixed_unsolved_groups": num_groups}
    values |= {"rollout/mixed_unsolved_short": num_groups, "reward/short_mean": 0.5, "reward/short_std": 0.5}
    return [
        iteration(number, 0.05, **(DULL | values | {"reward/exact_mean": mean, "reward/exact_std": mean} | metrics))
        for number, mean in enumerate(right)
    ]


def test_groups_that_teach_a_lesser_part_alone_name_the_signal():
    findings = find(shaped(3, [0.0] * 8), reward=PARTS)
    sentence = problems(findings)["objective.signal"]
    start = "in 24 of 32 groups of job-1 no answer is solved in the last 8 iterations; they differ only in part short, "
    assert sentence.startswith(start)
    assert 'set objective.signal = "part:exact"' in sentence
    assert not any("leave out" in finding.sentence for finding in findings)
    (note,) = [finding for finding in find(shaped(3, [0.1, 0.2] * 4), reward=PARTS) if finding.key]
    assert (note.key, note.is_problem) == ("objective.signal", False), "the task is learned, too"


def test_groups_of_a_source_with_its_own_signal_do_not_count():
    """Three of four groups are of the source that teaches by its rewards."""
    file = {"type": "jsonl", "path": "prompts.jsonl"}
    data = [file | {"name": "a"}, file | {"name": "b", "signal": "part:exact"}]
    counts = {"source/a/groups": 3.0, "source/b/groups": 1.0}
    findings = find(shaped(3, [0.0] * 8, **counts), reward=PARTS, data=data)
    assert problems(findings)["objective.signal"].startswith("in 24 of 24 groups of job-1 no answer is solved")
    assert "objective.signal" not in problems(find(shaped(2, [0.0] * 8, **counts), reward=PARTS, data=data))


@pytest.mark.parametrize(
    ("num_groups", "metrics", "sections"),
    [
        (2, {}, {"reward": PARTS}),
        (3, {"rollout/mixed_unsolved_exact": 1.0}, {"reward": PARTS}),
        (3, {}, {"reward": PARTS, "objective": {"signal": "part:exact"}}),
        (3, {}, {}),
    ],
)
def test_groups_that_teach_more_are_left_alone(num_groups, metrics, sections):
    keys = [finding.key for finding in find(shaped(num_groups, [0.1, 0.2] * 4, **metrics), **sections)]
    assert "objective.signal" not in keys


def test_a_lesser_part_that_displaced_the_task_names_the_signal():
    """All responses are short by now, so no group differs, and the reward has risen."""

    def after(right: Sequence[float], **metrics: float) -> list[IterationRecord]:
        records = shaped(0, right, **metrics)
        for record, short in zip(records, [0.3, 0.9, 1.0, 1.0, 1.0], strict=True):
            record.metrics |= {"reward/short_mean": short, "rollout/truncated_frac": 1.0}
        return records

    displaced = after([0.03, 0.0, 0.0, 0.0, 0.0], **{"rollout/uniform_groups": 4.0})
    first, *_ = [finding for finding in find(displaced, reward=PARTS) if finding.is_problem]
    assert first.sentence.startswith("job-1 learns part short of the reward in place of exact, the largest one: ")
    assert "reward/short_mean went from 0.300 to 1.000, reward/exact_mean went from 0.030 to 0.000" in first.sentence
    assert 'begin again with objective.signal = "part:exact"' in first.sentence
    cured = {"reward": PARTS, "objective": {"signal": "part:exact"}}
    solved = {"rollout/solved_none_frac": 0.1}
    for records, sections in [(displaced, cured), (after([0.3] * 5, **solved), {"reward": PARTS})]:
        assert "objective.signal" not in problems(find(records, **sections))


def test_a_job_without_the_signal_it_names_says_why():
    solved = {"objective": {"signal": "solved"}, "solved_at": 1.0, "reward": PARTS}
    dull = {"rollout/uniform_groups": 4.0}
    sentence = problems(find(shaped(0, [0.1, 0.2] * 4, **dull), **solved))["objective.signal"]
    assert "no response reached solved_at = 1, although part exact of the reward varies" in sentence
    assert 'set objective.signal = "part:exact", or lower solved_at' in sentence
    sentence = problems(find(shaped(0, [0.0] * 8, **dull), **solved))["data"]
    assert "its groups had no signal (objective.signal = solved): raise rollout.num_samples_per_prompt" in sentence
    half = find(shaped(0, [0.1] * 8, **{"rollout/uniform_groups": 3.0}), **solved)
    assert any("75% of the groups of job-1 had no signal (objective.signal = solved)" in f.sentence for f in half)


def test_held_out_that_falls_while_training_rises_is_a_problem():
    def evaluation(number: int, reward: float) -> EvaluationRecord:
        scores = {"reward_mean": reward, "reward_std": 0.3, "num_groups": 64, "policy_version": number}
        return EvaluationRecord(evaluation=number, state=EvaluationState.DONE, **scores)

    data = {"type": "jsonl", "path": "prompts.jsonl"}
    falls = [evaluation(number, reward) for number, reward in ((0, 0.3), (10, 0.6), (20, 0.4), (30, 0.38), (40, 0.35))]
    many = {"data": data, "num_prompts": 64}
    sentences = problems(find(learning(), falls, evaluation=many))
    assert "schedule.num_iterations = 10" in sentences["schedule.num_iterations"]
    stays = [evaluation(number, 0.6) for number in range(0, 50, 10)]
    assert problems(find(learning(), stays, evaluation=many)) == {}
    flat = [iteration(number, 0.5, **{"rollout/uniform_groups": 0.0}) for number in range(40)]
    assert problems(find(flat, falls, evaluation=many)) == {}  # both fall: that is another matter
    sets = [{"name": "few", "data": data, "num_prompts": 4}, {"name": "many", "data": data, "num_prompts": 60}]
    assert problems(find(learning(), falls, evaluation={"sets": sets})) == {}  # four prompts say little


def test_part_that_judges_only_some_responses_is_named() -> None:
    findings = find(learning(**{"reward/form_mixed_groups": 2.0, "reward/style_mixed_groups": 1.0}))
    (finding,) = [candidate for candidate in findings if "without an opinion" in candidate.sentence]
    assert "in the last 8 iterations of job-1" in finding.sentence
    assert "form (in 16 groups), style (in 8 groups)" in finding.sentence
    assert (finding.key, finding.is_problem) == ("reward", False)
    assert all("without an opinion" not in candidate.sentence for candidate in find(learning()))


# ---- several sources ---------------------------------------------------------------------------------------------

SOURCES = [{"type": "jsonl", "path": "a.jsonl", "name": name} for name in ("easy", "hard")]


def with_sources(
    uniform: dict[str, float], solved: dict[str, float], data: list[dict[str, Any]] = SOURCES
) -> list[Finding]:
    """Return the findings on a job whose sources have two groups in each iteration."""
    metrics = {"rollout/uniform_groups": 2.0} | {f"source/{name}/groups": 2.0 for name in uniform}
    metrics |= {f"source/{name}/uniform_groups": value for name, value in uniform.items()}
    metrics |= {f"source/{name}/solved_frac": value for name, value in solved.items()}
    return [finding for finding in find(learning(**metrics), data=data) if "source" in finding.sentence]


def test_source_that_is_all_solved_is_a_note() -> None:
    (note,) = with_sources({"easy": 2.0, "hard": 1.0}, {"easy": 1.0, "hard": 0.5})
    assert note.sentence.startswith(
        "in the last 8 iterations of job-1, all groups of source easy (equal rewards, solved 100%) taught nothing"
    )
    assert (note.key, note.is_problem) == ("data", False)
    assert with_sources({"easy": 1.0, "hard": 1.0}, {"easy": 1.0, "hard": 0.5}) == []


def test_source_with_its_own_signal_is_named_with_it() -> None:
    data = [SOURCES[0], SOURCES[1] | {"signal": "solved", "solved_at": 2.0}]
    (note,) = with_sources({"easy": 1.0, "hard": 2.0}, {"easy": 0.5, "hard": 0.0}, data)
    assert "source hard (no signal (data.signal = solved), solved 0%) taught nothing" in note.sentence


def test_job_without_signal_in_any_source_is_a_problem() -> None:
    data = [SOURCES[0], SOURCES[1] | {"signal": "solved", "solved_at": 2.0}]
    sentence = problems(find(course_of(8, **DULL), data=data))["data"]
    assert "learns nothing" in sentence
    assert "its groups had no signal (by the rule of their source)" in sentence
