import pytest

from tests.trainer_fixtures import make_batch


@pytest.fixture
def batch():
    return make_batch()
