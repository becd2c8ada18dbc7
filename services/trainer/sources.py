"""The curves of each source of a job that has several: `source/NAME/...`."""

from onbeat.contracts.response_stats import is_solved
from onbeat.streams.codec import RolloutGroup, given_rewards
from onbeat.streams.signal import Signal

START = "source/"


def source_sums(group: RolloutGroup, solved_at: float, signal: Signal) -> dict[str, float]:
    """Return a group's sums for the report; {} in a job of one source."""
    if not group.source:
        return {}
    rewards = given_rewards(group)
    sums: dict[str, float] = {
        "groups": 1,
        "uniform_groups": bool(group.responses) and not signal.is_in(group),
        "responses": len(rewards),
        "reward": sum(rewards),
        "solved": sum(is_solved(reward, solved_at) for reward in rewards),
    }
    return {f"{START}{group.source}/{name}": value for name, value in sums.items()}


def take_source_scores(sums: dict[str, float]) -> dict[str, float]:
    """Take the sums of all sources out of those of an iteration, and return the curves of each: the numbers of all
    groups and of those without signal; of responses, if there are any, the mean reward and the solved share."""
    names = [name.removesuffix("/groups") for name in sums if name.startswith(START) and name.endswith("/groups")]
    scores = {}
    for name in names:
        num_responses, reward, solved = (sums.pop(f"{name}/{key}") for key in ("responses", "reward", "solved"))
        for key in ("groups", "uniform_groups"):
            scores[f"{name}/{key}"] = sums.pop(f"{name}/{key}")
        if num_responses:
            scores |= {f"{name}/reward_mean": reward / num_responses, f"{name}/solved_frac": solved / num_responses}
    return scores
