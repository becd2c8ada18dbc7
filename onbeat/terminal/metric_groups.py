"""The curves of a job in the order in which people ask for them: reward and held-out sets first, then the rest by area.

The first of several named held-out sets has its scores twice, as `eval/reward_mean` for readers of one set and as
`eval/NAME/reward_mean`. Here the named ones stand.
"""

from collections.abc import Mapping, Sequence

Series = Mapping[str, Sequence[tuple[int, float]]]

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


def group_metrics(series: Series) -> dict[str, list[str]]:
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


def repeated_names(series: Series) -> set[str]:
    """Return the unnamed scores that a named held-out set has, too.

    >>> repeated_names({"eval/reward_mean": [(0, 0.5)], "eval/easy/reward_mean": [(0, 0.5)], "eval/num": [(0, 1.0)]})
    {'eval/reward_mean'}
    """
    scores = {name.removeprefix("eval/"): list(points) for name, points in series.items() if name.startswith("eval/")}
    return {
        f"eval/{score}"
        for score, points in scores.items()
        for other, others in scores.items()
        if other.endswith(f"/{score}") and others == points
    }
