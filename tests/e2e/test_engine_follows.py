"""Jobs whose engine has to follow the weights: vLLM does with mixtures of experts; one that keeps a layer is seen."""

from pathlib import Path

import pytest

from onbeat.types import JobState
from tests.e2e.stack import running, tiny_job
from tests.installed import install
from tests.tiny_models import write_mixtral_model, write_qwen3_moe_model

STALE_ENGINE = """
from services.rollout.engines.transformers_engine import TransformersEngine


class StaleEngine(TransformersEngine):
    def _replace_weights(self, weights_file, names):
        super()._replace_weights(weights_file, [name for name in names if "layers.1.mlp" not in name])
"""


@pytest.fixture
def stale_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An installed engine that keeps one layer as it was at its start."""
    entry = "[onbeat.engines]\nstale = stale_engine:StaleEngine\n"
    site = install(tmp_path / "site", "stale_engine", entry, stale_engine=STALE_ENGINE)
    monkeypatch.setenv("PYTHONPATH", str(site))
    return "stale"


def test_engine_that_keeps_an_old_layer_ends_the_job(tmp_path, stale_engine):
    with running(tmp_path, engine=stale_engine) as stack:
        job = stack.wait(stack.client.jobs.create(tiny_job(tmp_path, optimizer={"learning_rate": 1e-2})).id)
        assert job.state is JobState.FAILED
        assert "the rollouts' engine does not follow the weights" in job.error
        committed = [record.iteration for record in stack.client.jobs.iterations(job.id) if record.committed_at]
        assert committed == [0]


def test_mixtures_of_experts_train_end_to_end_on_vllm(tmp_path):
    """One after another on the same processes. In float32 the trainer and vLLM agree but for rounding."""
    with running(tmp_path, engine="vllm") as stack:
        for write_model in (write_qwen3_moe_model, write_mixtral_model):
            model = {"path": str(write_model(tmp_path / write_model.__name__)), "dtype": "float32"}
            job = tiny_job(tmp_path, model=model, schedule={"num_iterations": 2})
            record = stack.wait(stack.client.jobs.create(job).id)
            assert record.state is JobState.SUCCEEDED, record.error
            assert all(iteration.mismatch_mean < 1e-4 for iteration in stack.client.jobs.iterations(record.id))
