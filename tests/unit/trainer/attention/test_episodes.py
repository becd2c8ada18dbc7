"""Episodes are trained as trees: what is packed once equals every path computed alone."""

import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onbeat.config import JobConfig
from onbeat.objectives.base import Logprobs, Responses
from onbeat.streams.codec import check_group
from services.trainer.attention import dense_mask
from services.trainer.batch import MIN_PREFIX, group_rewards, num_places, pack
from services.trainer.episode import num_leaves, turn_paths, turn_spans
from services.trainer.model.model import Passes, freeze_copy, response_logprobs, use_attention
from services.trainer.stats import IterationStats
from tests.trainer_episodes import MIXED, SHAPES, make_episodes, path_logprobs, paths_of, random_turns
from tests.trainer_fixtures import (
    gradients,
    job_config,
    make_group,
    model_of,
    moved_model,
    pass_rows,
    set_rollout_logprobs,
    tiny_model,
    train,
)
from tests.unit.trainer.attention.test_shared_prompt import ARCHITECTURES, behind, everything_in_float64  # noqa: F401
from tests.unit.trainer.test_signal import CASES, KINDS, config_of

CPU = torch.device("cpu")
EPISODES = st.lists(st.one_of(random_turns(), st.integers(1, 5)), min_size=1, max_size=4)


# ---- the tree --------------------------------------------------------------------------------------------------------


def assert_every_target_sees_its_path(batch, groups):
    """By the dense mask, in the order of positions."""
    mask, places = dense_mask(batch.layout), iter(batch.layout.logit_index.tolist())
    targets = iter(batch.target_ids.tolist())
    for group in groups:
        for before, sampled in paths_of(group):
            for index, token in enumerate(sampled):
                assert next(targets) == token
                seen = mask[place := next(places)].nonzero()[:, 0]
                assert batch.layout.position_ids[seen].tolist() == list(range(len(seen)))
                assert batch.token_ids[seen].tolist() == before + sampled[:index]
                assert seen[-1] == place
    assert next(places, None) is None


@settings(max_examples=150, deadline=None)
@given(EPISODES, EPISODES, st.integers(1, 5), st.sampled_from([0, MIN_PREFIX]))
def test_every_sampled_token_sees_its_path_and_nothing_else(first, second, prompt_length, prefix_length):
    groups = [make_episodes("0-0", prompt_length, first, is_unique=True), make_episodes("0-1", 3, second)]
    for group in groups:
        for response in group.responses:
            for turn in response.turns:
                turn.num_shared += prefix_length
    groups = behind(range(500, 500 + prefix_length), *groups)
    batch = pack(groups, CPU)
    assert batch.layout.prefix_length == prefix_length
    assert batch.response_lengths.tolist() == [len(r.token_ids) for group in groups for r in group.responses]
    assert_every_target_sees_its_path(batch, groups)


@settings(max_examples=150, deadline=None)
@given(EPISODES)
def test_only_a_token_that_something_follows_has_a_place(shapes):
    group = make_episodes(prompt_length=2, shapes=shapes, is_unique=True)
    batch = pack([group], CPU)
    wanted = {token for before, sampled in paths_of(group) for token in [*before, *sampled[:-1]]}
    assert sorted(batch.token_ids.tolist()) == sorted(wanted)
    assert num_places(group) == len(wanted)


@settings(max_examples=150, deadline=None)
@given(EPISODES)
def test_segments_end_only_where_places_fork(shapes):
    layout = pack([make_episodes(shapes=shapes)], CPU).layout
    for tree in layout.groups[0].trees:
        assert all(parent < index for index, parent in enumerate(tree.parents)), "in pre-order"
        assert all(tree.lengths) or tree.lengths == (0,)
        assert all(tree.parents.count(parent) > 1 for parent in tree.parents if parent >= 0)


@pytest.mark.parametrize(
    ("shape", "lengths", "parents", "predictors"),
    [
        ("one turn", (3,), (-1,), [-1, 0, 1, 2]),
        ("chain", (13,), (-1,), [-1, 0, 1, 4, 5, 6, 7, 11, 12]),
        ("fork at the prompt's end", (2, 5), (-1, -1), [-1, 0, 1, 3, 4, 5, 6]),
        ("fork in an observation", (2, 4, 4), (-1, 0, 0), [3, 4, 5, 8, 9]),
        ("fork in a sampled run", (2, 2, 6), (-1, 0, 0), [-1, 0, 1, 2, 3, 6, 7, 8, 9]),
        ("siblings behind one token", (5, 1, 3), (-1, 0, 0), [1, 2, 3, 4, 5, 4, 6, 7, 8, 4]),
        ("one token each", (1,), (-1,), [-1, -1, 0]),
        ("extended after a fork", (2, 5, 1), (-1, 0, 0), [0, 1, 2, 1, 7, 5, 6]),
    ],
)
def test_segments_worked_by_hand(shape, lengths, parents, predictors):
    (tree,) = pack([make_episodes(shapes=[SHAPES[shape]])], CPU).layout.groups[0].trees
    assert (tree.lengths, tree.parents, tree.predictors.tolist()) == (lengths, parents, predictors)


