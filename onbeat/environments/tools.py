"""Tools of a class that the policy calls until it answers without a call."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from onbeat.environments.calls import call_with_row, row_of
from onbeat.environments.final_reward import last_answer, reward_of_answer
from onbeat.environments.messages import without_id
from onbeat.environments.session import EpisodeOver, Message, Session
from onbeat.environments.text_calls import announce, call_in_text
from onbeat.environments.tool_schema import Tool, tools_of_class
from onbeat.environments.types import Outcome, Task

NO_TOOLS = {"reset", "get_reward"}
NO_REWARD = "the class gives no reward: write get_reward, or name an installed one in options.reward"


@dataclass(frozen=True)
class ToolsOptions:
    """The options of a job that are for the adapter, not for the user's class."""

    # native: in the form of the model's chat template. text: `name(1, "x")` in an answer.
    tool_calls: Literal["native", "text"] = "native"
    reward: str | None = None  # an installed reward of the last answer; needed unless the class has get_reward
    reward_options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def split(cls, options: Mapping[str, Any]) -> tuple["ToolsOptions", dict[str, Any]]:
        """Return the adapter's options and the others. Raises ValueError."""
        names = {option.name for option in fields(cls)}
        chosen = cls(**{name: value for name, value in options.items() if name in names})
        if chosen.tool_calls not in ("native", "text"):
            raise ValueError(f'tool_calls is {chosen.tool_calls!r}; it has to be "native" or "text"')
        return chosen, {name: value for name, value in options.items() if name not in names}


class ToolsEnvironment:
    """An environment of objects with tools, one for each episode. Public methods of the class, and of its bases in the
    same package, are tools, besides

    reset(**row)     begins an episode; a text that it returns is appended to the prompt
    get_reward()     returns the reward in the end, or a mapping with "reward" and its parts. It may have a parameter
                     `response`, the text of the policy's last message, and `messages`, the whole conversation
    """

    def __init__(self, of_class: type, make: Callable[[], Any], options: ToolsOptions) -> None:
        """Describe the tools of a class. Raises ValueError for a method that cannot be one."""
        self._make, self._options = make, options
        self._tools, left_out = tools_of_class(of_class, NO_TOOLS)
        about = f"{', '.join(left_out)} are not offered as tools: they are of another package"
        self.warning = f"{about}; to offer one, define it in {of_class.__name__}" if left_out else ""

    async def run(self, task: Task, policy: Session) -> Outcome:
        """Play until the policy calls no tool, or the episode has no turn left; then ask for the reward."""
        instance = self._make()
        said = await call_with_row(instance.reset, row_of(task)) if hasattr(instance, "reset") else None
        conversation = list(task.messages)
        if not isinstance(said, str | None):
            raise ValueError(f"reset returned {said!r:.200}; it has to return a text, which is appended to the prompt")
        if said is not None:
            conversation[-1] = {**conversation[-1], "content": conversation[-1]["content"] + said}
        tools = {tool.name: tool.on(instance) for tool in self._tools}
        await converse(conversation, tools, policy, self._options.tool_calls)
        if hasattr(instance, "get_reward"):
            end = {"response": last_answer(conversation), "messages": conversation}
            return as_outcome(await call_with_row(instance.get_reward, end))
        assert self._options.reward is not None, NO_REWARD
        reward = await reward_of_answer(self._options.reward, self._options.reward_options, task, conversation)
        return as_outcome(reward)


async def converse(
    conversation: list[Message], tools: Mapping[str, Tool], policy: Session, style: Literal["native", "text"] = "native"
) -> None:
    """Extend a conversation by answers and what tools say to them. A tool may end it, too: it raises EpisodeOver."""
    schemas = [tool.schema() for tool in tools.values()] if style == "native" else None
    if style == "text":
        announce(conversation, tools)
    try:
        while True:
            answer = without_id(await policy.chat(conversation, schemas or None))
            conversation.append(answer)
            results = [await result_of(call, tools) for call in answer.get("tool_calls") or ()]
            if style == "text":
                results = await call_in_text(answer["content"] or "", tools)
            if not results:
                return
            conversation.extend(results)
    except EpisodeOver:
        pass


async def result_of(tool_call: Mapping[str, Any], tools: Mapping[str, Tool]) -> Message:
    """Run one call. An unknown tool or wrong arguments are reported to the policy."""
    function = tool_call["function"]
    tool = tools.get(function["name"])
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        arguments = None
    if tool is None:
        said = f"Error: there is no tool {function['name']!r}; there are: {', '.join(tools)}"
    elif not isinstance(arguments, dict):
        said = f"Error: the arguments of {function['name']} are no JSON object"
    else:
        said = await tool.call(arguments)
    return {"role": "tool", "tool_call_id": tool_call["id"], "name": function["name"], "content": said}


def as_outcome(reward: float | Mapping[str, float]) -> Outcome:
    if not isinstance(reward, Mapping):
        return Outcome(reward)
    parts = dict(reward)
    if "reward" not in parts:
        raise ValueError(f"the reward is a mapping without 'reward', it has only {sorted(map(str, parts))}")
    return Outcome(parts.pop("reward"), parts)
