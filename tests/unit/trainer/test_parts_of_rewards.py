"""GDPO, `objective.advantages_from`: each part is normalised by itself, against plain loops over floats."""

import math
import random
import statistics

import pytest
import torch
from pydantic import ValidationError

from onbeat.config import JobConfig
from onbeat.objectives.base import Logprobs
from onbeat.objectives.base.gdpo import add_parts
from services.trainer.batch import cost, pack
from tests.trainer_fixtures import gap, job_config, make_group, model_of, train

WEIGHTS = {"right": 1.0, "form": 0.01, "short": -0.5}
KINDS = ["grpo", "dapo", "gspo", "cispo"]
CPU = torch.device("cpu")


def config_of(kind="grpo", advantages_from="parts", mode="periodic", rewards=None, signal="reward", **sections):
    job = job_config(schedule={"mode": mode, "num_iterations": 1}, **sections).model_dump(mode="json")
    several = [{"name": "exact", "part": part, "weight": weight} for part, weight in WEIGHTS.items()]
    job["reward"] = several if rewards is None else rewards
    job["objective"] = {"type": kind, "advantages_from": advantages_from, "signal": signal}
    job["objective"] |= sections.get("objective", {})
    return JobConfig.model_validate(job)


def group_of(index, parts):
    """Build a group of the parts of each response, as a rollout weighs them; None is no opinion."""
    group = make_group(f"0-{index}", 4 + index, (3, 1 + index, 4), rewards=[0.0] * 3)
    for response, values in zip(group.responses, parts, strict=True):
        given = {name: value for name, value in values.items() if value is not None}
        response.reward_parts.update(given)
        response.reward = math.fsum(WEIGHTS[name] * value for name, value in given.items())
        response.has_no_reward = not given
    return group


def response_of(right, form, short):
    return {"right": right, "form": form, "short": short}


GROUPS = [
    [response_of(1.0, 0.0, 3.0), response_of(0.0, 1.0, 5.0), response_of(0.0, 0.0, 4.0)],
    [response_of(1.0, 0.5, 2.0), response_of(1.0, 0.25, 2.0), response_of(1.0, 0.0, 2.0)],  # two parts are equal
    [response_of(1.0, None, 2.0), response_of(0.0, 0.5, None), response_of(0.5, 1.0, 4.0)],
    [response_of(None, None, None), response_of(0.0, 0.5, 1.0), response_of(1.0, 0.5, 3.0)],
    [response_of(1.0, 0.0, 0.0), response_of(0.0, 0.0, -2.0), response_of(0.5, 0.0, -1.0)],  # equal totals
]


def advantages_by_loop(parts):
    """Return the advantages of a group by the formulas of the module, in float64; 0 without a reward."""
    totals = [math.fsum(WEIGHTS[name] * value for name, value in one.items() if value is not None) for one in parts]
    has_reward = [any(value is not None for value in one.values()) for one in parts]
    advantages = [0.0] * len(parts)
    if len({total for total, is_rewarded in zip(totals, has_reward, strict=True) if is_rewarded}) < 2:
        return advantages
    for name, weight in WEIGHTS.items():
        given = [one[name] for one in parts if one[name] is not None]
        if len(set(given)) > 1:
            mean, scale = statistics.fmean(given), statistics.stdev(given) + 1e-4
            for index, one in enumerate(parts):
                advantages[index] += 0.0 if one[name] is None else weight * (one[name] - mean) / scale
    return advantages


def scale_by_loop():
    squares = [
        advantage**2
        for parts in GROUPS
        for one, advantage in zip(parts, advantages_by_loop(parts), strict=True)
        if any(value is not None for value in one.values())
    ]
    return math.sqrt(statistics.fmean(squares)) + 1e-8


def advantages_of(config, group, scale=1.0):
    batch = pack([group], CPU, config=config)
    logprobs = torch.zeros(len(batch.target_ids), dtype=torch.float64)
    return config.objective.loss(batch, Logprobs(logprobs, logprobs, None), scale).advantages.tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", range(len(GROUPS)))
def test_advantages_equal_the_plain_loop(kind, index):
    advantages = advantages_of(config_of(kind), group_of(index, GROUPS[index]))
    assert advantages == pytest.approx(advantages_by_loop(GROUPS[index]), rel=1e-5, abs=1e-6)