@settings(max_examples=60, deadline=None)
@given(EPISODES)
def test_turns_have_the_paths_that_the_contract_says(shapes):
    group = make_episodes(shapes=shapes)
    found = [path for response in group.responses for path in turn_paths(response, list(group.prompt_token_ids))]
    assert found == paths_of(group)


def test_an_episode_of_one_turn_is_a_response_to_the_bit():
    plain = make_group("0-0", 5, (3, 1, 4))
    episodes = make_group("0-0", 5, (3, 1, 4))
    for response in episodes.responses:
        response.turns.add(num_shared=5, num_sampled=len(response.token_ids))
    found, expected = (pack([group], CPU) for group in (episodes, plain))
    assert torch.equal(found.token_ids, expected.token_ids)
    assert torch.equal(found.layout.logit_index, expected.layout.logit_index)
    assert torch.equal(found.layout.position_ids, expected.layout.position_ids)
    assert found.layout.segments == expected.layout.segments


def test_a_thousand_turns_need_no_recursion():
    deep = [(None, 0, 0, 2), *((index, index + 1, 0, 2) for index in range(1000))]
    group = make_episodes(shapes=[deep])
    spans = turn_spans(group.responses[0], 5)
    assert num_leaves(spans) == 1001
    assert num_places(group) == len(pack([group], CPU).token_ids)


# ---- log-probabilities and gradients ---------------------------------------------------------------------------------

PASSES = {
    "packed": Passes(),
    "padded rows": Passes("sdpa"),
    "rows by length": Passes("sdpa", is_padded=False),
    "another head": Passes(has_plain_head=False),
}


def model_for(passes, dtype=torch.float64, architecture="qwen3"):
    model = tiny_model(ARCHITECTURES[architecture](), dtype)
    use_attention(model, passes.attention)
    model.passes = replace(passes, has_plain_head=passes.has_plain_head and model.passes.has_plain_head)
    return model


def two_groups(shapes, prefix_length=0):
    groups = [make_episodes("0-0", 5 + prefix_length, shapes), make_episodes("0-1", 2 + prefix_length, shapes, seed=1)]
    for group in groups:
        group.prompt_token_ids[:prefix_length] = [3] * prefix_length
    return groups


@pytest.mark.parametrize("prefix_length", [0, MIN_PREFIX + 1])
@pytest.mark.parametrize("passes", PASSES)
def test_trees_equal_one_path_at_a_time(passes, prefix_length, everything_in_float64):  # noqa: F811
    groups = two_groups(MIXED, prefix_length)
    assert pack(groups, CPU).layout.prefix_length == prefix_length
    assert_equals_paths(groups, PASSES[passes])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_trees_of_every_architecture(architecture, everything_in_float64):  # noqa: F811
    assert_equals_paths(two_groups(MIXED), Passes(), architecture)


def assert_equals_paths(groups, passes, architecture="qwen3"):
    batch = pack(groups, CPU)
    model, plain = model_for(passes, architecture=architecture), model_for(Passes("sdpa"), architecture=architecture)
    found, expected = response_logprobs(model, batch, 0.7)[0], path_logprobs(plain, groups, 0.7)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    wanted = gradients(plain, expected)
    for name, gradient in gradients(model, found).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=0, atol=1e-8, msg=name)


def test_trees_in_float32():
    groups = two_groups(MIXED, MIN_PREFIX)
    model, plain = (model_for(passes, torch.float32) for passes in (Passes(), Passes("sdpa")))
    found, expected = response_logprobs(model, pack(groups, CPU), 1.0)[0], path_logprobs(plain, groups)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    wanted = gradients(plain, expected)
    for name, gradient in gradients(model, found).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-3 * wanted[name].abs().max().item())


@pytest.mark.parametrize("shapes", [MIXED, [3, 1, 4, 6]], ids=["trees", "responses"])
def test_packed_rows_in_bfloat16_stay_within_its_noise(shapes):
    groups = two_groups(shapes)
    found, _ = response_logprobs(model_for(Passes(), torch.bfloat16), pack(groups, CPU), 1.0)
    exact = path_logprobs(model_for(Passes("sdpa")), groups).float()
    plain = path_logprobs(model_for(Passes("sdpa"), torch.bfloat16), groups).float()
    assert (found - exact).abs().mean() < 2 * (plain - exact).abs().mean() + 1e-3


