"""FlexAttention stays compiled from job to job. Only the compiler's first half runs here: its kernels need a GPU."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from services.trainer.attention import PLANNERS, flex
from services.trainer.attention.flex import BLOCK, compiled, forget_compiled, plan_flex
from services.trainer.batch import pack
from services.trainer.model.model import response_logprobs
from services.trainer.passes.warm_up import warm_up
from tests.trainer_fixtures import make_group, moved_model

pytestmark = pytest.mark.rare

MODELS = [(4, 2, 16), (6, 2, 16), (4, 4, 32), (3, 1, 16)]  # query heads, key/value heads, head size
NUM_BLOCKS = (2, 3)  # the first length has a kernel of its own, the second gets one for all lengths


def only_capture(graph, inputs):
    return graph.forward


def attend_at_all_lengths(num_heads, num_keys, size):
    """Attend as a job does: rows of several lengths, with gradient for the policy and without for its reference."""
    attend = compiled(flex_attention, only_capture)
    for length in (BLOCK * blocks for blocks in NUM_BLOCKS):
        mask = create_block_mask(lambda b, h, query, key: key <= query, None, None, length, length, "cpu", BLOCK)
        tensors = [torch.randn(1, heads, length, size) for heads in (num_heads, num_keys, num_keys)]
        for has_gradient in (True, False):
            with torch.set_grad_enabled(has_gradient):
                attend(*tensors, block_mask=mask, enable_gqa=num_heads != num_keys)


@pytest.fixture(autouse=True)
def nothing_compiled():
    forget_compiled()
    yield
    forget_compiled()
    compiled.cache_clear()
    torch._dynamo.config.fail_on_recompile_limit_hit = False


def test_each_job_of_a_trainer_compiles_for_its_own_model():
    for model in MODELS:
        forget_compiled()
        attend_at_all_lengths(*model)


def test_attention_is_never_left_uncompiled_in_silence():
    for model in MODELS[:-1]:
        attend_at_all_lengths(*model)
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        attend_at_all_lengths(*MODELS[-1])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_nothing_is_compiled_after_the_warm_up(monkeypatch):
    cpu = torch.device("cpu")
    versions = []

    def count(graph, inputs):
        versions.append(graph)
        return graph.forward

    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    monkeypatch.setattr(flex, "flex_attention", compiled(flex_attention, count))
    monkeypatch.setitem(PLANNERS, "cpu", plan_flex)
    model = moved_model(0)
    assert len(list(warm_up(model, cpu))) == 4
    num_warm = len(versions)
    for num_places in (30, 128, 129, 256, 300, 384, 640, 900):
        batch = pack([make_group(prompt_length=20, response_lengths=[num_places - 19])], cpu)
        assert batch.layout.num_places == num_places
        for has_gradient in (True, False):
            with torch.set_grad_enabled(has_gradient):
                logprobs, _ = response_logprobs(model, batch, 1.0)
            if has_gradient:
                logprobs.sum().backward()
    assert num_warm > 0
    assert len(versions) == num_warm
