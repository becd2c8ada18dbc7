import pytest

from services.trainer.model.model import freeze_copy
from tests.trainer_fixtures import moved_model


@pytest.fixture(scope="module")
def models():
    """Policy, old and reference, all different."""
    return moved_model(0), freeze_copy(moved_model(1)), freeze_copy(moved_model(2))
