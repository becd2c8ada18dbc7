"""A job's options of the chat template, and the date that it shows, are the same in every rendering of the job."""

import json
import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from onbeat.config import JobConfig
from onbeat.config.templates import TemplateArguments
from onbeat.streams.codec import Message, PromptTask
from services.broker.admission.review import review_free_values
from services.prompts.prompt_tokenizer import PromptTokenizer, check_template_options
from services.rollout.episodes.rendering import Renderer
from services.rollout.prompts import PromptEncoder
from services.trainer.chat_template import check_chat_template
from tests.episode_rig import tokenizer_of
from tests.world import job_body

QUESTION = {"role": "user", "content": "2 + 2?"}
THINKS = """{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y, %H h') %}{% endif -%}
{{ date_string }} {{ messages[0].content }}
{%- if enable_thinking is defined and enable_thinking is false %} </think>{% endif %}{{ words }}"""
OPENS = "{{ messages[0].content }}<|im_end|>{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
PLAIN = "{{ messages[0].content }}"
SUFFIX = "<|im_start|>assistant\n<think>\n"
PROMPT_ONLY = "{% if not add_generation_prompt %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"
ARGUMENTS = {"template_options": {"enable_thinking": False}, "now": "2026-01-31T23:30:00+02:00"}
PROMPT = "31 Jan 2026, 21 h 2 + 2? </think>"


def config_with(**data: Any) -> JobConfig:
    body = job_body()
    return JobConfig.model_validate(body | {"data": body["data"] | data})


def test_every_rendering_has_the_options_and_the_date(tmp_path):
    tokenizer, config = tokenizer_of(THINKS), config_with(**ARGUMENTS)
    encoder = PromptEncoder(tokenizer, None, config.data)
    token_ids = encoder.encode(PromptTask(messages=[Message(**QUESTION)]))
    assert tokenizer.decode(token_ids) == PROMPT
    assert Renderer(encoder.prompts).fresh([QUESTION], []) == token_ids
    tokenizer.save_pretrained(tmp_path)
    lines = [{"arguments": config.data.template_arguments(), "chat_template": None}, {"messages": [QUESTION]}]
    command = [sys.executable, "-m", "services.trainer.prompt_lengths", str(tmp_path), "--text"]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"num_tokens": len(token_ids), "text": PROMPT, "suffix": ""}


def test_option_that_the_template_lacks_is_refused_by_name(tmp_path):
    tokenizer_of(THINKS).save_pretrained(tmp_path)
    known = "has no option 'enable_thinkin'; it has date_string, enable_thinking, words"
    with pytest.raises(ValueError, match=known):
        check_chat_template(str(tmp_path), config_with(template_options={"enable_thinkin": False}))
    check_chat_template(str(tmp_path), config_with(template_options={"date_string": "today"}))
    with pytest.raises(ValueError, match="has no option 'thinking'; it has none"):
        check_template_options(tokenizer_of("{{ messages }}"), TemplateArguments(template_options={"thinking": 1}))


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "tokenize", "eos_token"])
def test_names_of_the_renderer_are_no_options(name):
    with pytest.raises(ValidationError, match=f"{name} is set by the renderer"):
        config_with(template_options={name: True})


@pytest.mark.parametrize("now", ["yesterday", "2026-13-01", ""])
def test_what_is_no_moment_is_refused(now):
    with pytest.raises(ValidationError, match="is no moment of ISO 8601; write one such as 2026-01-31T12:00:00Z"):
        config_with(now=now)


def test_options_that_would_change_nothing_are_refused():
    held_out = {"data": job_body()["data"] | {"template_options": {"enable_thinking": False}}}
    job = JobConfig.model_validate(job_body(evaluation=held_out))
    assert review_free_values(job) == [
        ("evaluation.data.template_options", "data.template_options is for all prompts of the job; leave this out")
    ]
    rows = {"type": "jsonl", "path": "rows.jsonl", "as_chat": False, "template_options": {"enable_thinking": False}}
    (complaint,) = review_free_values(JobConfig.model_validate(job_body(data=rows)))
    assert complaint == ("data.template_options", "needs as_chat = true; plain prompts have no template")
    rows = {"type": "jsonl", "path": "rows.jsonl", "control_tokens": "text"}
    (complaint,) = review_free_values(JobConfig.model_validate(job_body(data=rows)))
    assert complaint == ("data.control_tokens", "needs as_chat = false; in messages they are always text")


def test_job_of_before_has_the_date_of_its_creation():
    recorded = config_with().model_dump_json()
    assert JobConfig.of_job({"config": recorded, "created_at": "86400.5"}).data.now == "1970-01-02T00:00:00Z"
    dated = config_with(now="2026-01-31").model_dump_json()
    assert JobConfig.of_job({"config": dated, "created_at": "86400.5"}).data.now == "2026-01-31T00:00:00Z"


def test_prompts_without_arguments_are_those_of_the_tokenizer():
    tokenizer = tokenizer_of()
    plain = tokenizer.apply_chat_template([QUESTION], tokenize=False, add_generation_prompt=True)
    assert PromptTokenizer(tokenizer, config_with(now="2026-01-31").data).render([QUESTION]) == plain


@pytest.mark.parametrize(("template", "suffix"), [(OPENS, SUFFIX), (PLAIN, ""), (PROMPT_ONLY, "")])
def test_rewards_see_what_the_template_ends_a_prompt_with(template, suffix):
    encoder = PromptEncoder(tokenizer_of(template), None)
    assert encoder.ending(PromptTask(messages=[Message(**QUESTION)])) == {"prompt_suffix": suffix}
    assert encoder.ending(PromptTask(text="2 + 2 =")) == {}
