"""A row's prompt as messages. What a prompt holds and no message would show is refused by name."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from onbeat.config import RowData
from onbeat.config.explain import MAX_SHOWN
from services.broker.datasets import ChatMessage, DatasetError

ROLES = ("system", "developer", "user", "assistant", "tool")  # roles of chat templates
FIELD = "data.prompt_field"
REMEDY = "render it into a text with the model's template and set as_chat = false, or take it out of the row"
# Columns that data sets in the field use for inputs of the model, beside the prompt.
INPUT_COLUMNS = {"audio", "audios", "chat_template_kwargs", "documents", "functions", "history", "image", "image_path"}
INPUT_COLUMNS |= {"image_url", "image_urls", "images", "pixel_values", "system", "system_message", "system_prompt"}
INPUT_COLUMNS |= {"template_kwargs", "tools", "video", "videos"}
# The other half of the task, in data sets whose prompt is in a column of this name.
COMPANIONS = {"instruction": {"context", "input"}, "question": {"choices", "context", "options", "passage"}}
MESSAGES_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](role|content|from|value)["']\s*:""")
EMPTY: tuple[Any, ...] = (None, False, "", [], {})


def check_columns(row: Mapping[str, Any], data: RowData, teacher_field: str | None = None) -> None:
    """Raise DatasetError for a column that looks like an input of the model, which gets the prompt alone."""
    used = {data.prompt_field, data.answer_field, teacher_field, *data.metadata_only}
    inputs = INPUT_COLUMNS | COMPANIONS.get(data.prompt_field, set())
    for name in sorted(row.keys() & inputs - used):
        if not is_empty(row[name]):
            message = f"has something in {name!r}, which the model would not see; take the column out, or name it in "
            raise DatasetError("data.metadata_only", f"{message}metadata_only if it is for the reward alone")


def pick(row: Mapping[str, Any], name: str, field: str) -> Any:
    """Return the value of a field: by its own name, or by a path of names with dots between them."""
    value: Any = row.get(name)
    if value is None:
        value = row
        for key in name.split("."):
            value = value.get(key) if isinstance(value, dict) else None
    if value is None and name in row:
        raise DatasetError(field, f"has null in {name!r}; give it a value, or remove the row")
    if value is None:
        there, key = ", ".join(sorted(row)) or "nothing", field.rpartition(".")[2]
        hint = ', or to "": there are no answers' if field == "data.answer_field" else ""
        raise DatasetError(field, f"has no {name!r}; it has: {there}. Set {key} to one of them{hint}")
    return value


def to_messages(prompt: Any, data: RowData) -> list[ChatMessage]:
    """Return the prompt's messages, [] for a plain prompt. Raises DatasetError if it has neither of the two shapes."""
    if is_text(prompt):
        if data.as_chat and MESSAGES_AS_TEXT.match(prompt):
            message = "has a list of messages that was written as a text, which the model would see as it stands; "
            raise DatasetError(FIELD, f"{message}write the list itself: {prompt[:MAX_SHOWN]}")
        messages = [ChatMessage(role="user", content=prompt)] if data.as_chat else []
    elif isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        if not data.as_chat:
            raise DatasetError("data.as_chat", "has a list of messages as its prompt; set as_chat = true")
        messages = list(read_messages(prompt))
        if messages[-1].role == "assistant":
            message = "ends with a message of the assistant's, which would be shown as finished, and not continued; "
            raise DatasetError(FIELD, f"{message}{REMEDY}")
    elif isinstance(prompt, str):
        raise DatasetError(FIELD, f"has half a surrogate pair in its prompt, which is no text: {prompt[:MAX_SHOWN]!a}")
    else:
        shapes = "a string nor a list of {role, content}"
        raise DatasetError(FIELD, f"has a prompt that is neither {shapes}: {str(prompt)[:MAX_SHOWN]}")
    texts = [message.content for message in messages] or [prompt]
    if not any(text.strip() for text in texts):
        raise DatasetError(FIELD, "has an empty prompt")
    if data.system_prompt is not None:
        messages.insert(0, ChatMessage(role="system", content=data.system_prompt))
    return messages


def read_messages(prompt: list[Any]) -> Iterator[ChatMessage]:
    """Convert the messages of a row. Raises DatasetError with the number of the message, from 1."""
    for number, message in enumerate(prompt, start=1):
        try:
            yield read_message(message)
        except ValueError as error:
            raise DatasetError(FIELD, f"has a message {number} {error}") from error


def changes_of_messages(prompt: Any) -> Iterator[str]:
    """Yield how the messages of a prompt that can be read differ from what stands in its row."""
    messages = prompt if isinstance(prompt, list) else []
    if any(isinstance(message["content"], list) for message in messages):
        yield "parts of text are joined to one content"
    if any(message["role"] == "developer" for message in messages):
        yield "the role developer is written as system"


def read_message(message: Any) -> ChatMessage:
    """Convert one message. Raises ValueError, in words behind `message 3`."""
    if not isinstance(message, dict):
        raise ValueError(f"that is {str(message)[:MAX_SHOWN]!r}, and not {{role, content}}")
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"of the role {str(role)[:MAX_SHOWN]!r}; the roles are {', '.join(ROLES)}")
    if others := sorted(str(key) for key in message if key not in ("role", "content") and not is_empty(message[key])):
        raise ValueError(f"with {', '.join(others)}, which the prompt would not show; {REMEDY}")
    # `developer` is the newer name of `system`, and many templates leave it out without a word.
    return ChatMessage(role="system" if role == "developer" else role, content=read_content(message.get("content")))


def read_content(content: Any) -> str:
    """Return the text of a message; parts of text are joined. Raises ValueError."""
    if is_text(content):
        return str(content)
    if content is None:
        raise ValueError("without content; write a text, or take the message out")
    if not isinstance(content, list):
        raise ValueError(f"whose content is neither a string nor a list of parts: {str(content)[:MAX_SHOWN]!r}")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if kind in (None, "text") and isinstance(part, dict) else part
        if not is_text(text):
            raise ValueError(
                f"with a part of the type {str(kind or part)[:MAX_SHOWN]!r}; a policy here reads text only"
            )
        texts.append(str(text))
    return "".join(texts)


def is_empty(value: Any) -> bool:
    return any(value is nothing or (type(value) is type(nothing) and value == nothing) for nothing in EMPTY)


def is_text(value: Any) -> bool:
    """Return whether the value is text. JSON can carry halves of surrogate pairs, which are not."""
    return isinstance(value, str) and value.encode("utf-8", "ignore").decode() == value
