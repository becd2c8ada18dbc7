"""Rows of examples: each becomes a whole conversation, which ends with the answer to be learned."""

from typing import Any

from onbeat.config import RowData
from onbeat.config.explain import MAX_SHOWN
from onbeat.contracts.examples import Learn, problem_of_example
from services.broker.datasets import ChatMessage, DatasetError, PromptItem
from services.broker.datasets.messages import (
    FIELD,
    changes_of_messages,
    check_columns,
    is_text,
    pick,
    read_messages,
    to_messages,
)

RESPONSE, MESSAGES = "data.response_field", "data.messages_field"


def to_example(row: dict[str, Any], index: int, data: RowData, learn: Learn, is_chat: bool) -> PromptItem:
    """Convert row `index` of the file: a prompt and its response, or without an answer's field a conversation. Raises
    DatasetError with a message that goes behind the name of the row."""
    check_columns(row, data)
    field = FIELD if data.answer_field else MESSAGES
    given = pick(row, data.prompt_field, field)
    messages = to_pair(given, row, data) if data.answer_field else to_conversation(given, data)
    if problem := problem_of_example([message.model_dump() for message in messages], learn, is_chat=is_chat):
        raise DatasetError(field, problem)
    return PromptItem(messages=messages, context={"answer": None}, row=index, changes=list(changes_of_messages(given)))


def to_pair(prompt: Any, row: dict[str, Any], data: RowData) -> list[ChatMessage]:
    """Return the messages of a prompt and its response. Raises DatasetError."""
    response = pick(row, data.answer_field, RESPONSE)
    if not is_text(response):
        raise DatasetError(RESPONSE, f"has a response that is no text: {str(response)[:MAX_SHOWN]!r}; write a string")
    if not response.strip():
        raise DatasetError(RESPONSE, "has an empty response; write one, or leave the row out")
    return [*to_messages(prompt, data), ChatMessage(role="assistant", content=response)]


def to_conversation(conversation: Any, data: RowData) -> list[ChatMessage]:
    """Return the messages of a row that is a whole conversation. Raises DatasetError."""
    if not isinstance(conversation, list) or not conversation:
        shown = str(conversation)[:MAX_SHOWN]
        raise DatasetError(MESSAGES, f"has no list of {{role, content}} messages in {data.prompt_field!r}: {shown!r}")
    try:
        messages = list(read_messages(conversation))
    except DatasetError as error:
        raise DatasetError(MESSAGES, error.message) from error
    system = [] if data.system_prompt is None else [ChatMessage(role="system", content=data.system_prompt)]
    return [*system, *messages]
