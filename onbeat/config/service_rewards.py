"""The options of the rewards that ask a service: `http`, whose other options go to the service, and `judge`."""

import re
from collections.abc import Iterator

from onbeat.config.explain import MAX_SHOWN, show
from onbeat.contracts.rewards import JUDGE_MODES, JUDGE_REWARD, MAX_OPPONENTS, NUM_OPPONENTS, PAIRS, RewardConfig

SERVICE_NAME = re.compile(r"\w[\w.-]{0,63}", re.ASCII)
JUDGE_OPTIONS = ("service", "rubric", "mode", "opponents")


def problems_of_service_reward(reward: RewardConfig) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the options: the key below the reward, and what is wrong with it. Of the service only
    the form of its name is checked: the services are in the settings of the rollouts."""
    service = reward.options.get("service")
    if not isinstance(service, str) or not SERVICE_NAME.fullmatch(service):
        yield (
            "options.service",
            f"reward {reward.name} needs the name of a service here (letters, digits, _ . -; at most 64), got "
            f"{show(service)}; its address is in ONBEAT_REWARD_SERVICES of the rollouts",
        )
    if reward.name == JUDGE_REWARD:
        yield from problems_of_judge(reward)


def problems_of_judge(reward: RewardConfig) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the options of a judge, all of which are Onbeat's own."""
    options = reward.options
    rubric, mode = options.get("rubric"), options.get("mode", JUDGE_MODES[0])
    for option in options:
        if option not in JUDGE_OPTIONS:
            known = ", ".join(JUDGE_OPTIONS)
            yield "options", f"reward judge has no option {option[:MAX_SHOWN]!r}; it has: {known}"
    if not isinstance(rubric, str) or not rubric.strip():
        yield (
            "options.rubric",
            "reward judge needs a text that says what a good response is, such as 'Is it polite and short?'",
        )
    if mode not in JUDGE_MODES:
        yield "options.mode", f"reward judge has the modes {', '.join(JUDGE_MODES)}, not {show(mode)}"
    opponents = options.get("opponents", NUM_OPPONENTS)
    if mode != PAIRS and "opponents" in options:
        yield "options.opponents", "only mode = 'pairs' has opponents; leave this out"
    elif type(opponents) is not int or opponents not in range(2, MAX_OPPONENTS + 1, 2):
        yield (
            "options.opponents",
            f"each response meets an even number of others, from 2 to {MAX_OPPONENTS}, as it is shown first to half "
            f"of them; got {show(opponents)}",
        )
