"""The way a model is trained is found by trying its architecture: packed, another right way, or refused by name."""

import pytest
import torch
from transformers import AutoConfig, BertConfig, Gemma2Config, Gemma3Config, LlamaConfig, MistralConfig, Phi3Config

from services.trainer.attention.tree import TreePlan
from services.trainer.model import lean_layers, logprobs
from services.trainer.model.model import Passes
from services.trainer.passes.choice import choose_passes, try_kernel
from services.trainer.passes.shrink import NOT_REACHED, REACHED, random_model, shrunken
from tests.architectures import Row
from tests.trainer_fixtures import tiny_config

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def choose(config, longest=64, **options):
    return choose_passes(config, longest, CPU, torch.float32, **options)


@pytest.mark.parametrize("window", [512, 4096])
def test_a_soft_capped_attention_is_not_packed(window):
    """The window does not matter: SDPA leaves the cap out."""
    config = tiny_config(Gemma2Config, head_dim=8, sliding_window=window)
    passes, reason = choose(config, 8192)
    assert passes == Passes("eager", is_padded=True, has_plain_head=False)
    assert "soft-capped" in reason, "a shorter context would not be packed either"


@pytest.mark.parametrize(("longest", "is_packed"), [(64, True), (65, False)])
def test_a_window_matters_only_to_longer_sequences(longest, is_packed):
    passes, reason = choose(tiny_config(MistralConfig, sliding_window=64), longest)
    assert (passes.is_packed, reason == "") == (is_packed, is_packed)
    assert is_packed or "set model.max_context_tokens to 64" in reason


def test_a_nested_configuration_is_read():
    """The window, vocabulary and context are those of the part that reads text."""
    text = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    text |= {"intermediate_size": 32, "sliding_window": 64, "vocab_size": 300, "max_position_embeddings": 256}
    config = Gemma3Config(text_config=text, vision_config=vision | {"image_size": 28, "patch_size": 14})
    passes, reason = choose(config, None)
    assert not passes.is_packed
    assert "beyond the attention window of 64" in reason
    assert choose(config, 64)[0].is_packed


SMALL = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
MINIMAX_M3 = {"num_hidden_layers": 4, "head_dim": 16, "rotary_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
MINIMAX_M3 |= {"dense_intermediate_size": 48, "shared_intermediate_size": 16, "index_n_heads": 2, "index_head_dim": 16}
MINIMAX_M3 |= {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2}


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "longest", "is_packed"),
    [(2, 16, 32, True), (2, 16, 33, False), (2, 16, 400, False), (16, 128, 2048, True), (16, 128, 8192, False)],
)
def test_blocks_matter_beyond_their_tokens_together(num_blocks, block_size, longest, is_packed):
    blocks = {"index_topk_blocks": num_blocks, "index_block_size": block_size}
    config = AutoConfig.for_model("minimax_m3_vl_text", **SMALL | MINIMAX_M3 | blocks)
    assert choose(config, longest)[0].is_packed == is_packed


def test_buffers_that_hide_later_tokens_stay_masks():
    """MiniMax keeps the decay of its linear attention, zeros and all, in buffers of its state."""
    layers = {"head_dim": 8, "num_local_experts": 2, "layer_types": ["linear_attention", "full_attention"]}
    config = AutoConfig.for_model("minimax", **SMALL, **layers, block_size=16)
    assert choose(config, 400)[0] == Passes("sdpa", is_padded=True)


def test_correction_biases_of_routers_move_from_zero():
    model = random_model(Row("glm4_moe", "glm4_moe").config(), "eager")
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert biases
    assert all(bias.all() for bias in biases)


def test_passes_name_the_layers_that_take_no_adapters():
    assert choose(Row("jamba", "jamba").config())[0].bypassed == {"JambaMambaMixer.dt_proj"}
    assert choose(tiny_config())[0].bypassed == frozenset()


def test_a_model_that_sees_the_future_is_refused_by_name():
    config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    config.architectures = ["BertLMHeadModel"]
    with pytest.raises(ValueError, match="BertLMHeadModel cannot be trained: its logits depend on later tokens"):
        choose(config)


