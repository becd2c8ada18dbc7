"""The vocabularies of a job's model and teacher are compared when the job is submitted, in a process of their own."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from onbeat.config import JobConfig
from services.broker.admission import teacher as teacher_check
from services.broker.admission.teacher import review_vocabulary
from tests.tiny_models import build_tokenizer
from tests.world import job_body

pytestmark = pytest.mark.slow


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    """Return two folders with a tokenizer each; the second has two of its tokens exchanged."""
    build_tokenizer().save_pretrained(tmp_path / "model")
    other = shutil.copytree(tmp_path / "model", tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return tmp_path / "model", other


def job(model: object, teacher: object) -> JobConfig:
    distill = {"objective": {"type": "distill"}, "teacher": {"path": str(teacher)}}
    return JobConfig.model_validate(job_body(model={"path": str(model)}, **distill))


async def test_teacher_of_another_vocabulary_is_refused_in_a_sentence(models):
    ((field, message),) = await review_vocabulary(job(*models))
    assert field == "teacher.path"
    assert message.startswith("it has another vocabulary than the model: 2 of 259 shared ids are other tokens, such as")
    assert message.endswith("take a teacher with the model's tokenizer")
    assert await review_vocabulary(job(models[0], models[0])) == []
    assert await review_vocabulary(JobConfig.model_validate(job_body())) == []


async def test_unknown_vocabulary_is_left_to_the_trainer(models, monkeypatch, caplog):
    assert await review_vocabulary(job(models[0], models[0] / "nothing")) == []
    monkeypatch.setattr(teacher_check, "CHECK_S", 0.01)
    assert await review_vocabulary(job(*models)) == []
    assert "were not compared: not within 0.01 s" in caplog.text


def test_counting_and_comparing_tokens_import_no_torch():
    modules = "services.trainer.vocabularies, services.trainer.prompt_lengths"
    program = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


async def test_bundled_model_has_its_own_vocabulary(models):
    ((_, message),) = await review_vocabulary(job("bundled:smollm2-135m-instruct", models[0]))
    assert message.startswith("it has another vocabulary than the model: ")
