"""Packed rows: the prefix that prompts share, what is refused, the head in blocks."""

import pytest
import torch

from services.trainer.attention.layout import build_layout
from services.trainer.batch import MIN_PREFIX, common_prefix, pack
from services.trainer.model import logprobs as head
from services.trainer.model.logprobs import TargetLogprobs
from tests.trainer_fixtures import make_group


def test_what_prompts_begin_with_is_packed_once():
    prefix = range(MIN_PREFIX)
    groups = [make_group("0-0", 3, (2, 1)), make_group("0-1", 5, (3,), seed=1)]
    for group in groups:
        group.prompt_token_ids[:] = [*prefix, *group.prompt_token_ids]
    tokens = pack(groups, torch.device("cpu")).token_ids.tolist()
    assert tokens[:MIN_PREFIX] == list(prefix)
    assert len(tokens) == MIN_PREFIX + 3 + 1 + 5 + 2
    alone = pack(groups[:1], torch.device("cpu"))
    assert alone.layout.prefix_length == 0, "one prompt has nobody to share with"


@pytest.mark.parametrize(
    ("prompts", "length"),
    [
        ([[*range(30), 1], [*range(30), 2], [*range(20), 9, 9]], 20),
        ([[*range(30)], [*range(30)]], 29),
        ([[*range(20)], [*range(30)]], 19),
        ([[*range(MIN_PREFIX), 1], [*range(MIN_PREFIX), 2]], MIN_PREFIX),
        ([[*range(MIN_PREFIX - 1), 91], [*range(MIN_PREFIX - 1), 92]], 0),
        ([[*range(30)]], 0),
        ([[5, *range(30)], [6, *range(30)]], 0),
    ],
    ids=["the shortest", "equal", "one begins the other", "just long enough", "too short", "alone", "nothing"],
)
def test_prefix_is_what_all_prompts_share_but_their_last_token(prompts, length):
    assert common_prefix(prompts) == prompts[0][:length]


@pytest.mark.parametrize("bad", [(0, [1]), (3, []), (3, [2, 0])])
def test_an_empty_part_is_refused(bad):
    with pytest.raises(ValueError, match="needs a prompt longer than the prefix and non-empty responses"):
        build_layout([bad])
    with pytest.raises(ValueError, match="got 3 tokens, 3 of them prefix"):
        build_layout([(4, [1]), (3, [1])], prefix_length=3)


@pytest.mark.parametrize("kept_bytes", [head.KEPT_BYTES, 0], ids=["blocks are kept", "computed again"])
@pytest.mark.parametrize("num_rows", [1, 64, 65, 1100])
def test_chunked_logprobs_equal_log_softmax(num_rows, kept_bytes, monkeypatch):
    monkeypatch.setattr(head, "BLOCK_ROWS", 40)
    monkeypatch.setattr(head, "KEPT_BYTES", kept_bytes)
    generator = torch.Generator().manual_seed(num_rows)
    hidden = torch.randn(num_rows, 16, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(50, 16, dtype=torch.float64, generator=generator, requires_grad=True)
    targets = torch.randint(50, (num_rows,), generator=generator)
    upstream = torch.randn(num_rows, dtype=torch.float64, generator=generator)
    logprobs, entropy = TargetLogprobs.apply(hidden, weight, targets, 0.7)
    found_grads = torch.autograd.grad(logprobs, (hidden, weight), upstream)
    everything = (hidden @ weight.T / 0.7).log_softmax(-1)
    expected = everything.gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-11)
    torch.testing.assert_close(entropy, -(everything.exp() * everything).sum(-1), rtol=0, atol=1e-11)
    for left, right in zip(found_grads, torch.autograd.grad(expected, (hidden, weight), upstream), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-10)
