"""The course of a job's training by its recorded metrics, and what counts as a difference between two parts of it."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from onbeat.config import JobConfig
from onbeat.contracts.records import EvaluationRecord, Finding, IterationRecord
from onbeat.contracts.response_stats import part_name

NUM_RECENT = 8  # iterations and evaluations that are looked at
MIN_EVALUATIONS = 4
MOSTLY = 0.75  # share of groups without signal from which there is a finding; of `solved_at` that is a good reward
SIGMAS = 2.0  # standard errors that a difference must exceed to count
STEADY = 1e-6  # a part that varies less, relative to its size, does not vary


@dataclass(frozen=True)
class Course:
    """The course of a job's training. All iterations are committed, all evaluations scored, both in order."""

    job_id: str
    config: JobConfig
    num_committed: int
    first: Sequence[IterationRecord]
    recent: Sequence[IterationRecord]
    evaluations: Sequence[EvaluationRecord]  # the last ones
    around_best: Sequence[IterationRecord]  # iterations from the best of these evaluations on

    @property
    def ends(self) -> tuple[list[IterationRecord], list[IterationRecord]]:
        """The first and the last iterations. In a young job they overlap, so these are its first and its last third."""
        if self.num_committed >= 2 * NUM_RECENT:
            return list(self.first), list(self.recent)
        records = {record.iteration: record for record in (*self.first, *self.recent)}
        known = [record for record in records.values() if record.reward_mean is not None]
        third = max(2, len(known) // 3)
        return known[:third], known[-third:]

    @property
    def has_risen(self) -> bool:
        """True if the reward of the last iterations is higher than that of the first ones."""
        return rises(*map(rewards_of, self.ends))

    @property
    def is_good(self) -> bool:
        """True if the mean reward of the last iterations is near the reward of a solved response; of several sources,
        if that of each is."""
        limits = self.config.solved_at_by_source
        if len(limits) == 1:
            return fmean(rewards_of(self.recent) or [0.0]) >= MOSTLY * self.config.solved_at > 0
        means = [(limit, self.mean(f"source/{name}/reward_mean")) for name, limit in limits.items()]
        known = [(limit, mean) for limit, mean in means if mean is not None]
        return bool(known) and all(mean >= MOSTLY * limit > 0 for limit, mean in known)

    @property
    def wanted(self) -> str:
        """The reward of a solved response, in words."""
        limits = set(self.config.solved_at_by_source.values())
        return f"solved_at = {min(limits):g}" if len(limits) == 1 else "solved_at of its source"

    @property
    def num_groups(self) -> int:
        """The number of groups of the last iterations that have responses."""
        return sum(record.num_groups - record.num_failed_groups for record in self.recent)

    @property
    def equal_share(self) -> float:
        """The share of groups without signal: by default, whose responses all got the same reward."""
        return self.total("rollout/uniform_groups") / max(1, self.num_groups)

    def total(self, name: str) -> float:
        return sum(record.metrics.get(name, 0.0) for record in self.recent)

    @property
    def main_part(self) -> str | None:
        """The part with the largest weight, as metrics call it: the outcome. None unless all prompts have the same
        rewards, and several."""
        if any(source.reward is not None or source.environment is not None for _, source in self.config.sources):
            return None
        rewards = [reward for reward in self.config.rewards if reward.part is not None]
        largest = max(rewards, key=lambda reward: abs(reward.weight), default=None)
        return part_name(largest.part) if len(rewards) > 1 and largest is not None and largest.part else None

    def mean(self, name: str, records: Sequence[IterationRecord] | None = None) -> float | None:
        """Return the mean of a metric over these records (default: the last ones); None where it is unknown."""
        values = [
            record.metrics[name] for record in (self.recent if records is None else records) if name in record.metrics
        ]
        return fmean(values) if values else None

    def find(self, sentence: str, key: str, *, is_problem: bool) -> Finding:
        return Finding(sentence=sentence, job_id=self.job_id, who=self.job_id, key=key, is_problem=is_problem)

    @property
    def lately(self) -> str:
        return f"in the last {len(self.recent)} iterations"


# ---- what counts as a difference ---------------------------------------------------------------------------------


def varies(records: Iterable[IterationRecord], part: str) -> bool:
    """Return whether a part of the reward differs within an iteration or from one to the next."""
    means = [record.metrics.get(f"reward/{part}_mean", math.nan) for record in records]
    spreads = [record.metrics.get(f"reward/{part}_std", math.nan) for record in records]
    bound = STEADY * max(1.0, *map(abs, means))
    return not (max(spreads) <= bound and max(means) - min(means) <= bound)


def gaps_of(records: Iterable[IterationRecord]) -> list[float]:
    gaps = (record.metrics.get("train/teacher_gap") for record in records)
    return [gap for gap in gaps if gap is not None]


def rewards_of(records: Iterable[IterationRecord]) -> list[float]:
    return [record.reward_mean for record in records if record.reward_mean is not None]


def rises(before: Sequence[float], after: Sequence[float]) -> bool:
    """Return whether the mean rises by more than chance explains."""
    if len(before) < 2 or len(after) < 2:
        return False
    error = math.sqrt(variance(before) / len(before) + variance(after) / len(after))
    return fmean(after) - fmean(before) > SIGMAS * error


def best_of(evaluations: Sequence[EvaluationRecord]) -> EvaluationRecord | None:
    """Return the evaluation with the highest reward; None of too few."""
    if len(evaluations) < MIN_EVALUATIONS:
        return None
    return max(evaluations, key=lambda record: -math.inf if record.reward_mean is None else record.reward_mean)


def is_below(record: EvaluationRecord, best: EvaluationRecord, num_prompts: int) -> bool:
    """Return whether a held-out reward is lower than the best one by more than chance explains. The standard error is
    that of independent prompts, not of independent responses: responses to one prompt are alike."""
    if record.reward_mean is None or best.reward_mean is None:
        return False
    spread = math.hypot(record.reward_std or 0.0, best.reward_std or 0.0) / math.sqrt(num_prompts)
    return best.reward_mean - record.reward_mean > SIGMAS * spread
