"""Episodes are trained as trees: what is packed once equals every path computed alone."""

import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from onbeat.config import JobConfig
from onbeat.objectives import BUILT_IN
from onbeat.streams.codec import check_group
from services.trainer.attention import dense_mask
from services.trainer.batch import MIN_PREFIX, num_places, pack
from services.trainer.episode import num_leaves, turn_paths, turn_spans
from services.trainer.model.model import Passes, response_logprobs, use_attention
from services.trainer.stats import IterationStats
from tests.trainer_episodes import MIXED, SHAPES, make_episodes, path_logprobs, paths_of, random_turns
from tests.trainer_fixtures import REWARDED, gradients, job_config, make_group, model_of, tiny_config, tiny_model, train

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
EPISODES = st.lists(st.one_of(random_turns(), st.integers(1, 5)), min_size=1, max_size=4)


# ---- the tree --------------------------------------------------------------------------------------------------------


def behind(prefix, *groups):
    """Return the groups with that text before their prompts."""
    for group in groups:
        group.prompt_token_ids[:] = [*prefix, *group.prompt_token_ids]
        for turn in (turn for response in group.responses for turn in response.turns):
            turn.num_shared += len(prefix)
    return list(groups)


@settings(max_examples=150, deadline=None)
@given(EPISODES, EPISODES, st.integers(1, 5), st.sampled_from([0, MIN_PREFIX]))
def test_every_sampled_token_sees_its_path_and_nothing_else(first, second, prompt_length, prefix_length):
    def assert_every_target_sees_its_path(batch, groups):
        """Assert, in the order of positions, that the dense mask shows every target its path."""
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

    groups = [make_episodes("0-0", prompt_length, first, is_unique=True), make_episodes("0-1", 3, second)]
    batch = pack(behind(range(500, 500 + prefix_length), *groups), CPU)
    assert batch.layout.prefix_length == prefix_length
    assert batch.response_lengths.tolist() == [len(r.token_ids) for group in groups for r in group.responses]
    assert_every_target_sees_its_path(batch, groups)


@settings(max_examples=150, deadline=None)
@given(EPISODES)
def test_only_a_token_that_something_follows_has_a_place(shapes):
    group = make_episodes(prompt_length=2, shapes=shapes, is_unique=True)
    batch = pack([group], CPU)
    for tree in batch.layout.groups[0].trees:
        assert all(parent < index for index, parent in enumerate(tree.parents)), "in pre-order"
        assert all(tree.lengths) or tree.lengths == (0,)
        assert all(tree.parents.count(parent) > 1 for parent in tree.parents if parent >= 0), "ends only where it forks"
    wanted = {token for before, sampled in paths_of(group) for token in [*before, *sampled[:-1]]}
    assert sorted(batch.token_ids.tolist()) == sorted(wanted)
    assert num_places(group) == len(wanted)


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
    paths = [path for response in group.responses for path in turn_paths(response, list(group.prompt_token_ids))]
    assert paths == paths_of(group)


def test_an_episode_of_one_turn_is_a_response_to_the_bit():
    plain = make_group("0-0", 5, (3, 1, 4))
    episodes = make_group("0-0", 5, (3, 1, 4))
    for response in episodes.responses:
        response.turns.add(num_shared=5, num_sampled=len(response.token_ids))
    packed, expected = (pack([group], CPU) for group in (episodes, plain))
    assert torch.equal(packed.token_ids, expected.token_ids)
    assert torch.equal(packed.layout.logit_index, expected.layout.logit_index)
    assert torch.equal(packed.layout.position_ids, expected.layout.position_ids)
    assert packed.layout.segments == expected.layout.segments


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
ARCHITECTURES = {
    "llama-gqa-tied": lambda: tiny_config(LlamaConfig),
    "llama-mha-untied": lambda: tiny_config(LlamaConfig, num_key_value_heads=4, tie_word_embeddings=False),
    "qwen2": lambda: tiny_config(Qwen2Config),
    "qwen3": lambda: tiny_config(Qwen3Config, head_dim=8),
    "gemma2-softcapped": lambda: tiny_config(
        Gemma2Config, head_dim=8, sliding_window=256, layer_types=["full_attention"] * 2, attn_logit_softcapping=None
    ),
    "mistral": lambda: tiny_config(MistralConfig, sliding_window=None),
}