# ---- objectives ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def groups():
    """Rollout logprobs lie around the old policy's, on both sides of the band."""
    rng = random.Random(0)
    names = list(SHAPES)
    shapes = [[SHAPES[name] for name in names[first : first + 3]] for first in (0, 3, 6)]
    found = [
        make_episodes(f"0-{index}", 3 + index, [*three, 4], rewards=[0.0, 1.0, 0.25, 0.5])
        for index, three in enumerate(shapes)
    ]
    logprobs = path_logprobs(moved_model(1), found)
    set_rollout_logprobs(found, logprobs + torch.tensor([rng.uniform(-0.4, 0.4) for _ in logprobs]))
    return found


@pytest.fixture(scope="module")
def by_paths(groups):
    """The policy, and the logprobs of it, of the old one and of the reference, one path at a time."""
    policy = moved_model(0)
    with torch.no_grad():
        others = [path_logprobs(moved_model(seed), groups) for seed in (1, 2)]
    return policy, Logprobs(path_logprobs(policy, groups), *others)


def as_objectives_take_them(groups):
    """All groups' responses without a row: what the objective is defined on."""
    responses = [response for group in groups for response in group.responses]
    return Responses(
        rollout_logprobs=torch.tensor([each for response in responses for each in response.rollout_logprobs]),
        response_lengths=torch.tensor([len(response.token_ids) for response in responses]),
        group_rewards=[group_rewards(group) for group in groups],
        members=[torch.arange(len(group.responses)) for group in groups],
    )


def gradient_by_paths(config, by_paths, groups, scale):
    policy, logprobs = by_paths
    if not config.objective.needs_reference:
        logprobs = replace(logprobs, ref=None)
    batch = as_objectives_take_them(groups)
    if config.objective.type == "online_dpo":  # it trains two responses of each group
        batch, logprobs = of_pairs(config, batch, logprobs)
    loss = config.objective.loss(batch, logprobs, scale)
    names, parameters = zip(*policy.named_parameters(), strict=True)
    found = torch.autograd.grad(loss.loss_sum, parameters, retain_graph=True)
    return dict(zip(names, found, strict=True)), loss.num_rejected_tokens


def of_pairs(config, batch, logprobs):
    """Keep the responses that the objective trains."""
    members = [torch.tensor(config.objective.trained_members(rewards)) for rewards in batch.group_rewards]
    sizes = [len(rewards) for rewards in batch.group_rewards]
    first = [sum(sizes[:index]) for index in range(len(sizes))]
    kept = torch.cat([here + start for here, start in zip(members, first, strict=True)])
    tokens = torch.arange(len(logprobs.old)).split(batch.response_lengths.tolist())
    index = torch.cat([tokens[response] for response in kept.tolist()])
    lengths = batch.response_lengths[kept]
    batch = Responses(batch.rollout_logprobs[index], lengths, batch.group_rewards, members)
    return batch, Logprobs(
        *(each if each is None else each[index] for each in (logprobs.trainer, logprobs.old, logprobs.ref))
    )


def gradient_by_rows(config, models, groups, scale):
    passes = list(pass_rows(config, models, groups, scale))
    gradients = {name: parameter.grad for name, parameter in models[0].named_parameters()}
    num_parts = sum(len(batch.members) for batch, *_ in passes)
    return gradients, sum(loss.num_rejected_tokens for _, _, loss, _ in passes), num_parts


@pytest.mark.parametrize(
    ("kind", "extra", "budget"),
    [(*case, 30) for case in CASES] + [(*case, 4096) for case in CASES if case[1] == "plain"],
)
def test_every_objective_counts_each_sampled_token_once(kind, extra, budget, models, by_paths, groups):
    config = config_of(kind, extra, training={"max_tokens_per_micro_batch": budget})
    scale = config.objective.iteration_scale([group_rewards(group) for group in groups])
    expected, expected_rejected = gradient_by_paths(config, by_paths, groups, scale)
    arrived = [groups[2], groups[0], groups[1]]
    found, rejected, num_parts = gradient_by_rows(config, models, arrived, scale)
    assert rejected == expected_rejected
    is_split = num_parts > len(groups)
    assert is_split == (budget == 30 and not config.objective.needs_whole_group)
    assert max(value.abs().max().item() for value in expected.values()) > 1e-3
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-4)  # norms and softmax are float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_objectives_on_trees_are_as_exact_as_on_paths(kind, dtype, by_paths, groups):
    """As exact as one path at a time in the same dtype, up to twice its rounding."""
    config = config_of(kind, "plain")
    scale = config.objective.iteration_scale([group_rewards(group) for group in groups])
    exact, _ = gradient_by_paths(config, by_paths, groups, scale)
    policy, *others = (moved_model(seed).to(dtype) for seed in range(3))
    found, *_ = gradient_by_rows(config, (policy, *map(freeze_copy, others)), groups, scale)
    gap = distance(found, exact)
    with torch.no_grad():
        logprobs = [path_logprobs(model, groups) for model in others]
    policy.zero_grad()
    plain, _ = gradient_by_paths(config, (policy, Logprobs(path_logprobs(policy, groups), *logprobs)), groups, scale)
    assert gap < max(2 * distance(plain, exact), 1e-6)
    assert gap < {torch.float32: 1e-5, torch.bfloat16: 0.8}[dtype], "GSPO's narrow clip flips tokens in bfloat16"


