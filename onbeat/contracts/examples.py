"""The check of an example's messages, at the submission of a job and again where the trainer tokenises them."""

from collections.abc import Mapping, Sequence
from typing import Literal

Learn = Literal["answers", "last_answer", "all"]  # all answers of the assistant; its last one; every token


def problem_of_example(messages: Sequence[Mapping[str, str]], learn: Learn, *, is_chat: bool = True) -> str:
    """Return why messages are no conversation with an answer to learn, in words behind the name of the row; '' if they
    are. `is_chat`: a chat template shows them; else there are only a prompt and its response.

    >>> problem_of_example([{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}], "answers")
    ''
    """
    if not messages or messages[-1].get("role") != "assistant":
        role = messages[-1].get("role") if messages else None
        return f"ends with a message of the role {role!r}, which has no answer; end it with one of the assistant"
    if messages[0]["role"] == "assistant":
        return "begins with an answer, and has no prompt before it; write one"
    for number, message in enumerate(messages, start=1):
        if others := sorted(key for key in message if key not in ("role", "content")):
            return f"has {', '.join(others)} in message {number}, which would not be shown"
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    for number, answer in enumerate(answers, start=1):
        if not answer.strip() and (learn != "last_answer" or number == len(answers)):
            return f"has an empty answer, number {number} of {len(answers)}; write one, or leave the row out"
    roles = [message["role"] for message in messages]
    if not is_chat and roles != ["user", "assistant"]:
        return (
            f"has messages of {', '.join(roles)}, and without a chat template there are only a prompt and its "
            "response; give the model a template (model.chat_template_file), or split the row"
        )
    return ""
