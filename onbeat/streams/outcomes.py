"""The outcome of a group: how many of its responses were solved. `data.order = "difficulty"` chooses prompts by it.

The ledger keeps the outcomes of an iteration from the acceptance of its groups to the end of the job's record, longer
than the groups themselves.
"""

from dataclasses import dataclass

from onbeat.config import JobConfig
from onbeat.contracts.response_stats import is_solved
from onbeat.streams.codec import RolloutGroup, given_rewards


@dataclass(frozen=True)
class Outcome:
    """`row`: row of the data, or its level; of the second of several sources, and so on, behind the source's number."""

    row: int
    num_solved: int
    num_rewarded: int  # responses with a reward; 0: the group failed

    @classmethod
    def of_group(cls, config: JobConfig, group: RolloutGroup) -> "Outcome | None":
        """Return the group's outcome; None where no choice needs it."""
        source = next((source for _, source in config.sources if (source.name or "") == group.source), None)
        if source is None or source.chooses is None or group.is_evaluation or not group.HasField("data_row"):
            return None
        rewards, solved_at = given_rewards(group), config.solved_at_by_source[group.source]
        return cls(group.data_row, sum(is_solved(reward, solved_at) for reward in rewards), len(rewards))

    @classmethod
    def read(cls, words: str) -> "Outcome":
        return cls(*map(int, words.split()))

    def __str__(self) -> str:
        return f"{self.row} {self.num_solved} {self.num_rewarded}"
