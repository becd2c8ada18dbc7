"""The trial of a reward on the data's own answer, in the limited process that rollouts score with.

It needs what the reward imports. Where that is not installed beside the broker, the rollouts find out.
"""

import asyncio
import json
from typing import Any

from onbeat.config.explain import MAX_SHOWN
from onbeat.contracts.rewards import RewardConfig
from onbeat.process.children import ChildDied, ChildProcess
from services.broker.datasets import PromptItem

CHILD = "services.rollout.rewards.child"
TRIAL_S = 20.0  # time for starting Python, importing the reward and scoring one response
REWARDS_THAT_COMPARE = ("exact", "math", "regex")  # answers of the prompt; regex compares the captured text
MARK = "#### "  # mark of the answer at the end of a solution, as in GSM8K
OWN_REWARDS = ("exact", "math", "regex", "reasoning_gym")

Answer = dict[str, Any]


def compares_with_answer(reward: RewardConfig, num_groups: int) -> bool:
    """Return whether the reward needs the prompt's answer. `num_groups`: capture groups in its pattern; regex needs an
    answer only with one.

    >>> compares_with_answer(RewardConfig(name="regex"), 0), compares_with_answer(RewardConfig(name="regex"), 1)
    (False, True)
    """
    return reward.name in REWARDS_THAT_COMPARE and (reward.name != "regex" or num_groups > 0)


async def review_on_data(
    field: str, reward: RewardConfig, item: PromptItem | None, num_groups: int = 0
) -> tuple[list[tuple[str, str]], list[str]]:
    """Return complaints (field, message) and notes about the reward in that field of the job.

    `item`: the first prompt; None: it has no data. `num_groups`: of the reward's pattern.
    """
    answer = item.context.get("answer") if item is not None else None
    is_compared = compares_with_answer(reward, num_groups)
    if is_compared and isinstance(answer, str) and MARK in answer:
        shown = repr(answer[-MAX_SHOWN:])
        message = f"the answer of the first prompt ends with {shown}, which reward {reward.name} compares as a whole; "
        return [("data.answer_pattern", message + "set it to '#### (.+)'")], []
    if is_compared and isinstance(answer, list | dict | bool):
        kind = "a list" if isinstance(answer, list) else "a mapping" if isinstance(answer, dict) else json.dumps(answer)
        message = f"the answer of the first prompt is {kind}, and reward {reward.name} compares text; "
        return [("data.answer_field", message + "name a field with text, such as answer.value, or write one")], []
    if reward.name in OWN_REWARDS and reward.name != "math":  # these have been checked, and take any answer
        return [], []
    context, responses = ({}, []) if item is None or answer is None else (item.context, [str(answer)])
    failed = await find_failure(reward, context, responses)
    if failed is None or failed["kind"] not in ("options", "raised", "invalid"):
        return [], []
    if failed["kind"] == "options":
        return [(f"{field}.options", f"reward {reward.name} does not take these: {failed['message']}")], []
    shown = repr(str(answer)[:MAX_SHOWN])
    message = f"reward {reward.name} fails on the first prompt's own answer {shown}: {failed['message']}"
    return ([(f"{field}.name", message)], []) if reward.name in OWN_REWARDS else ([], [message])


async def find_failure(reward: RewardConfig, context: dict[str, Any], responses: list[str]) -> Answer | None:
    """Score the responses in a process of their own. Return how that failed; None where it did not, or ended early."""
    request = {"request": 1, "reward": reward.name, "options": reward.options, "context": context}
    limits = str(reward.timeout_s), str(reward.memory_limit_mb)
    child = await ChildProcess.start("the scoring process", CHILD, *limits)
    try:
        async with asyncio.timeout(TRIAL_S):
            await child.send(request | {"responses": responses}, TRIAL_S)
            for _ in ("loaded", *responses):
                answer: Answer = json.loads(await child.receive(TRIAL_S))
                if answer.get("step") == "failed":
                    return answer
    except (TimeoutError, ChildDied, ValueError):
        return None
    finally:
        await child.kill()
    return None
