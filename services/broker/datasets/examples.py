"""Rows of examples: each becomes a whole conversation, which ends with the answer to be learned."""

from typing import Any

from onbeat.config import RowData
from onbeat.config.explain import MAX_SHOWN
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


def to_example(row: dict[str, Any], index: int, data: RowData) -> PromptItem:
    """Convert row `index` of the file: a prompt and its response, or without an answer's field a conversation. Raises
    DatasetError with a message that goes behind the name of the row."""
    check_columns(row, data)
    if not data.answer_field:
        conversation = pick(row, data.prompt_field, MESSAGES)
        messages = to_conversation(conversation, data)
        return PromptItem(
            messages=messages, context={"answer": None}, row=index, changes=list(changes_of_messages(conversation))
        )
    prompt = pick(row, data.prompt_field, FIELD)
    response = pick(row, data.answer_field, RESPONSE)
    if not is_text(response):
        raise DatasetError(RESPONSE, f"has a response that is no text: {str(response)[:MAX_SHOWN]!r}; write a string")
    if not response.strip():
        raise DatasetError(RESPONSE, "has an empty response; write one, or leave the row out")
    messages = [*to_messages(prompt, data), ChatMessage(role="assistant", content=response)]
    return PromptItem(messages=messages, context={"answer": None}, row=index, changes=list(changes_of_messages(prompt)))


def to_conversation(conversation: Any, data: RowData) -> list[ChatMessage]:
    """Return the messages of a row. Raises DatasetError unless they end with an answer, and no answer is empty."""
    if not isinstance(conversation, list) or not conversation:
        shown = str(conversation)[:MAX_SHOWN]
        raise DatasetError(MESSAGES, f"has no list of {{role, content}} messages in {data.prompt_field!r}: {shown!r}")
    try:
        messages = list(read_messages(conversation))
    except DatasetError as error:
        raise DatasetError(MESSAGES, error.message) from error
    if messages[-1].role != "assistant":
        message = f"ends with a message of the role {messages[-1].role}, so that there is no answer to learn"
        raise DatasetError(MESSAGES, f"{message}; end it with one of the assistant")
    for number, message_of_row in enumerate(messages, start=1):
        if message_of_row.role == "assistant" and not message_of_row.content.strip():
            raise DatasetError(MESSAGES, f"has an empty answer in message {number}; write one, or leave the row out")
    if data.system_prompt is not None:
        messages.insert(0, ChatMessage(role="system", content=data.system_prompt))
    return messages