def test_a_model_that_transformers_cannot_run_is_refused_by_name():
    config = tiny_config(LlamaConfig, hidden_act="nonsense")
    with pytest.raises(ValueError, match="a model of type llama cannot be trained: a tiny model of it fails"):
        choose(config)


@pytest.mark.parametrize(
    ("config_class", "options"),
    [
        (
            Phi3Config,
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "short_factor": [1.0] * 4,
                    "long_factor": [9.0] * 4,
                    "rope_theta": 1e4,
                },
                "original_max_position_embeddings": 64,
                "pad_token_id": 0,
            },
        ),
        (
            LlamaConfig,
            {
                "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
                "max_position_embeddings": 64,
            },
        ),
    ],
)
def test_rotary_tables_must_not_depend_on_the_length(config_class, options):
    config = tiny_config(config_class, **options)
    assert choose(config, 64)[0].is_packed
    with pytest.raises(ValueError, match=r"model\.max_context_tokens: .* set model.max_context_tokens to 64 or less"):
        choose(config, 65)


def test_sharded_ranks_make_one_pass(monkeypatch):
    """A pass for each length is a number of passes that ranks do not share."""
    monkeypatch.setattr("services.trainer.passes.trial.CANDIDATES", [("sdpa", False)])
    assert choose(tiny_config())[0] == Passes("sdpa", is_padded=False)
    with pytest.raises(ValueError, match="ONBEAT_PARALLELISM=ddp"):
        choose(tiny_config(), is_sharded=True)


@pytest.mark.parametrize(("longest", "length"), [(128, NOT_REACHED), (513, REACHED)])
def test_lengths_that_a_job_exceeds_are_exceeded_in_the_trial(longest, length):
    config = tiny_config(
        MistralConfig, num_hidden_layers=40, hidden_size=640, sliding_window=512, num_attention_heads=8
    )
    small = shrunken(config, longest)
    assert small.sliding_window == length
    assert small.num_hidden_layers < 40
    assert small.hidden_size == small.num_attention_heads * 16
    assert config.sliding_window == 512


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_right_kernel_passes_its_trial(dtype):
    assert try_kernel(tiny_config(head_dim=16), torch.device("cpu"), dtype) == ""


@pytest.mark.parametrize(
    ("kernel", "complaint"),
    [
        (lambda plan, query, key, value, scale: query.transpose(0, 1) + 0 * (key + value).sum(), "is off by"),
        (lambda plan, query, key, value, scale: right_output_wrong_gradient(plan, query, key, value), "is off by"),
        (lambda plan, query, key, value, scale: key.nonsense, "fails: AttributeError"),
    ],
)
def test_a_wrong_kernel_is_noticed(monkeypatch, kernel, complaint):
    monkeypatch.setattr(TreePlan, "attend", kernel)
    assert complaint in try_kernel(tiny_config(), torch.device("cpu"), torch.float32)


attend = TreePlan.attend


def right_output_wrong_gradient(plan, query, key, value):
    return attend(plan, query, key, value.detach(), None) + 0 * value.sum()


@pytest.mark.parametrize("kernel", ["short.ShortPlan", "tree.TreePlan"])
def test_the_trial_finds_an_attention_that_is_wrong(monkeypatch, kernel):
    """The wrong attention serves rows without forks, or those with one."""
    monkeypatch.setattr(f"services.trainer.attention.{kernel}.attend", lambda plan, query, *_: query.transpose(0, 1))
    passes, reason = choose(tiny_config(LlamaConfig))
    assert passes.attention == "sdpa"
    assert "packed rows differ" in reason


@pytest.mark.parametrize("module", [lean_layers, logprobs], ids=["embedding", "head"])
def test_the_trial_finds_a_gradient_that_gets_lost(monkeypatch, module):
    """The lost gradient is one that a layer adds to the sum of gradients in place, as in the training of float32."""
    monkeypatch.setattr(module, "kept_gradient", torch.zeros_like)
    with pytest.raises(ValueError, match="of the gradient"):
        choose(tiny_config())
