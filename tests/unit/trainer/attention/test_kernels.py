"""Every kernel computes what the dense mask of the layout says, for random layouts and grouped heads."""

import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from services.trainer.__main__ import train
from services.trainer.attention import PLANNERS, build_layout, dense_mask, packed_attention, plan_attention
from services.trainer.attention.flex import plan_flex
from services.trainer.attention.npu import plan_npu
from services.trainer.attention.sdpa import plan_sdpa
from services.trainer.attention.short import MAX_KEYS, MAX_ROWS, ShortPlan, alike
from services.trainer.attention.tree import plan_tree
from services.trainer.episode import lay_out
from tests.trainer_episodes import make_episodes, random_turns

GROUPS = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(1, 7), min_size=1, max_size=5)), min_size=1, max_size=4
)
FORESTS = st.lists(  # groups whose responses may fork
    st.tuples(st.integers(1, 9), st.lists(st.one_of(random_turns(), st.integers(1, 7)), min_size=1, max_size=3)),
    min_size=1,
    max_size=3,
)
PREFIXES = st.integers(0, 6)
HEADS = st.sampled_from([(4, 4), (4, 2), (6, 2), (3, 1)])  # query heads, key/value heads
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")]
LONG = [(150, [3, 40, 1]), (5, [200, 7])]  # crosses blocks of FlexAttention
BEHIND_LONG = [(22, [3, 40, 1]), (1, [200, 7])]  # rows behind a prefix
LONG_TURNS = [(None, 0, 100, 60), (0, 130, 40, 70), (0, 160, 300, 20), (2, 400, 5, 40)]
LONG_FOREST = [(150, [3, LONG_TURNS, 40]), (5, [LONG_TURNS, LONG_TURNS, 7]), (40, [9])]
KERNELS = pytest.mark.parametrize(
    ("plan", "shapes"), [(plan_sdpa, GROUPS), (ShortPlan, GROUPS), (plan_tree, FORESTS), (plan_npu, FORESTS)]
)
LONG_ROWS = [
    *((plan, groups, length) for plan in (plan_sdpa, ShortPlan) for groups, length in ((LONG, 0), (BEHIND_LONG, 130))),
    *((plan, [(300, [310, 2, 1, 270, 5, 1, 9])], 0) for plan in (plan_sdpa, ShortPlan)),
    *((plan_tree, LONG_FOREST, length) for length in (0, 130)),
]


def behind_prefix(groups, length):
    """Return the groups behind a prefix of that length, with a tree where turns are given."""

    def laid_out(shape):
        return shape if isinstance(shape, int) else lay_out(make_episodes(shapes=[shape]).responses[0], 5)[1]

    rows = [(length + prompt, [laid_out(shape) for shape in shapes]) for prompt, shapes in groups]
    return build_layout(rows, prefix_length=length)


def random_inputs(layout, heads, dtype=torch.float64, size=8):
    generator = torch.Generator().manual_seed(layout.num_places)
    shapes = [(1, num_heads, layout.num_places, size) for num_heads in (heads[0], heads[1], heads[1])]
    return [torch.randn(shape, dtype=dtype, generator=generator).requires_grad_() for shape in shapes]


def by_dense_mask(layout, query, key, value):
    mask = dense_mask(layout)
    attended = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True)
    return attended.transpose(1, 2)


def attend(plan, inputs):
    output, _ = packed_attention(None, *inputs, None, 0.3, layout_plan=plan)
    assert output.flatten(2).data_ptr() == output.data_ptr(), "some models view it as [T, H * D]"
    return output


def outputs_and_gradients(output, inputs):
    weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).reshape(output.shape)
    return [output, *torch.autograd.grad((output * weights).sum(), inputs)]


def assert_equals_dense_mask(plan, layout, heads):
    inputs = random_inputs(layout, heads)
    computed = outputs_and_gradients(attend(plan, inputs), inputs)
    for left, right in zip(computed, outputs_and_gradients(by_dense_mask(layout, *inputs), inputs), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-11)


@KERNELS
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), PREFIXES, HEADS)
def test_kernels_and_their_gradients_equal_the_dense_mask(documented_npu, plan, shapes, data, prefix_length, heads):
    layout = behind_prefix(data.draw(shapes), prefix_length)
    assert_equals_dense_mask(plan(layout), layout, heads)


@pytest.mark.parametrize(("plan", "groups", "prefix_length"), LONG_ROWS)
def test_cpu_kernels_equal_the_dense_mask_on_long_rows(plan, groups, prefix_length):
    layout = behind_prefix(groups, prefix_length)
    assert_equals_dense_mask(plan(layout), layout, (6, 2))


@pytest.mark.parametrize(
    ("plan", "groups", "prefix_length"),
    [*LONG_ROWS, *((plan, [(4, [6, 9])] * 32, 20) for plan in (plan_sdpa, ShortPlan))],
)
def test_bfloat16_cpu_kernels_are_as_near_as_the_dense_mask(plan, groups, prefix_length):
    bound = 1.25 if prefix_length == 0 or plan is plan_tree else 1.4
    layout = behind_prefix(groups, prefix_length)
    plan = plan(layout)
    inputs = random_inputs(layout, (6, 2), torch.bfloat16, size=32)
    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in inputs]
    exact = outputs_and_gradients(by_dense_mask(layout, *exact_inputs), exact_inputs)
    dense = outputs_and_gradients(by_dense_mask(layout, *inputs), inputs)
    computed = outputs_and_gradients(attend(plan, inputs), inputs)
    for ours, reference, truth in zip(computed, dense, exact, strict=True):
        assert (ours - truth).abs().mean() <= bound * (reference - truth).abs().mean()


