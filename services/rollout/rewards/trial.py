"""`python -m services.rollout.rewards.trial` asks the services of rollouts for rewards, for `onbeat reward try`.

It knows the services that a rollout with the same environment would know (ONBEAT_REWARD_SERVICES), and asks once: what
a rollout would try again is a failure here. It speaks JSON lines, with an answer for each response of a request:

    -> {"request": 6, "reward": "http", "options": {"service": "check"}, "context": {"answer": "4"},
        "responses": ["4", "5"], "timeout_s": 10.0, "seed": 1}
    <- {"request": 6, "step": "scored", "reward": 1.0, "parts": {}}
    <- {"request": 7, "step": "failed", "kind": "unreachable", "message": "service check answers 502 Bad Gateway"}
"""

import asyncio
import json
import sys
from typing import Any

from onbeat.process.settings import read_settings
from services.rollout.rewards.outcome import RewardError, RewardRequest, Score
from services.rollout.rewards.pool import RewardPool
from services.rollout.rewards.scorer import Scorer
from services.rollout.settings import Settings


async def answer_all() -> None:
    scorer = Scorer(1, read_settings(Settings, "rollout").reward_services, "this command")
    for line in sys.stdin:
        for answer in await answer_one(scorer, json.loads(line)):
            sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    await scorer.close()


async def answer_one(scorer: Scorer, given: dict[str, Any]) -> list[dict[str, Any]]:
    request = RewardRequest(
        name=given["reward"],
        options=given["options"],
        context=given["context"],
        responses=given["responses"],
        timeout_s=given["timeout_s"],
        memory_limit_mb=0,  # services have no limit of memory
        max_attempts=1,
        seed=given["seed"],
    )
    scores: dict[int, Score] = {}
    failure: dict[str, str] = {}
    num = len(request.responses)
    deadline = asyncio.get_running_loop().time() + request.timeout_s * num
    try:
        service = scorer.source(request.name, request.options)
        assert not isinstance(service, RewardPool)
        await service.score(request, range(num), scores, deadline)
    except RewardError as error:
        failure = {"step": "failed", "kind": error.kind, "message": str(error).removeprefix(f"{error.kind}: ")}
    scored = {
        index: {"step": "scored", "reward": score.reward, "parts": score.parts} for index, score in scores.items()
    }
    return [{"request": given["request"] + index} | scored.get(index, failure) for index in range(num)]


if __name__ == "__main__":
    asyncio.run(answer_all())
