"""The trial of a reward on the data's own answer, in the limited process that rollouts score with.

It needs what the reward imports. Where that is not installed beside the broker, the rollouts find out.
"""

import asyncio
import json
from typing import Any

from onbeat.config.explain import MAX_SHOWN
from onbeat.contracts.rewards import ZERO, RewardConfig
from onbeat.process.children import ChildDied, ChildProcess
from services.broker.datasets import PromptItem

CHILD = "services.rollout.rewards.child"
TRIAL_S = 20.0  # time for starting Python, importing the reward and scoring one response
EMPTY = ""  # the response that the own answer is compared with, where a reward scores a group
OWN_REWARDS = ("exact", "math", "regex", "reasoning_gym")

Answer = dict[str, Any]


async def review_on_data(
    field: str, reward: RewardConfig, item: PromptItem | None, num_groups: int = 0
) -> tuple[list[tuple[str, str]], list[str]]:
    """Return complaints (field, message) and notes about the reward in that field of the job.

    `item`: the first prompt; None: it has no data. `num_groups`: of the reward's pattern.
    """
    answer = item.context.get("answer") if item is not None else None
    needs_trial = reward.name == "math" or (reward.name == "regex" and num_groups > 0 and has_row(item))
    if reward.name in OWN_REWARDS and not needs_trial:  # these have been checked, and take any answer
        return [], []
    context, responses = ({}, []) if item is None or answer is None else (item.context, [str(answer), EMPTY])
    outcome = await score_own_answer(reward, context, responses)
    shown = repr(str(answer)[:MAX_SHOWN])
    if outcome is None or outcome.get("kind", "invalid") not in ("options", "raised", "invalid"):
        return [], []
    if outcome["step"] == "scored":
        is_zero = answer is not None and outcome["reward"] == 0
        return [], [f"reward {reward.name} gives the first prompt's own answer {shown} {ZERO}"] if is_zero else []
    if outcome["kind"] == "options":
        return [(f"{field}.options", f"reward {reward.name} does not take these: {outcome['message']}")], []
    message = f"reward {reward.name} fails on the first prompt's own answer {shown}: {outcome['message']}"
    return ([(f"{field}.name", message)], []) if reward.name in OWN_REWARDS else ([], [message])


def has_row(item: PromptItem | None) -> bool:
    return item is not None and item.row is not None


async def score_own_answer(reward: RewardConfig, context: dict[str, Any], responses: list[str]) -> Answer | None:
    """Score the first response, if there is one, in a process of its own; the others are its group. Return the score,
    or how that failed; None where it ended early."""
    first = list(range(len(responses)))[:1]
    request = {"request": 1, "reward": reward.name, "options": reward.options, "context": context, "positions": first}
    limits = str(reward.timeout_s), str(reward.memory_limit_mb)
    child = await ChildProcess.start("the scoring process", CHILD, *limits)
    try:
        async with asyncio.timeout(TRIAL_S):
            await child.send(request | {"responses": responses}, TRIAL_S)
            for _ in ("loaded", *first):
                answer: Answer = json.loads(await child.receive(TRIAL_S))
                if answer.get("step") in ("scored", "failed"):
                    return answer
    except (TimeoutError, ChildDied, ValueError):
        return None
    finally:
        await child.kill()
    return None