def test_only_rows_with_a_fork_take_the_kernel_for_trees():
    chain, fork = [(None, 0, 0, 3), (0, 3, 2, 4)], [(None, 0, 4, 3), (0, 2, 3, 2)]
    assert type(plan_attention(behind_prefix([(5, [chain, 3])], 0))).__name__ == "ShortPlan"
    assert type(plan_attention(behind_prefix([(5, [chain, 3]), (5, [fork])], 0))).__name__ == "TreePlan"


@pytest.mark.parametrize(
    ("groups", "prefix_length", "sizes"),
    [
        ([(9, [5, 5]), (9, [5, 4]), (8, [5, 5])], 0, [3]),
        ([(8, [1]), (8, [1])], 4, [1, 2]),
        ([(9, [5, 5]), (9, [50, 50]), (9, [50, 50])], 0, [1, 2]),
        ([(9, [5, 5]), (9, [5, 5, 5, 5, 5])], 0, [1, 1]),
        ([(1, [MAX_ROWS // 2])] * 5, 0, [2, 2, 1]),
    ],
    ids=["alike", "behind a prefix", "other lengths", "other numbers", "too many rows"],
)
def test_groups_go_together_where_padding_and_memory_allow(groups, prefix_length, sizes):
    assert [len(together) for together in alike(build_layout(groups, prefix_length=prefix_length))] == sizes


@settings(max_examples=30, deadline=None)
@given(FORESTS, PREFIXES, HEADS)
def test_flex_equals_the_dense_mask(groups, prefix_length, heads):
    assert_flex_equals_dense_mask(behind_prefix(groups, prefix_length), heads)


@pytest.mark.parametrize(("groups", "prefix_length"), [(LONG_FOREST, 0), (LONG_FOREST, 130), (BEHIND_LONG, 130)])
def test_flex_equals_the_dense_mask_over_several_blocks(groups, prefix_length):
    assert_flex_equals_dense_mask(behind_prefix(groups, prefix_length), (6, 2))


@torch.no_grad()
def assert_flex_equals_dense_mask(layout, heads):
    inputs = random_inputs(layout, heads, size=16)
    computed = attend(plan_flex(layout), inputs)
    torch.testing.assert_close(computed, by_dense_mask(layout, *inputs), rtol=0, atol=1e-11)


def test_flex_skips_blocks_in_which_nothing_is_visible():
    plan = plan_flex(build_layout([(128, [129, 129]), (128, [129])]))
    seen = plan.block_mask.to_dense()[0, 0].tolist()
    assert seen == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]


def npu_fusion_attention(query, key, value, head_num, input_layout, *, atten_mask, scale, sparse_mode, **lengths):
    """Compute in plain torch the attention that the documentation describes for layout TND and sparse_mode 3."""
    assert (input_layout, head_num, sparse_mode) == ("TND", query.shape[1], 3)
    assert torch.equal(atten_mask, torch.ones(2048, 2048).triu(1).bool())
    outputs, query_start, key_start = [], 0, 0
    for query_end, key_end in zip(lengths["actual_seq_qlen"], lengths["actual_seq_kvlen"], strict=True):
        q, k, v = query[query_start:query_end], key[key_start:key_end], value[key_start:key_end]
        visible = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))  # lower right corner
        q, k, v = (tensor.transpose(0, 1) for tensor in (q, k, v))
        attended = scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=True)
        outputs.append(attended.transpose(0, 1))
        query_start, key_start = query_end, key_end
    assert (query_start, key_start) == (len(query), len(key)), "the lengths cover everything"
    return torch.cat(outputs), None, None, None, 0, 0, 0


@pytest.fixture
def documented_npu(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu_fusion_attention=npu_fusion_attention))


def test_npu_refuses_more_sequences_than_the_kernel_takes(documented_npu):
    with pytest.raises(ValueError, match=r"1025 prompts and responses .* lower training.max_tokens_per_micro_batch"):
        plan_npu(build_layout([(1, [2] * 1024)]))


@pytest.mark.parametrize(("device", "kernel"), [("cpu", "ShortPlan"), ("cuda", "FlexPlan")])
def test_the_device_chooses_the_kernel(device, kernel):
    assert type(PLANNERS[device](build_layout([(2, [3])]))).__name__ == kernel


def test_trainer_attends_by_the_fused_kernel_on_an_npu(documented_npu, monkeypatch):
    monkeypatch.setitem(PLANNERS, "npu", None)
    monkeypatch.setattr("services.trainer.session.run_job", lambda *arguments: None)
    train(None, MagicMock(), None)
    assert PLANNERS["npu"] is plan_npu


@pytest.mark.parametrize("prefix_length", [0, 1])
@pytest.mark.parametrize(("num_keys", "kernel"), [(MAX_KEYS, "ShortPlan"), (MAX_KEYS + 1, "SdpaPlan")])
def test_the_longest_sequence_chooses_the_kernel_on_the_cpu(num_keys, kernel, prefix_length):
    layout = build_layout([(2, [3]), (num_keys - 10, [2, 11])], prefix_length=prefix_length)
    assert type(PLANNERS["cpu"](layout)).__name__ == kernel


def test_soft_capped_logits_are_refused():
    layout = build_layout([(2, [3])])
    with pytest.raises(ValueError, match="soft-capped"):
        packed_attention(None, *random_inputs(layout, (2, 2)), None, softcap=50.0, layout_plan=plan_attention(layout))
