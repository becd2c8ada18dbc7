"""The tries of a reward that does not answer."""

import asyncio

import pytest

from services.rollout.rewards import scorer
from services.rollout.rewards.outcome import UNREACHABLE, RewardRequest, RewardUnavailable
from services.rollout.rewards.scorer import LAST_MOMENT_S, SHORTEST_TRY_S, Scorer

REQUEST = RewardRequest("exact", {}, {}, ["4"], timeout_s=1.0, memory_limit_mb=512, max_attempts=1)


class Unreachable:
    """A source that records how many seconds each of its calls has."""

    def __init__(self):
        self.had_s = []

    async def score(self, request, missing, scores, deadline):
        self.had_s.append(deadline - asyncio.get_running_loop().time())
        raise RewardUnavailable(UNREACHABLE, "connection refused")


async def test_a_try_without_enough_time_is_not_made(monkeypatch):
    """The error is that of the last try: it would say only that there was no time."""
    source = Unreachable()
    monkeypatch.setattr(scorer, "delay_after", lambda num_failures: 0.04)
    monkeypatch.setattr(Scorer, "source", lambda self, name, options: source)
    tried = Scorer(1, {}, "rollout-1")
    deadline = asyncio.get_running_loop().time() + LAST_MOMENT_S + 4 * SHORTEST_TRY_S
    with pytest.raises(RewardUnavailable, match="connection refused"):
        await tried.score(REQUEST, deadline)
    await tried.close()
    assert len(source.had_s) > 1
    assert min(source.had_s) > 0.9 * SHORTEST_TRY_S