def test_many_parts_equal_the_loop_in_float64():
    rng = random.Random(0)
    for _ in range(50):
        parts = [response_of(*(rng.choice([None, 0.0, 1.0, rng.random()]) for _ in WEIGHTS)) for _ in range(6)]
        values = [[math.nan if one[name] is None else one[name] for one in parts] for name in WEIGHTS]
        totals = [
            math.fsum(WEIGHTS[name] * value for name, value in one.items() if value is not None)
            if any(value is not None for value in one.values())
            else math.nan
            for one in parts
        ]
        tensors = [torch.tensor(rows, dtype=torch.float64) for rows in (totals, values, list(WEIGHTS.values()))]
        advantages = add_parts(*tensors).nan_to_num(0.0).tolist()
        assert advantages == pytest.approx(advantages_by_loop(parts), rel=1e-12, abs=1e-12)


def test_equal_parts_add_exact_zeros():
    only_form = advantages_of(config_of(), group_of(1, GROUPS[1]))
    assert only_form[1] == 0.0  # the middle of the only part that differs
    assert only_form[0] == -only_form[2] == pytest.approx(WEIGHTS["form"], rel=1e-3)


@pytest.mark.parametrize("advantages_from", ["parts", "scaled_parts"])
def test_group_of_equal_totals_has_no_signal(advantages_from):
    config = config_of(advantages_from=advantages_from, mode="sync")
    group = group_of(4, GROUPS[4])
    assert (advantages_of(config, group), cost(group, config)) == ([0.0] * 3, 0)


def test_signal_says_in_which_groups_parts_teach():
    config = config_of(signal="part:right")
    shown = [advantages_of(config, group) for group in groups_of_iteration()]
    assert shown[1] == [0.0] * 3  # right in each response, so that form may not teach
    right, short = (1.0, 0.0, 0.5), (0.0, -2.0, -1.0)  # parts of the last group, whose totals are equal
    deviations = [statistics.stdev(part) + 1e-4 for part in (right, short)]
    expected = [
        (a - 0.5) / deviations[0] + WEIGHTS["short"] * (b + 1.0) / deviations[1]
        for a, b in zip(right, short, strict=True)
    ]
    assert shown[4] == pytest.approx(expected, rel=1e-5)
    assert max(map(abs, shown[4])) > 0.4


def groups_of_iteration():
    return [group_of(index, parts) for index, parts in enumerate(GROUPS)]


def test_parts_train_the_same_in_periodic_and_sync(tmp_path):
    rollout = {"num_prompts_per_iteration": len(GROUPS)}
    expected, _ = train(config_of(mode="sync", rollout=rollout), groups_of_iteration(), tmp_path / "a", arrivals=5)
    config = config_of(rollout=rollout)
    trained, job = train(config, groups_of_iteration()[::-1], tmp_path / "b")
    assert gap(trained, model_of(config)).max() > 1e-3
    assert gap(trained, expected).max() < 1e-3
    (advantages,) = job.advantages
    assert advantages["0-0"] == pytest.approx(advantages_by_loop(GROUPS[0]), abs=1e-4)
    assert advantages["0-3"][0] is None


def test_scaled_parts_are_divided_by_their_size_in_the_iteration(tmp_path):
    config = config_of(advantages_from="scaled_parts", mode="sync", rollout={"num_prompts_per_iteration": len(GROUPS)})
    _, job = train(config, groups_of_iteration(), tmp_path)
    (advantages,) = job.advantages
    for index in range(3):
        wanted = [advantage / scale_by_loop() for advantage in advantages_by_loop(GROUPS[index])]
        assert advantages[f"0-{index}"] == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"kind": "dr_grpo"}, "objective.advantages_from: dr_grpo has advantages of its own, not from parts; use"),
        ({"kind": "reinforce_pp", "mode": "sync"}, "reinforce_pp has advantages of its own"),
        ({"kind": "rloo"}, "advantages_from"),
        ({"kind": "online_dpo"}, "advantages_from"),
        ({"rewards": {"name": "exact"}}, "objective.advantages_from: parts needs several rewards"),
        ({"advantages_from": "scaled_parts"}, "scaled_parts needs statistics of the whole iteration and cannot run in"),
        ({"advantages_from": "scaled_parts", "mode": "bounded"}, "cannot run in bounded; use 'parts', or"),
        ({"rollout": {"truncated": "zero"}}, "rollout.truncated = 'zero' sets their sum"),
        ({"objective": {"kl": {"coef": 0.1, "placement": "reward"}}}, "a penalty in the reward is none of its parts"),
        ({"advantages_from": "part"}, "Input should be 'reward', 'parts' or 'scaled_parts'"),
    ],
)
def test_what_does_not_go_with_parts_is_refused(job, message):
    with pytest.raises(ValidationError, match=message):
        config_of(**job)
