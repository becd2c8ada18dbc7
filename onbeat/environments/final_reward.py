"""The reward of a conversation by an installed reward of single responses: it sees the policy's last message."""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from onbeat.contracts.installed import REWARDS, load_installed
from onbeat.contracts.reward_functions import takes_group
from onbeat.environments.session import Message
from onbeat.environments.types import Task

Reward = float | Mapping[str, float]
Score = Callable[[str, dict[str, Any], dict[str, Any], str], Awaitable[Reward]]


async def score_here(name: str, options: dict[str, Any], context: dict[str, Any], response: str) -> Reward:
    """Call a reward in this process, which it holds up."""
    result = load_installed(REWARDS, name)(response, context, **options)
    reward: Reward = await result if inspect.isawaitable(result) else result
    return reward


SCORE: ContextVar[Score] = ContextVar("SCORE", default=score_here)  # a rollout scores in a process for rewards


def check_reward(name: str) -> None:
    """Import an installed reward, before episodes are played in vain. Raises ValueError for one of whole groups."""
    if takes_group(load_installed(REWARDS, name)):
        message = f"the reward {name} compares the responses of a group, and an episode has one answer"
        raise ValueError(f"{message}; take a reward of one `response`")


async def reward_of_answer(
    name: str, options: Mapping[str, Any], task: Task, conversation: Sequence[Message]
) -> Reward:
    """Score the last message of the policy."""
    context = task.origin | {"question": task.question, "answer": task.answer, "metadata": task.metadata}
    return await SCORE.get()(name, dict(options), context, last_answer(conversation))


def last_answer(conversation: Sequence[Message]) -> str:
    """Return the text of the policy's last message; empty if it never spoke."""
    texts = [message["content"] or "" for message in conversation if message["role"] == "assistant"]
    return texts[-1] if texts else ""
