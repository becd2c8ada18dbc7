"""Behaviour of one rank without others; test_distributed.py has two."""

import pytest
import torch

from services.trainer.world import World


def test_memory_that_is_short_for_a_sum_is_no_lost_peer(monkeypatch):
    def cat(tensors):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch, "cat", cat)
    with pytest.raises(torch.OutOfMemoryError):
        World(rank=0, size=2).sum_tensors([torch.ones(3)])
