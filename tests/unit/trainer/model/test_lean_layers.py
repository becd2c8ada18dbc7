"""Layers that keep less for the backward pass compute what transformers' own layers do."""

import copy
import gc
import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM, BitNetConfig, Gemma2Config, LlamaConfig, MistralConfig, Qwen3Config

from onbeat.config import LoraConfig, OptimizerConfig
from services.trainer.batch import pack
from services.trainer.memory_plan import LiveBytes
from services.trainer.model.lean_layers import use_lean_layers
from services.trainer.model.lora import add_adapters
from services.trainer.model.model import response_logprobs
from services.trainer.model.optimizer import MasterAdamW
from services.trainer.passes.trial import gap_of_gradients
from tests.trainer_fixtures import make_group, tiny_config, tiny_model

TOKEN_IDS = torch.arange(40)[None]
LEAN = {"embed_tokens", "input_layernorm", "post_attention_layernorm", "norm", "mlp"}


def build(config, dtype):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.1)
    return model


def lean_names(model):
    return {name.rpartition(".")[2] for name, module in model.named_modules() if is_lean(module)}


def is_lean(module):
    return type(module).__module__ == use_lean_layers.__module__


def run(model):
    """Return the logits, and the gradients of a sum in which each logit has another weight."""
    model.zero_grad()
    logits = model(TOKEN_IDS, use_cache=False).logits
    (logits.float() * torch.linspace(-1.0, 1.0, logits.numel()).view_as(logits)).sum().backward()
    return logits, {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("config_class", [LlamaConfig, MistralConfig, Qwen3Config])
def test_results_are_the_same_bits_and_gradients_nearly(config_class, dtype, tolerance):
    original = build(tiny_config(config_class), dtype)
    lean = copy.deepcopy(original)
    use_lean_layers(lean)
    norms = {"q_norm", "k_norm"} if config_class is Qwen3Config else set()
    assert lean_names(lean) == LEAN | norms
    (expected, gradients), (computed, lean_gradients) = run(original), run(lean)
    assert torch.equal(computed, expected)
    assert gap_of_gradients(lean_gradients, gradients) < tolerance


def test_a_model_that_is_set_up_for_training_has_them():
    assert lean_names(tiny_model()) == LEAN


def test_a_model_keeps_its_weights_and_can_be_freed():
    """Also one whose MLP has a norm of its own, which a small copy must not share."""
    for config in (tiny_config(), tiny_config(BitNetConfig, hidden_act="silu")):
        model = build(config, torch.bfloat16)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        use_lean_layers(model)
        assert {"input_layernorm", "norm"} <= lean_names(model)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.bfloat16}
        mlp = weakref.ref(model.model.layers[0].mlp)
        gc.disable()
        try:
            del model
            assert mlp() is None
        finally:
            gc.enable()


def test_layers_that_compute_something_else_stay_as_they_are():
    """Gemma's norms multiply by 1 + weight and its MLPs have another activation; this MLP here clamps."""
    gemma = build(tiny_config(Gemma2Config), torch.float32)
    use_lean_layers(gemma)
    assert lean_names(gemma) == set()

    model = build(tiny_config(), torch.float32)
    mlp_type = type(model.model.layers[0].mlp)

    class Clamping(mlp_type):
        def forward(self, x):
            return super().forward(x.clamp(max=1000.0))

    model.model.layers[0].mlp.__class__ = Clamping
    use_lean_layers(model)
    assert [is_lean(layer.mlp) for layer in model.model.layers] == [False, True]


def test_adapters_and_frozen_weights_get_the_same_gradients():
    """Also where the last projection of an MLP has an adapter, and where it is frozen and has none."""
    for targets in ([], ["gate_proj", "q_proj"]):
        original = build(tiny_config(), torch.float32)
        lean = copy.deepcopy(original)
        use_lean_layers(lean)
        for model in (original, lean):
            add_adapters(model, LoraConfig(rank=4, alpha=8.0, **({"target_modules": targets} if targets else {})), 1)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "lora_B" in name:
                        parameter.fill_(0.01)
        (expected, gradients), (computed, lean_gradients) = run(original), run(lean)
        assert torch.equal(computed, expected)
        assert lean_gradients.keys() == gradients.keys()
        assert gap_of_gradients(lean_gradients, gradients) < 1e-5


@pytest.mark.parametrize("padding_idx", [None, 5])
def test_an_embedding_adds_to_the_gradient_that_is_there(padding_idx):
    """Tokens that occur twice count twice, and those of padding have no gradient."""
    original = torch.nn.Embedding(16, 4, padding_idx)
    lean = copy.deepcopy(original)
    use_lean_layers(torch.nn.ModuleList([lean]))
    token_ids = torch.tensor([[3, 5, 3], [7, 5, 1]])
    upstream = torch.randn(2, 3, 4)
    original(token_ids).backward(upstream)
    lean(token_ids).backward(upstream)
    assert is_lean(lean)
    assert torch.equal(lean.weight.grad, original.weight.grad)
    kept = lean.weight.grad
    lean(token_ids).backward(upstream)
    assert lean.weight.grad is kept
    assert torch.equal(kept, 2 * original.weight.grad)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize(("dtype", "largest_gap"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_gradients_that_are_there_need_no_copy_of_their_size(is_tied, dtype, largest_gap):
    """The gradient of embedding and head adds up in place over two passes, to what autograd itself adds up."""
    model = tiny_model(tiny_config(vocab_size=20_000, hidden_size=128, tie_word_embeddings=is_tied), dtype)
    whole = copy.deepcopy(model)
    batch = pack([make_group("0-0", 10, [6, 4])], torch.device("cpu"), False)
    gradients = MasterAdamW(model, OptimizerConfig()).gradients()
    for _ in range(2):
        with LiveBytes() as live:
            response_logprobs(model, batch, 1.0)[0].sum().backward()
    (2 * response_logprobs(whole, batch, 1.0)[0].sum()).backward()
    assert gap_of_gradients(gradients, {name: p.grad for name, p in whole.named_parameters()}) < largest_gap
    assert live.peak < model.get_input_embeddings().weight.nbytes


def test_a_pass_keeps_a_quarter_less():
    def kept_bytes(model):
        """Return the bytes that one forward pass keeps for the backward pass, besides parameters."""
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        kept = {}

        def keep(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            logits = model(TOKEN_IDS, use_cache=False).logits
        del logits
        return sum(kept.values())

    config = tiny_config(hidden_size=64, intermediate_size=192)
    for dtype in (torch.float32, torch.bfloat16):
        original = build(config, dtype)
        lean = copy.deepcopy(original)
        use_lean_layers(lean)
        assert kept_bytes(lean) < 0.75 * kept_bytes(original)


def test_the_generator_of_random_numbers_is_left_alone():
    model = build(tiny_config(), torch.float32)
    before = torch.get_rng_state()
    use_lean_layers(model)
    assert torch.equal(torch.get_rng_state(), before)
