"""Unit tests compute on tensors too small to share: one thread, so that parallel work on the machine costs little."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)
