"""An idle trainer imports what trains a job; a failure of that belongs to the job."""

from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from onbeat.contracts.states import JobState
from services.trainer import __main__ as trainer


@pytest.fixture(autouse=True)
def import_is_due() -> Iterator[None]:
    trainer.import_beforehand.cache_clear()
    yield
    trainer.import_beforehand.cache_clear()


def test_failed_import_is_tried_once_and_then_fails_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Mock(side_effect=ImportError("tokenizers>=0.22 is required"))
    monkeypatch.setattr(trainer, "import_session", failing)
    for _ in range(3):  # looks for a job
        trainer.import_beforehand()
    assert failing.call_count == 1
    outcome, error = trainer.train(Mock(), Mock(), Mock(size=1))
    assert (outcome, error) == (JobState.FAILED, "ImportError: tokenizers>=0.22 is required")
