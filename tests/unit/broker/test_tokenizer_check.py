"""The tokenizer of a model in a folder is checked when a job is submitted, in a process that it cannot take along."""

import json
from pathlib import Path
from typing import Any

import pytest

from onbeat.config import JobConfig
from services.broker.admission import tokenizer as tokenizer_check
from services.broker.admission.tokenizer import review_tokenizer
from services.broker.admission.tokenizer_child import find_problem
from tests.tiny_models import CHAT_TEMPLATE, build_tokenizer
from tests.world import job_body

NUM_TOKENS = len(build_tokenizer())
CHAT: dict[str, Any] = {"as_chat": True}
WITH_SYSTEM: dict[str, Any] = {"as_chat": True, "has_system_prompt": True}
EPISODES: dict[str, Any] = {"as_chat": True, "has_environment": True}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a tokenizer, its template in tokenizer_config.json, and a model's configuration."""
    build_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    change(tmp_path, "tokenizer_config.json", chat_template=CHAT_TEMPLATE)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": NUM_TOKENS}))
    return tmp_path


def change(folder: Path, name: str, **values: Any) -> None:
    path = folder / name
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | values))


def job(folder: Path, **sections: Any) -> JobConfig:
    return JobConfig.model_validate(job_body(model={"path": str(folder)}) | sections)


# ---- the vocabulary ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [NUM_TOKENS, NUM_TOKENS + 64])
def test_tokenizer_that_fits_is_accepted(folder, num_rows):
    change(folder, "config.json", vocab_size=num_rows, eos_token_id=[0, num_rows - 1])
    assert find_problem(str(folder), **WITH_SYSTEM) == find_problem(str(folder), **EPISODES) == ""


@pytest.mark.parametrize(
    ("name", "values", "sentence"),
    [
        ("tokenizer.json", {"model": {}}, "tokenizer.json cannot be loaded ("),
        ("config.json", {"vocab_size": NUM_TOKENS - 1}, "rows (vocab_size in config.json); add rows (model.resize_"),
        ("config.json", {"text_config": {"vocab_size": 9}}, "the embedding of the model has 9 rows"),
        (
            "config.json",
            {"eos_token_id": NUM_TOKENS},
            f"config.json has eos_token_id = {NUM_TOKENS}, and",
        ),
        ("generation_config.json", {"eos_token_id": [0, -1]}, "generation_config.json has eos_token_id = -1, and"),
        ("tokenizer_config.json", {"pad_token": "[PAD]"}, "names '[PAD]' as pad_token, which tokenizer.json does not"),
        ("tokenizer_config.json", {"eos_token": {"content": "</s>"}}, "names '</s>' as eos_token, which"),
        ("special_tokens_map.json", {"unk_token": "<unk>"}, "names '<unk>' as unk_token, which"),
    ],
)
def test_tokenizer_that_does_not_fit_is_refused_by_name(folder, name, values, sentence):
    change(folder, name, **values)
    assert sentence in find_problem(str(folder), as_chat=False)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_file_that_is_cut_off_is_refused(folder, name):
    content = (folder / name).read_text()
    (folder / name).write_text(content[: len(content) // 2])
    assert f"{folder}/{name} " in find_problem(str(folder), **CHAT)


def test_token_of_pictures_needs_no_row(folder):
    """Gemma 3 has models for text alone, whose tokenizer has a token for pictures behind the last row."""
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(folder)
    assert "has token '<image>' with id" in find_problem(str(folder), **CHAT)
    change(folder, "tokenizer_config.json", extra_special_tokens={"image_token": "<image>"})
    assert find_problem(str(folder), **CHAT) == ""


def test_token_that_only_the_settings_add_is_known(folder):
    added = {str(NUM_TOKENS): {"content": "[PAD]", "special": True}}
    change(folder, "tokenizer_config.json", pad_token="[PAD]", added_tokens_decoder=added)
    assert f"has token '[PAD]' with id {NUM_TOKENS}" in find_problem(str(folder), **CHAT)
    change(folder, "config.json", vocab_size=NUM_TOKENS + 1)
    assert find_problem(str(folder), **CHAT) == ""


# ---- the chat template -------------------------------------------------------------------------------------------

NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}{{ messages[0].content }}"
)
USERS_ONLY = "{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}"
AS_TRANSFORMERS = """
{%- for message in messages %}
    {%- if loop.index > 9 %}{% break %}{% endif %}
    {%- generation %}{{ bos_token + message | tojson(indent=2) }}{% endgeneration %}
{%- endfor %}{{ strftime_now('%Y') }}{% if tools %}{{ 1 / 0 }}{% endif %}
"""
FAR = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "uses", "sentence"),
    [
        ("{% for message in messages %}", CHAT, "does not render a conversation of user (Unexpected end of template"),
        ("{{ messages[0].text }}", CHAT, "does not show the message of the role user"),
        ("{{ messages[0].content + 1 }}", CHAT, "does not render a conversation of user (can only concatenate str"),
        ("{{ 1 / 0 }}", CHAT, "(division by zero); give the model a template that does"),
        ("{{ ''.__class__.mro() }}", CHAT, "is unsafe"),
        (NO_SYSTEM, WITH_SYSTEM, "(no system role); put the text of data.system_prompt into the prompts"),
        (USERS_ONLY, WITH_SYSTEM, "does not show the message of the role system in a conversation of system and user"),
        ("{{ messages[0].content }}", EPISODES, "episodes need that: give the model a template that does"),
        ([{"name": "rag", "template": USERS_ONLY}], CHAT, "has several templates (rag), and none of them is 'default'"),
        ([{"name": "default"}], CHAT, "cannot be read ('template'); save the tokenizer again"),
        ({"default": "{% endif %}"}, CHAT, "does not render a conversation of user (Encountered unknown tag 'endif'"),
    ],
)
def test_template_that_cannot_show_the_prompts_is_refused(folder, template, uses, sentence):
    change(folder, "tokenizer_config.json", chat_template=template)
    assert sentence in find_problem(str(folder), **uses)
    assert find_problem(str(folder), as_chat=False) == ""


