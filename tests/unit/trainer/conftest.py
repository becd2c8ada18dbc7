import pytest

from services.trainer.model.model import frozen_base
from tests.trainer_fixtures import moved_model


@pytest.fixture(scope="module")
def models():
    """Policy, old and reference, all different."""
    return moved_model(0), frozen_base(moved_model(1)), frozen_base(moved_model(2))