def distance(gradient, exact):
    """Return the length of the difference as a share of the exact gradient's."""
    gaps = [(gradient[name].double() - value).norm() ** 2 for name, value in exact.items()]
    return float((sum(gaps) / sum(value.norm() ** 2 for value in exact.values())) ** 0.5)


# ---- the loop --------------------------------------------------------------------------------------------------------


def episodes_config(**sections) -> JobConfig:
    rollout = {"num_prompts_per_iteration": 3, "num_samples_per_prompt": 3}
    return job_config(
        **{"rollout": rollout, "schedule": {"num_iterations": 2}, "optimizer": {"max_grad_norm": 1e9}} | sections
    )


def iterations(num_iterations=2):
    shapes, rng = list(SHAPES.values()), random.Random(0)
    return [
        make_episodes(f"{t}-{index}", rng.randrange(2, 7), [*rng.sample(shapes, 2), rng.randrange(1, 6)], version=t)
        for t in range(num_iterations)
        for index in range(3)
    ]


# Adam's step is as long for a gradient that is only rounding as for a large one, unless eps exceeds the rounding.
# Clipping, which would shrink the gradients below that eps, is off.
ADAM = {"eps": 1e-3, "max_grad_norm": 1e9}


@pytest.mark.parametrize(
    "sections", [{}, {"lora": {"rank": 4}}, {"gac": {"mode": "control"}}], ids=["full", "lora", "gac"]
)
@pytest.mark.parametrize("budget", [4096, 25])
def test_training_on_trees_is_training_on_their_paths(sections, budget, tmp_path):
    sections = sections | {"optimizer": ADAM}
    plain, before = model_of(episodes_config(**sections)), model_of(episodes_config(**sections))
    use_attention(plain, "sdpa")
    expected, _ = train(episodes_config(**sections), iterations(), tmp_path / "paths", plain)
    groups = iterations()
    random.Random(budget).shuffle(groups)
    training = {"max_tokens_per_micro_batch": budget}
    found, job = train(episodes_config(training=training, **sections), groups, tmp_path / "trees")
    assert [commit[0] for commit in job.commits] == [0, 1]
    trained = [name for name, parameter in expected.named_parameters() if parameter.requires_grad]
    assert all("lora" in name for name in trained) == ("lora" in sections)
    for name, right in expected.named_parameters():
        torch.testing.assert_close(found.get_parameter(name), right, rtol=1e-4, atol=1e-4)
        moved_by = (right - before.get_parameter(name)).abs().max().item()
        assert (moved_by > 1e-3) == (name in trained)


def test_metrics_are_means_over_episodes():
    stats, other = IterationStats(0), IterationStats(0)
    group = make_episodes(shapes=[SHAPES["several levels"], SHAPES["chain"], 2])
    group.failed_episodes["timeout"] = 2
    group.failed_episodes["crashed"] = 1
    for response in group.responses:
        for turn in response.turns:
            turn.num_cached_tokens = 4
    stats.add_group(group, True)
    other.add_group(make_episodes("0-1", shapes=[SHAPES["one turn"], 2, 2]), True)
    stats.merge([stats.to_bytes(), other.to_bytes()])
    report = stats.report(num_replicas=2)
    found = {name: value for name, value in report.items() if "episode" in name}
    assert found == {
        "episode/turns_mean": 10 / 3,
        "episode/forks_mean": 1.0,
        "episode/observed_tokens": 11 / 3,
        "episode/environment_s": 20 / 3,
        "episode/generate_s": 5 / 3,
        "episode/cached_frac": 7 * 4 / 91,
        "episode/failed": 3,
        "episode/failed_timeout": 2,
        "episode/failed_crashed": 1,
    }
    assert report["response_tokens"] == 16 + 9 + 4 + 2 * 3, "what was sampled"


@pytest.mark.parametrize("name", ["waited_s", "generate_s"])
@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
def test_a_turn_of_impossible_duration_is_refused(name, seconds):
    group = make_episodes()
    check_group(group)
    setattr(group.responses[1].turns[2], name, seconds)
    with pytest.raises(ValueError, match=f"group 0-0: its {name} is {seconds}, not seconds from 0"):
        check_group(group)


def test_responses_without_turns_report_no_episodes():
    stats = IterationStats(0)
    stats.add_group(make_group(), True)
    assert not any("episode" in name for name in stats.report())