@pytest.mark.parametrize(
    ("template", "uses"),
    [
        (NO_SYSTEM, CHAT),
        (USERS_ONLY, EPISODES),
        (AS_TRANSFORMERS, WITH_SYSTEM),
        ([{"name": "tool_use", "template": "{% if %}"}, {"name": "default", "template": AS_TRANSFORMERS}], EPISODES),
    ],
)
def test_template_that_shows_the_prompts_is_accepted(folder, template, uses):
    change(folder, "tokenizer_config.json", chat_template=template)
    assert find_problem(str(folder), **uses) == ""


def test_template_in_a_file_comes_before_that_of_the_settings(folder):
    (folder / "chat_template.jinja").write_text("{{ messages[0].text }}")
    assert "does not show the message of the role user" in find_problem(str(folder), **CHAT)
    (folder / "chat_template.jinja").rename(folder / "more.jinja")
    (folder / "chat_templates").mkdir()
    (folder / "more.jinja").rename(folder / "chat_templates" / "more.jinja")
    assert "has several templates (more), and none of them is 'default'" in find_problem(str(folder), **CHAT)


def test_template_renders_as_transformers_renders_it(folder, smollm2):
    from services.broker.admission.chat_template import render_with

    messages = [{"role": "system", "content": "Be <brief>."}, {"role": "user", "content": "é"}]
    for template in (smollm2.chat_template, AS_TRANSFORMERS, CHAT_TEMPLATE):
        special = {name: token for name, token in smollm2.special_tokens_map.items() if isinstance(token, str)}
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True, "chat_template": template}
        assert render_with(template, special, {}, None)(messages) == smollm2.apply_chat_template(messages, **options)


# ---- the process -------------------------------------------------------------------------------------------------


async def test_process_answers_for_the_job_as_it_is(folder):
    assert await review_tokenizer(job(folder)) == []
    change(folder, "tokenizer_config.json", chat_template=USERS_ONLY)
    assert await review_tokenizer(job(folder)) == []
    data = job_body()["data"] | {"system_prompt": "Be brief."}
    ((field, message),) = await review_tokenizer(job(folder, data=data))
    assert field == "model.path"
    assert f"the chat template of {folder} does not show the message of the role system" in message


@pytest.mark.slow
async def test_endless_template_ends_its_process_alone(folder, monkeypatch):
    monkeypatch.setattr(tokenizer_check, "CPU_S", 2)
    change(folder, "tokenizer_config.json", chat_template=FAR)
    ((field, message),) = await review_tokenizer(job(folder))
    assert (field, "take more than 2 s" in message) == ("model.path", True), message


async def test_template_that_wants_all_memory_ends_its_process_alone(folder, monkeypatch):
    monkeypatch.setattr(tokenizer_check, "MEMORY_MB", 1024)
    change(folder, "tokenizer_config.json", chat_template="{{ 'x' * (2 ** 33) }}")
    ((field, message),) = await review_tokenizer(job(folder))
    assert (field, "need more than 1024 MB" in message) == ("model.path", True), message
