"""A session whose policy says what the test wrote. It records what it was asked."""

import copy
import json
from typing import Any

from onbeat.environments import EpisodeOver, Message


def says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def calls(name: str, arguments: dict[str, Any] | str, text: str = "") -> Message:
    """Return a message that calls one tool."""
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    function = {"name": name, "arguments": written}
    return {**says(text), "tool_calls": [{"id": "call-1", "type": "function", "function": function}]}


class ScriptedSession:
    """A session that answers with one message after another; afterwards the episode has no turn left."""

    url, key = "http://127.0.0.1:9/v1", "key"

    def __init__(self, *answers: Message) -> None:
        self._answers = list(answers)
        self.asked: list[list[Message]] = []
        self.tools: list[dict[str, Any]] | None = None

    async def chat(
        self, messages: list[Message], tools: list[dict[str, Any]] | None = None, max_tokens: int | None = None
    ) -> Message:
        self.asked.append(copy.deepcopy(messages))
        self.tools = tools
        if not self._answers:
            raise EpisodeOver("no turns left")
        return {**self._answers.pop(0), "id": f"id-{len(self.asked)}"}

    async def close(self) -> None:
        """Do nothing."""
