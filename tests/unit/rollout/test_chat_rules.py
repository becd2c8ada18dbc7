"""A conversation becomes a prompt as the job's own prompts were made."""

from typing import Any

import pytest

from onbeat.config import JobConfig
from onbeat.contracts.completions import CompletionRequest
from services.broker.datasets.messages import to_messages
from services.rollout.chat.server import ChatRules
from tests.world import job_body


def task_of(messages: list[dict[str, str]], **data: Any) -> Any:
    config = JobConfig.model_validate(job_body(data=data))
    return ChatRules.of(config).to_task(CompletionRequest.model_validate({"model": "m", "messages": messages}))


@pytest.mark.parametrize("data", [{}, {"system_prompt": "Be brief."}, {"as_chat": False}])
def test_one_message_is_the_prompt_that_a_row_would_be(data: dict[str, Any]) -> None:
    task = task_of([{"role": "user", "content": "2+2="}], **data)
    config = JobConfig.model_validate(job_body(data=data))
    expected = [(message.role, message.content) for message in to_messages("2+2=", config.data)]
    assert [(message.role, message.content) for message in task.messages] == expected
    assert task.text == ("" if expected else "2+2=")


def test_own_system_message_takes_the_place_of_the_jobs() -> None:
    messages = [{"role": "system", "content": "Rhyme."}, {"role": "user", "content": "2+2="}]
    task = task_of(messages, system_prompt="Be brief.")
    assert [message.content for message in task.messages] == ["Rhyme.", "2+2="]


def test_plain_conversation_is_one_text_that_goes_on() -> None:
    messages = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4, "}]
    assert task_of([*messages, {"role": "user", "content": "3+3="}], as_chat=False).text == "2+2=4, 3+3="
