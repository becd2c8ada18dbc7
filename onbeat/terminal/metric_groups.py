"""The curves of a job in the order in which people ask for them: reward and held-out sets first, then the rest by area.

Of the scores that a held-out set has twice, the named ones stand.
"""

from onbeat.charts.table import Curves, repeated_names

# The title of each group, and the beginnings of the names in it; a name belongs to the first group that fits.
GROUPS: dict[str, tuple[str, ...]] = {
    "reward": ("iteration/reward_", "reward/", "source/"),
    "held out": ("eval/",),
    "responses": ("rollout/", "episode/"),
    "training": ("train/", "token/"),
    "engine against trainer": ("iteration/mismatch_", "iteration/staleness_"),
    "speed": ("iteration/",),
}
REST = "other"
FIRST = ("iteration/reward_mean", "iteration/reward_std", "eval/reward_mean")  # before the others of their groups


def group_metrics(series: Curves) -> dict[str, list[str]]:
    """Return the names of the curves that have points by the title of their group, groups and names in order.

    >>> group_metrics({"train/kl": [(0, 1.0)], "reward/a_mean": [(0, 1.0)], "iteration/reward_mean": [(0, 0.5)]})
    {'reward': ['iteration/reward_mean', 'reward/a_mean'], 'training': ['train/kl']}
    """
    groups: dict[str, list[str]] = {title: [] for title in (*GROUPS, REST)}
    repeated = repeated_names(series)
    for name in sorted(series, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name)):
        if series[name] and name not in repeated:
            groups[title_of(name)].append(name)
    return {title: names for title, names in groups.items() if names}


def title_of(name: str) -> str:
    return next((title for title, beginnings in GROUPS.items() if name.startswith(beginnings)), REST)
