"""A chat template beside the job file is that of every prompt and of the checkpoints, in place of the model's own."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onbeat.config import JobConfig
from onbeat.streams.codec import Message, PromptTask
from services.broker.admission.models import review_template
from services.broker.datasets import DatasetError, DatasetSpec
from services.broker.datasets.child import open_dataset
from services.rollout.prompts import PromptEncoder
from services.trainer import session
from services.trainer.chat_template import check_chat_template
from services.trainer.model.model import model_files
from services.trainer.settings import Settings
from services.trainer.world import ALONE
from tests.tiny_models import build_tokenizer, write_tied_model
from tests.unit.config.test_job_files import JOB

OURS = "Ours: {{ messages[0].content }}{% if thinking %} </think>{% endif %}"


def job_with(folder: Path, template: str, *overrides: str) -> JobConfig:
    """Return a job whose model, data and template lie beside its file."""
    (folder / "model").mkdir(exist_ok=True)
    (folder / "job.toml").write_text(JOB.format(path="./model"))
    (folder / "ours.jinja").write_text(template)
    (folder / "prompts.jsonl").write_text('{"prompt": "2 + 2?", "answer": "4"}\n')
    options = ["model.chat_template_file=ours.jinja", *overrides]
    return JobConfig.from_file(folder / "job.toml", overrides=options)


def test_text_of_the_file_is_part_of_the_job(tmp_path):
    config = job_with(tmp_path, OURS)
    assert config.model.chat_template == OURS
    assert JobConfig.model_validate_json(config.model_dump_json()) == config


def test_rollouts_and_checkpoints_have_the_template_of_the_job(tmp_path):
    config = job_with(tmp_path, OURS)
    write_tied_model(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    exported = tmp_path / "exported"
    exported.mkdir()
    for name, content in model_files(config.model.path, torch.float32, config.model.chat_template).items():
        (exported / name).write_bytes(content)
    assert (exported / "chat_template.jinja").read_text() == OURS
    encoder = PromptEncoder.load(exported, None, config.data)
    token_ids = encoder.encode(PromptTask(messages=[Message(role="user", content="2 + 2?")]))
    assert encoder.tokenizer.decode(token_ids) == "Ours: 2 + 2?"


def test_prompts_are_counted_with_the_template_of_the_job(tmp_path):
    for template, longest in ((OURS, 12), (OURS * 2, 24)):
        config = job_with(tmp_path, template, "data.max_prompt_tokens=1")
        build_tokenizer().save_pretrained(tmp_path / "model")
        with pytest.raises(DatasetError, match=f"the longest is line 1 with {longest}"):
            open_dataset(DatasetSpec.of_job(config), tmp_path)


def test_template_of_the_job_is_checked_by_its_own_name(tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "model")
    config = job_with(tmp_path, OURS, "data.template_options={thinking = true}")
    check_chat_template(config.model.path, config)
    assert review_template(config, tmp_path / "model") == []
    config = job_with(tmp_path, "{% if %}")
    with pytest.raises(ValueError, match=r"^model\.chat_template does not render a conversation of user"):
        check_chat_template(config.model.path, config)


def test_trainer_records_the_digest_of_the_template(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "pin_cores", lambda *cores: 0)
    build_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.setattr(session, "load_policy", lambda *_: pytest.fail("far enough"))
    events: list[tuple[str, str]] = []
    config = job_with(tmp_path, OURS)
    claimed: Any = SimpleNamespace(job_id="job-1", config=config, emit=lambda *event: events.append(event))
    with pytest.raises(pytest.fail.Exception, match="far enough"):
        session.run_job(Settings(cache_dir=tmp_path), claimed, ALONE)
    ((kind, message),) = events
    assert (kind, len(message.split()[-1])) == ("trainer.chat_template", 64)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.chat_template_file=nowhere.jinja", "'nowhere.jinja' cannot be read: .*; give the path of a template"),
        ("model.chat_template_file=model", "'model' cannot be read"),
        ("model.chat_template=text", "model.chat_template is there, too; leave out one of them"),
    ],
)
def test_template_file_that_cannot_be_taken_is_named(tmp_path, override, words):
    with pytest.raises(ValueError, match=f"model.chat_template_file: {words}"):
        job_with(tmp_path, OURS, override)


@pytest.mark.parametrize(("end", "tag"), [("<think>\n", "<think>"), ("<reasoning>", "<reasoning>"), ("", None)])
def test_prompts_that_open_the_reasoning_are_told_at_the_start(tmp_path, end, tag):
    """Else a reward that wants the whole <think>...</think> is 0 for ever, and the text of no response says why."""
    build_tokenizer().save_pretrained(tmp_path / "model")
    template = "{{ messages[0].content }}{% if add_generation_prompt %}A: " + end + "{% endif %}"
    config = job_with(tmp_path, template)
    note = check_chat_template(config.model.path, config)
    assert note.startswith(f"the chat template ends prompts with {tag}, which is no part of") if tag else note == ""
