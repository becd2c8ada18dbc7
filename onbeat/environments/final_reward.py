"""The reward of a conversation by an installed reward of single responses: it sees the policy's last message."""

from collections.abc import Mapping, Sequence
from typing import Any

from onbeat.environments.types import Message, Task
from onbeat.installed import load_installed


def reward_of_answer(
    name: str, options: Mapping[str, Any], task: Task, conversation: Sequence[Message]
) -> float | Mapping[str, float]:
    """Score the last message of the policy. Raises ValueError without a name."""
    if name is None:
        raise ValueError(
            "the environment gives no reward: write get_reward, or name an installed one in options.reward"
        )
    context = {"question": task.question, "answer": task.answer, "metadata": task.metadata} | task.metadata
    reward: float | Mapping[str, float] = load_installed("onbeat.rewards", name)(
        last_answer(conversation), context, **options
    )
    return reward


def last_answer(conversation: Sequence[Message]) -> str:
    """Return the text of the policy's last message; empty if it never spoke."""
    texts = [message["content"] or "" for message in conversation if message["role"] == "assistant"]
    return texts[-1] if texts else ""
