"""A model's chat template as text: messages and tools in, the text of the prompt out.

Calls are read in the form in which the template writes them, if it is one of `toolcalls`: a call is rendered, to see
which. Templates that know no tools, leave out their calls or results, or write calls in another form, get all of it
from us in the form of Hermes: the tools are described in the system message (in the first user message where the
template takes no system), calls are part of an answer's text, and the results of tools are given by the role `user`.
"""

import json
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

from onbeat.environments import Message
from services.prompts.prompt_tokenizer import PromptTokenizer
from services.rollout.episodes import toolcalls

SENTINEL = "a-text-that-stands-for-an-answer"
PROBE: Message = {"role": "user", "content": SENTINEL}
TOOL_NAME, TOOL_PURPOSE, ARGUMENT, RESULT = "name-of-a-tool", "purpose-of-a-tool", "its-argument", "what-a-tool-returns"
PROBE_TOOL = {
    "type": "function",
    "function": {"name": TOOL_NAME, "description": TOOL_PURPOSE, "parameters": {"type": "object", "properties": {}}},
}
CALL_ID = "000000000"
PROBE_CALL: list[Message] = [
    PROBE,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": CALL_ID, "type": "function", "function": {"name": TOOL_NAME, "arguments": {"query": ARGUMENT}}}
        ],
    },
    {"role": "tool", "tool_call_id": CALL_ID, "name": TOOL_NAME, "content": RESULT},
]
TOOLS_SECTION = """# Tools

You may call functions. These are the functions, one JSON object per line:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments as JSON between these tags, as often as there are calls:
<tool_call>
{{"name": "the name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


class TemplateRefusal(ValueError):
    """The template does not render these messages; the message says why."""


class ChatTemplate:
    """The chat template of a model, with tools; like the tokenizer, for one thread at a time."""

    def __init__(self, prompts: PromptTokenizer) -> None:
        self._prompts = prompts

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        *,
        is_prompt: bool,
        ended: Collection[int] = (),
    ) -> str:
        """Return the text of a conversation, see `PromptTokenizer.render`. Raises TemplateRefusal.

        Where messages of tools became one, messages are no longer where they were: then `ended` is left out.
        """
        if self._own_form is None:
            plain = self._without_tools(messages, tools)
            ended = ended if len(plain) == len(messages) else ()
            messages, tools = plain, ()
        return self._apply(messages, tools, is_prompt=is_prompt, ended=ended)

    def parse_calls(self, text: str) -> tuple[str, list[toolcalls.ToolCall]]:
        """Return the text of an answer without its calls of tools, and the calls."""
        return (self._own_form or toolcalls.parse)(text)

    def end_of_answer(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> str | None:
        """Return the text behind an answer to these messages, such as `<|im_end|>` and a line feed; None when the
        template does not show an answer there."""
        try:
            text = self.render([*messages, {"role": "assistant", "content": SENTINEL}], tools, is_prompt=False)
        except TemplateRefusal:
            return None
        _, separator, end = text.rpartition(SENTINEL)
        return end if separator else None

    def _apply(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        *,
        is_prompt: bool,
        ended: Collection[int] = (),
    ) -> str:
        from jinja2.exceptions import TemplateError

        try:
            return self._prompts.render(messages, tools, is_prompt=is_prompt, ended=ended)
        except (TemplateError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
            reason = str(error) or type(error).__name__
            raise TemplateRefusal(f"the model's chat template refuses messages of {roles}: {reason}") from error

    # ---- templates without tools ---------------------------------------------------------------------------------

    @cached_property
    def _own_form(self) -> toolcalls.Parser | None:
        """The form of the template's calls, if it shows tools, results, and calls in a form that can be read: some
        leave one of them out without a word."""
        try:
            text = self._apply(PROBE_CALL, [PROBE_TOOL], is_prompt=True)
            asked = self._apply([PROBE], [PROBE_TOOL], is_prompt=True)
        except TemplateRefusal:
            return None
        answer = text.removeprefix(asked).partition(self._prompts.tokenizer.eos_token or RESULT)[0]
        shown = (text, answer, answer)  # calls of Hermes may stand anywhere
        probe = toolcalls.ToolCall(TOOL_NAME, {"query": ARGUMENT})
        forms = (form for form, example in zip(toolcalls.FORMS, shown, strict=True) if probe in form(example)[1])
        return next(forms, None) if TOOL_PURPOSE in text and RESULT in text else None

    @cached_property
    def _takes_system(self) -> bool:
        try:
            text = self._apply([{"role": "system", "content": SENTINEL}, {**PROBE, "content": ""}], [], is_prompt=True)
        except TemplateRefusal:
            return False
        return SENTINEL in text

    def _without_tools(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
        plain: list[Message] = []
        for index, message in enumerate(messages):
            if message["role"] == "tool":
                if index and messages[index - 1]["role"] == "tool":
                    plain[-1]["content"] += f"\n{result_text(message)}"
                else:
                    plain.append({"role": "user", "content": result_text(message)})
            elif message.get("tool_calls"):
                calls = [call_text(call["function"]) for call in message["tool_calls"]]
                plain.append({"role": "assistant", "content": "\n".join([message["content"], *calls]).lstrip("\n")})
            else:
                plain.append(dict(message))
        return self._with_section(plain, tools) if tools else plain

    def _with_section(self, messages: list[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
        section = TOOLS_SECTION.format(tools="\n".join(to_json(tool) for tool in tools))
        if messages and messages[0]["role"] == "system":
            first = {**messages[0], "content": f"{messages[0]['content']}\n\n{section}".lstrip("\n")}
            return [first, *messages[1:]]
        if self._takes_system:
            return [{"role": "system", "content": section}, *messages]
        users = [index for index, message in enumerate(messages) if message["role"] == "user"]
        if not users:
            raise TemplateRefusal("the model's chat template has no place for tools: add a message of the role user")
        changed = list(messages)
        changed[users[0]] = {**messages[users[0]], "content": f"{section}\n\n{messages[users[0]]['content']}"}
        return changed


def call_text(function: dict[str, Any]) -> str:
    return f"<tool_call>\n{to_json(function)}\n</tool_call>"


def result_text(message: Message) -> str:
    return f"<tool_response>\n{message['content']}\n</tool_response>"


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
