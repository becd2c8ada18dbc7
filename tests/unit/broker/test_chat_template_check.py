"""Jobs of episodes are refused before they begin when their model cannot talk in several turns."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onbeat.config import JobConfig
from services.broker.admission.models import review_template
from services.broker.admission.review import review_free_values
from services.trainer import session
from services.trainer.chat_template import check_chat_template
from services.trainer.settings import Settings
from services.trainer.supervised import RowTokenizer
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
    [
        (None, "chat_template"),
        (ONE_TURN, "one message only"),
        (FIRST_ONLY, "does not show the message of the role user in a conversation of user and assistant and user"),
    ],
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
    check_chat_template(str(folder), ids_only)
    assert review_template(ids_only, folder) == []


def test_template_for_episodes_is_needed_for_one_source_of_them(tmp_path):
    folder = model_with(tmp_path, ONE_TURN)
    sums = DATA | {"name": "sums"}
    games = DATA | {"name": "games", "environment": {"name": "test"}}
    sections = {"environment": None, "reward": {"name": "exact"}}
    with pytest.raises(ValueError, match="episodes need that"):
        check_chat_template(str(folder), job(data=[sums, games], **sections))
    check_chat_template(str(folder), job(data=[sums, games | {"environment": None}], **sections))
    folder = model_with(tmp_path, WITHOUT_SYSTEM)
    check_chat_template(str(folder), job(data=[sums, games | {"system_prompt": "Play."}], **sections))
    with pytest.raises(ValueError, match=r"put the text of .* into the prompts"):
        check_chat_template(str(folder), job(data=[sums | {"system_prompt": "Add."}, games], **sections))


# ---- jobs of one response ----------------------------------------------------------------------------------------

DATA = {"type": "jsonl", "path": "prompts.jsonl"}
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}{{ messages[0].content }}"
)
SILENT_SYSTEM = "{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}"


def job_of_responses(**data: object) -> JobConfig:
    return job(environment=None, reward={"name": "exact"}, data=DATA | data)


@pytest.mark.parametrize(
    ("template", "data", "reason"),
    [
        (None, {}, "chat_template"),
        ("{% for message in messages %}", {}, "does not render a conversation of user (Unexpected end of template"),
        ("{{ messages[0].text }}", {}, "does not show the message of the role user"),
        (NO_SYSTEM, {"system_prompt": "Be short."}, "(no system role); put the text of data.system_prompt into the"),
        (SILENT_SYSTEM, {"system_prompt": "Be short."}, "does not show the message of the role system"),
    ],
)
def test_template_that_cannot_show_the_prompts_is_refused(tmp_path, template, data, reason):
    folder = model_with(tmp_path, template)
    with pytest.raises(ValueError, match=re.escape(reason)):
        check_chat_template(str(folder), job_of_responses(**data))


@pytest.mark.parametrize(
    ("template", "data"),
    [
        (None, {"as_chat": False}),
        (NO_SYSTEM, {}),
        (SILENT_SYSTEM, {}),
        (QWEN_LIKE, {"system_prompt": "Be short."}),
        (FIRST_ONLY, {}),
    ],
)
def test_template_that_shows_the_prompts_is_taken(tmp_path, template, data):
    check_chat_template(str(model_with(tmp_path, template)), job_of_responses(**data))


def test_model_without_a_template_is_refused_at_submission(tmp_path):
    folder = model_with(tmp_path, None)
    ((field, message),) = review_template(job_of_responses(), folder)
    assert (field, "has no chat template, which data.as_chat = true needs" in message) == ("model.path", True)
    assert review_template(job_of_responses(as_chat=False), folder) == []


def job_of_examples(**data: object) -> JobConfig:
    start = {"data": DATA | data, "num_rows_per_iteration": 1}
    sections = {"objective": {"type": "sft"}, "warm_start": start, "schedule": {"num_iterations": 1}}
    return JobConfig.model_validate({"model": {"path": "./mine"}} | sections)


def test_examples_for_a_model_without_a_template(tmp_path):
    folder, config = model_with(tmp_path, None), job_of_examples()
    ((_, message),) = review_template(config, folder)
    assert "which warm_start.data.as_chat = true needs; put chat_template.jinja into it" in message
    assert "set warm_start.data.as_chat = false for a model that continues plain text" in message
    with pytest.raises(ValueError, match=r"or set warm_start\.data\.as_chat = false for prompts"):
        check_chat_template(str(folder), config)
    plain = job_of_examples(as_chat=False)
    check_chat_template(str(folder), plain)
    assert review_template(plain, folder) == []
    assert RowTokenizer(tokenizer_of(QWEN_LIKE), plain.rendering)._is_chat is False


def test_refusals_of_examples_name_their_own_keys():
    config = job_of_examples(control_tokens="text")
    ((field, _),) = review_free_values(config)
    assert field == "warm_start.data.control_tokens"


def test_template_options_of_examples_are_refused_by_their_field(tmp_path):
    folder, options = model_with(tmp_path, QWEN_LIKE), {"thinking": True}
    for config, field in (
        (job_of_examples(template_options=options), "warm_start.data"),
        (job_of_responses(template_options=options), "data"),
    ):
        with pytest.raises(ValueError, match=f"^{field}.template_options: the chat template has no option 'thinking'"):
            check_chat_template(str(folder), config)
