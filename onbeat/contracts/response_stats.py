"""Statistics of scored responses, the same ones for training (by the trainer) and for held-out sets (by the broker).

All of it are counts and sums, so that replicas of the trainer add theirs up in any order of groups.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

from pydantic import BaseModel

from onbeat.streams.codec import MAX_REWARD, Response

MAX_PARTS = 16  # parts of the reward that a job has curves of
MAX_FOUND = 256  # parts that are counted in one iteration or evaluation, in case that a reward invents names
MAX_PART_NAME = 40  # characters
SLACK = 1e-6  # sums of weighted parts are not exact

Sums = list[float]  # number of values, their sum, the sum of their squares


def is_solved(reward: float, solved_at: float) -> bool:
    return reward >= solved_at - SLACK


def part_name(name: str) -> str:
    """Return the name that a part has in metrics, which trackers and files take.

    >>> part_name("short enough?")
    'short_enough_'
    """
    return re.sub(r"[^\w.-]", "_", name)[:MAX_PART_NAME]


def more_parts(known: Sequence[str], candidates: Iterable[str]) -> list[str]:
    """Return the parts that a job has curves of: those it has, and what is found besides while there is a place left.

    A reward may invent names all the time, and a job with ever more curves could not be read.
    """
    return [*known, *sorted(set(candidates) - set(known))][:MAX_PARTS]


def parts_of(names: Iterable[str]) -> list[str]:
    """Return the parts of which there are metrics.

    >>> parts_of(["reward/short_mean", "reward/short_std", "response_tokens_max"])
    ['short']
    """
    matches = (re.fullmatch(r"reward/(.+)_mean", name) for name in names)
    return list(dict.fromkeys(match[1] for match in matches if match))


def rewards_of_sets(scores: Mapping[str, float]) -> dict[str, float]:
    """Return the mean reward of each named held-out set.

    >>> rewards_of_sets({"reward_mean": 0.5, "easy/reward_mean": 0.5, "reward/form_mean": 0.1})
    {'easy': 0.5}
    """
    matches = ((re.fullmatch(r"(?!reward/)([^/]+)/reward_mean", name), value) for name, value in scores.items())
    return {match[1]: value for match, value in matches if match}


class ResponseStats(BaseModel):
    """The statistics of groups that were scored. `solved_at`: the reward from which on a response counts as solved,
    where `by_source` has none for the source of its prompt."""

    solved_at: float = 1.0
    by_source: dict[str, float] = {}
    num_groups: int = 0
    num_solved_all: int = 0
    num_solved_none: int = 0
    lengths: Counter[int] = Counter()  # number of tokens -> responses
    parts: dict[str, Sums] = {}
    summed_parts: list[str] = []  # parts of the weighted sum that is the reward
    mixed: Counter[str] = Counter()  # such a part -> groups in which only some of the rewarded responses have it

    def solved_at_of(self, source: str) -> float:
        return self.by_source.get(source, self.solved_at)

    def add(self, responses: Sequence[Response], source: str = "") -> None:
        """Add a group. One that failed has no responses, and counts for nothing; of a response without a reward, only
        its length counts."""
        rewarded = [response for response in responses if not response.has_no_reward]
        num_solved = sum(is_solved(response.reward, self.solved_at_of(source)) for response in rewarded)
        self.num_groups += len(rewarded) > 0
        self.num_solved_all += len(rewarded) > 0 and num_solved == len(rewarded)
        self.num_solved_none += len(rewarded) > 0 and num_solved == 0
        for part in self.summed_parts:
            num_judged = sum(part in response.reward_parts for response in rewarded)
            self.mixed[part] += 0 < num_judged < len(rewarded)
        for response in responses:
            self.lengths[len(response.token_ids)] += 1
        for response in rewarded:
            for name, value in response.reward_parts.items():
                if abs(value) <= MAX_REWARD:
                    self._add_part(part_name(name), [1, value, value * value])

    def _add_part(self, name: str, sums: Sums) -> None:
        if name in self.parts or len(self.parts) < MAX_FOUND:
            self.parts[name] = [a + b for a, b in zip(self.parts.get(name, [0, 0, 0]), sums, strict=True)]

    def merge(self, other: Self) -> None:
        self.num_groups += other.num_groups
        self.num_solved_all += other.num_solved_all
        self.num_solved_none += other.num_solved_none
        self.lengths.update(other.lengths)
        self.mixed.update(other.mixed)
        for name, sums in other.parts.items():
            self._add_part(name, sums)

    def shape(self) -> dict[str, float]:
        """Return what is known of lengths and solved groups; empty without responses."""
        if not self.lengths:
            return {}
        lengths: dict[str, float] = {
            "response_tokens_min": min(self.lengths),
            "response_tokens_p95": percentile(self.lengths, 0.95),
            "response_tokens_max": max(self.lengths),
        }
        if not self.num_groups:
            return lengths
        return lengths | {
            "solved_all_frac": self.num_solved_all / self.num_groups,
            "solved_none_frac": self.num_solved_none / self.num_groups,
        }

    def mixed_scores(self) -> dict[str, float]:
        """Return `reward/PART_mixed_groups`, for parts that have any."""
        return {f"reward/{part}_mixed_groups": number for part, number in self.mixed.items() if number}

    def part_scores(self, names: Iterable[str]) -> dict[str, float]:
        """Return `reward/NAME_mean` and `reward/NAME_std` of these parts, over the responses that have them."""
        scores = {}
        for name in names:
            if name in self.parts:
                number, total, squares = self.parts[name]
                mean = total / number
                scores[f"reward/{name}_mean"] = mean
                scores[f"reward/{name}_std"] = math.sqrt(max(0.0, squares / number - mean * mean))
        return scores


def percentile(counts: Counter[int], share: float) -> int:
    """Return the smallest value that at least this share of the values does not exceed.

    >>> percentile(Counter([1, 2, 3, 4]), 0.5)
    2
    """
    wanted, seen = share * counts.total() - 1e-9, 0
    for value, number in sorted(counts.items()):
        seen += number
        if seen >= wanted:
            return value
    raise ValueError("a percentile of no values")