@pytest.fixture
def everything_in_float64(monkeypatch):
    """Models compute norms and softmaxes in float32 whatever their dtype; here even those stay in float64."""
    convert = torch.Tensor.to

    def to(self, *args, **kwargs):
        is_narrowing = self.dtype == torch.float64 and torch.float32 in (*args, *kwargs.values())
        return self if is_narrowing else convert(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def model_for(passes, architecture="qwen3"):
    model = tiny_model(ARCHITECTURES[architecture]())
    use_attention(model, passes.attention)
    model.passes = replace(passes, has_plain_head=passes.has_plain_head and model.passes.has_plain_head)
    return model


@pytest.mark.parametrize(
    ("prompts", "shapes"),
    [
        pytest.param([5, 2], MIXED, id="episodes"),
        pytest.param([5, 2, 7], [3, 1, 4, 6], id="responses"),
    ],
)
@pytest.mark.parametrize("prefix_length", [0, MIN_PREFIX + 1])
@pytest.mark.parametrize(
    ("passes", "architecture"),
    [*((name, "qwen3") for name in PASSES if name != "packed"), *(("packed", name) for name in ARCHITECTURES)],
)
def test_packed_rows_equal_one_path_at_a_time(
    passes, architecture, prefix_length, prompts, shapes, everything_in_float64
):
    groups = [make_episodes(f"0-{index}", length, shapes, seed=index) for index, length in enumerate(prompts)]
    batch = pack(behind([3] * prefix_length, *groups), CPU)
    assert batch.layout.prefix_length == prefix_length
    model, plain = (model_for(choice, architecture) for choice in (PASSES[passes], Passes("sdpa")))
    computed, expected = response_logprobs(model, batch, 0.7)[0], path_logprobs(plain, groups, 0.7)
    torch.testing.assert_close(computed, expected, rtol=0, atol=1e-9)
    wanted = gradients(plain, expected)
    for name, gradient in gradients(model, computed).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=0, atol=1e-8, msg=name)


@pytest.mark.parametrize("shapes", [MIXED, [3, 1, 4, 6]], ids=["trees", "responses"])
def test_packed_rows_in_bfloat16_stay_within_its_noise(shapes):
    groups = [make_episodes(f"0-{index}", length, shapes, seed=index) for index, length in enumerate((5, 2))]
    computed, _ = response_logprobs(model_for(Passes()).bfloat16(), pack(groups, CPU), 1.0)
    exact = path_logprobs(model_for(Passes("sdpa")), groups).float()
    plain = path_logprobs(model_for(Passes("sdpa")).bfloat16(), groups).float()
    assert (computed - exact).abs().mean() < 2 * (plain - exact).abs().mean() + 1e-3


# ---- the loop --------------------------------------------------------------------------------------------------------


SECTIONS = {
    "lora": {"lora": {"rank": 4}},
    "gac": {"gac": {"mode": "control"}},
    "kl in the loss": {"objective": {"kl": {"coef": 0.3}}},
    "kl in the reward": {"objective": {"kl": {"coef": 0.3, "placement": "reward"}}},
    "band": {"objective": {"importance": {"type": "band", "low": 1e-3}}},
    **{kind: {"objective": {"type": kind}, "mode": BUILT_IN[kind].modes[0]} for kind in REWARDED},
}


@pytest.mark.parametrize("sections", SECTIONS.values(), ids=SECTIONS)
@pytest.mark.parametrize("budget", [4096, 25])
def test_training_on_trees_is_training_on_their_paths(sections, budget, tmp_path):
    def iterations():
        shapes, rng = list(SHAPES.values()), random.Random(0)
        return [
            make_episodes(f"{t}-{index}", rng.randrange(2, 7), [*rng.sample(shapes, 2), rng.randrange(1, 6)], version=t)
            for t in range(2)
            for index in range(3)
        ]

    # Adam's step is as long for a gradient that is only rounding as for a large one, unless eps exceeds the rounding.
    # Clipping, which would shrink the gradients below that eps, is off.
    adam = {"eps": 1e-3, "max_grad_norm": 1e9}

    def episodes_config(mode="periodic", **sections) -> JobConfig:
        rollout = {"num_prompts_per_iteration": 3, "num_samples_per_prompt": 3}
        return job_config(rollout=rollout, schedule={"mode": mode, "num_iterations": 2}, optimizer=adam, **sections)

    plain, before = model_of(episodes_config(**sections)), model_of(episodes_config(**sections))
    use_attention(plain, "sdpa")
    expected, _ = train(episodes_config(**sections), iterations(), tmp_path / "paths", plain)
    groups = iterations()
    random.Random(budget).shuffle(groups)
    config = episodes_config(training={"max_tokens_per_micro_batch": budget}, **sections)
    model, job = train(config, groups, tmp_path / "trees")
    assert job.iterations == [0, 1]
    is_split = job.reports[0]["train/passes"] > len(groups) // 2
    assert is_split == (budget == 25 and not config.objective.needs_whole_group)
    trained = [name for name, parameter in expected.named_parameters() if parameter.requires_grad]
    assert all("lora" in name for name in trained) == ("lora" in sections)
    for name, right in expected.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), right, rtol=1e-4, atol=1e-4)
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
    figures = {name: value for name, value in report.items() if "episode" in name}
    assert figures == {
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
    responses = IterationStats(0)
    responses.add_group(make_group(), True)
    assert not any("episode" in name for name in responses.report()), "without turns they are none"


@pytest.mark.parametrize("name", ["waited_s", "generate_s"])
@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
def test_a_turn_of_impossible_duration_is_refused(name, seconds):
    group = make_episodes()
    check_group(group)
    setattr(group.responses[1].turns[2], name, seconds)
    with pytest.raises(ValueError, match=f"group 0-0: its {name} is {seconds}, not seconds from 0"):
        check_group(group)
