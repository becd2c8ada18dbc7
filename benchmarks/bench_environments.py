"""The environments of the benchmarks, and how services that a benchmark starts find them: as if they were installed."""

import asyncio
import os
from pathlib import Path
from typing import Any

from onbeat.environments import Message, Outcome, Session, Task
from onbeat.environments.messages import without_id
from onbeat.environments.tool_schema import tools_of_class
from onbeat.environments.tools import NO_TOOLS

ENTRIES = """[onbeat.environments]
bench_idle = bench_environments:Idle
bench_lookup = bench_environments:EveryAnswerCalls
"""
# Answers are cut by their length, and nothing is between an answer and the next message: both sides then have the same
# tokens. TRL takes only templates that show tools, their calls and their results; Onbeat keeps those with calls in the
# form of Hermes and Qwen.
TEMPLATE = """{%- if tools %}<|im_start|>system
{{ tools | tojson }}{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LINE = "The list has nothing under that name. Look for another one."


class Idle:
    """A game that takes its time before each of its turns. Its reward is always the same, so nothing is trained."""

    def __init__(self, num_turns: int, idle_s: float) -> None:
        self._turns_left, self._idle_s = num_turns, idle_s

    def init(self) -> None:
        """Begin with the prompt."""

    async def step(self, message: Message) -> tuple[str, float, bool]:
        await asyncio.sleep(self._idle_s)
        self._turns_left -= 1
        return LINE, 0.0, self._turns_left == 0


class Lookup:
    """A tool in the shape that TRL's `environment_factory` takes."""

    def reset(self, **row: Any) -> None:
        self._seen: set[str] = set()

    def look(self, text: str) -> str:
        """Look for a text in a list.

        Args:
            text: what is looked for
        """
        self._seen |= set(text)
        return LINE

    def get_reward(self) -> float:
        """Return a number that differs between most answers, so that every group is trained."""
        return len(self._seen) / 100


LOOKUP_TOOLS, _ = tools_of_class(Lookup, NO_TOOLS)


class EveryAnswerCalls:
    """Lookup, whose tool gets each answer of the policy but the last: the small model of the benchmark calls none."""

    def __init__(self, num_turns: int) -> None:
        self._num_turns = num_turns

    async def run(self, task: Task, policy: Session) -> Outcome:
        lookup, messages = Lookup(), list(task.messages)
        lookup.reset()
        tools = {tool.name: tool.on(lookup) for tool in LOOKUP_TOOLS}
        schemas = [tool.schema() for tool in tools.values()]
        for _ in range(self._num_turns - 1):
            messages.append(without_id(await policy.chat(messages, schemas)))
            answer = await tools["look"].call({"text": messages[-1]["content"]})
            messages.append({"role": "tool", "name": "look", "content": answer})
        await policy.chat(messages, schemas)
        return Outcome(lookup.get_reward())


def install(site: Path) -> None:
    """Write what `pip install` would leave behind, and put it on the path of all processes that this one starts."""
    from tests.installed import install as install_package  # processes of environments need nothing of the tests

    install_package(site, "bench_environments", ENTRIES)
    folders = (str(site), str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
