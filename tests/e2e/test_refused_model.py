"""A local stack whose engine cannot load the model of one job: the job fails with the cause, and nothing else does."""

import json
from pathlib import Path

import pytest

from onbeat.contracts.states import JobState
from tests.e2e.stack import running, tiny_job
from tests.installed import install
from tests.tiny_models import write_tied_model

ENTRY_POINTS = "[onbeat.engines]\npicky = picky_engine:PickyEngine\n"
PICKY_ENGINE = """
import json
from services.rollout.engines.transformers_engine import TransformersEngine

class PickyEngine(TransformersEngine):
    def _read_model(self, model_dir):
        if json.loads((model_dir / "config.json").read_text()).get("has_pictures"):
            try:
                raise ImportError("No module named 'torchvision'")
            except ImportError as error:
                raise RuntimeError("cannot build the model") from error
        super()._read_model(model_dir)
"""


def test_job_fails_with_the_cause_and_the_next_one_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = install(tmp_path / "site", "picky", ENTRY_POINTS, picky_engine=PICKY_ENGINE)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", str(site))
    refused_dir = write_tied_model(tmp_path / "refused")
    config = json.loads((refused_dir / "config.json").read_text("utf-8"))
    (refused_dir / "config.json").write_text(json.dumps(config | {"has_pictures": True}), "utf-8")
    with running(tmp_path, engine="picky") as stack:
        job = tiny_job(tmp_path, schedule={"num_iterations": 1})
        refused = stack.client.jobs.create(tiny_job(tmp_path, model={"path": str(refused_dir)})).id
        good = stack.client.jobs.create(job).id
        failed = stack.wait(refused)
        assert failed.state is JobState.FAILED
        cause = "the engine cannot load the model: ImportError: No module named 'torchvision'"
        assert failed.error == f"{cause} (on rollout-0)"
        (event,) = stack.events(refused, "worker.model_failed")
        assert event.message == f"rollout-0: {cause}"
        assert stack.wait(good).state is JobState.SUCCEEDED
        assert stack.log("rollout-0").count("waits for jobs of pool") == 1  # the process has not been replaced
