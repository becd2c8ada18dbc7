"""Our losses and gradients against TRL's GRPOTrainer on the same tensors, where TRL has the objective."""

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from onbeat.objectives.base import Logprobs
from services.trainer.batch import pack
from tests.tiny_models import write_tied_model
from tests.trainer_fixtures import job_config
from tests.unit.objectives.test_every_objective import example, flat


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tied_model(tmp_path_factory.mktemp("trl") / "model")


def their_loss(model_dir, options, tmp_path, padded, mask):
    """Return the loss of their real trainer, whose forward pass is replaced by the given log-probabilities."""
    config = GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=6,
        num_generations=3,
        max_completion_length=8,
        use_cpu=True,
        bf16=False,
        report_to=[],
        **options,
    )
    dataset = Dataset.from_list([{"prompt": "a"}])
    trainer = GRPOTrainer(str(model_dir), lambda completions, **_: [0.0] * len(completions), config, dataset)
    trainer.model.eval()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (padded["trainer"], torch.zeros_like(mask), None)
    tokens = torch.zeros_like(mask, dtype=torch.long)
    inputs = {
        "prompt_ids": tokens[:, :1],
        "prompt_mask": tokens[:, :1] + 1,
        "completion_ids": tokens,
        "completion_mask": mask,
        "advantages": padded["advantages"],
        "old_per_token_logps": padded["old"],
        "ref_per_token_logps": padded["ref"],
        "num_items_in_batch": mask.sum(),
    }
    return trainer._compute_loss(trainer.model, inputs)


# ours -> theirs. TRL's cispo bound is absolute and one-sided, its gspo is a level of importance sampling, and its KL
# term is weighed by the ratio unless told otherwise.
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        pytest.param({"type": "grpo"}, {"loss_type": "bnpo"}, id="grpo, token mean"),
        pytest.param(
            {"type": "grpo", "normalization": "sequence_mean"}, {"loss_type": "grpo"}, id="grpo, sequence mean"
        ),
        pytest.param(
            {"type": "grpo", "kl": {"coef": 0.3}},
            {"loss_type": "bnpo", "beta": 0.3, "use_bias_correction_kl": False},
            id="grpo with kl",
        ),
        pytest.param({"type": "dr_grpo"}, {"loss_type": "dr_grpo"}, id="dr_grpo"),
        pytest.param({"type": "dapo"}, {"loss_type": "dapo", "epsilon_high": 0.28}, id="dapo"),
        pytest.param({"type": "cispo", "clip_high": 0.2}, {"loss_type": "cispo", "epsilon_high": 1.2}, id="cispo"),
        pytest.param(
            {"type": "gspo", "clip_low": 0.1, "clip_high": 0.1},
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.1},
            id="gspo",
        ),
    ],
)
def test_loss_and_gradient_equal_trl(ours, theirs, model_dir, tmp_path):
    def pad(values, lengths):
        return torch.nn.utils.rnn.pad_sequence(list(values.split(lengths)), batch_first=True)

    config = job_config(objective=ours)
    groups, nested, old, ref, _ = example()
    batch = pack(groups, torch.device("cpu"))
    lengths = batch.response_lengths.tolist()

    trainer = flat(nested).requires_grad_()
    loss = config.objective.loss(batch, Logprobs(trainer, flat(old), flat(ref)))
    most = config.rollout.max_response_tokens
    loss_value = loss.loss_sum / config.objective.denominator(sum(lengths), len(lengths), 0, most)
    found_grad = torch.autograd.grad(loss_value, trainer)[0]

    mask = pad(torch.ones(sum(lengths)), lengths)
    padded = {"trainer": pad(trainer.detach(), lengths).requires_grad_(), "old": pad(flat(old), lengths)}
    padded |= {"ref": pad(flat(ref), lengths)}
    by_group = [config.objective.group_advantages(rewards) for rewards in batch.group_rewards]
    padded["advantages"] = torch.cat(by_group)
    expected = their_loss(model_dir, theirs, tmp_path, padded, mask)
    expected_grad = torch.autograd.grad(expected, padded["trainer"])[0][mask.bool()]

    torch.testing.assert_close(loss_value, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found_grad, expected_grad, rtol=1e-5, atol=1e-6)
