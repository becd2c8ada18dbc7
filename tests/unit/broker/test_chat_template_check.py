"""Jobs of episodes are refused before they begin when their model cannot talk in several turns."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onbeat.config import JobConfig
from services.broker.admission.models import review_template
from services.trainer import session
from services.trainer.chat_template import check_chat_template
from services.trainer.settings import Settings
from services.trainer.world import ALONE
from tests.episode_rig import QWEN_LIKE, WITHOUT_SYSTEM, tokenizer_of

ONE_TURN = "{% if messages | length > 1 %}{{ raise_exception('one message only') }}{% endif %}{{ messages[0].content }}"
FIRST_ONLY = "{{ messages[0].content }}"


def job(**sections: object) -> JobConfig:
    rollout = {"num_prompts_per_iteration": 1, "num_samples_per_prompt": 2, "max_response_tokens": 4}
    data = {"type": "jsonl", "path": "prompts.jsonl"}
    config = {"model": {"path": "./mine"}, "data": data, "environment": {"name": "test"}, "rollout": rollout}
    return JobConfig.model_validate(config | {"schedule": {"num_iterations": 1}} | sections)


def model_with(folder: Path, template: str | None) -> Path:
    tokenizer = tokenizer_of()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("template", "reason"),
    [(None, "chat_template"), (ONE_TURN, "one message only"), (FIRST_ONLY, "does not show the last message")],
)
def test_template_without_several_turns_is_refused_by_name(tmp_path, template, reason):
    folder = model_with(tmp_path, template)
    with pytest.raises(ValueError, match=r"chat template of \./mine .*episodes need that: give the model") as error:
        check_chat_template(str(folder), job())
    assert reason in str(error.value)


def test_trainer_refuses_the_job_before_it_loads_the_model(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "pin_cores", lambda *cores: 0)
    folder = model_with(tmp_path, ONE_TURN)
    claimed: Any = SimpleNamespace(job_id="job-1", config=job(model={"path": str(folder)}))  # all that is used before
    with pytest.raises(ValueError, match="one message only"):
        session.run_job(Settings(cache_dir=tmp_path), claimed, ALONE)


@pytest.mark.parametrize("template", [QWEN_LIKE, WITHOUT_SYSTEM, tokenizer_of().chat_template])
def test_template_that_goes_on_after_an_answer_is_taken(tmp_path, template):
    check_chat_template(str(model_with(tmp_path, template)), job())
    assert review_template(job(), tmp_path) == []


def test_environments_of_token_ids_need_no_template(tmp_path):
    folder = model_with(tmp_path, None)
    ((field, message),) = review_template(job(), folder)
    assert field == "model.path"
    assert "has no chat template, which episodes need; put chat_template.jinja into it" in message
    ids_only = job(data={"type": "jsonl", "path": "prompts.jsonl", "as_chat": False})
    one_response = job(environment=None, reward={"name": "exact"})
    for config in (ids_only, one_response):
        check_chat_template(str(folder), config)
        assert review_template(config, folder) == []
