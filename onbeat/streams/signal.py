"""The signal of a group, `objective.signal`, or `signal` of its prompt's source: one rule for passes, divisor, replaced
groups, audit and replay.

    reward      s_i = the reward of response i, in float32
    solved      s_i = whether its reward reaches `solved_at`, that of its prompt's source if it has one
    teacher     every group has signal: the job learns from its teacher alone, whatever the rewards (distill)
    part:NAME   s_i = the value of that part of its reward, before the weight, in float32; without the part: no s_i

A response without a reward has no s_i. A group has signal when its s_i are not all equal. Without signal its advantages
are exactly 0, whatever its rewards.
The rule needs only the job and the group, which are on record, so that a replay and several brokers decide alike.
"""

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from onbeat.config import JobConfig
from onbeat.contracts.response_stats import is_solved
from onbeat.objectives import find_objective
from onbeat.objectives.base.objective import PART, is_signal
from onbeat.streams.codec import MAX_REWARD, Response, RolloutGroup, do_rewards_differ, given_rewards

TEACHER = "teacher"  # the rule of objectives without rewards


@dataclass(frozen=True)
class Signal:
    rule: str = "reward"
    solved_at: float = 1.0
    by_source: Mapping[str, float] = field(default_factory=dict)  # source -> its own `solved_at`
    rules: Mapping[str, str] = field(default_factory=dict)  # source -> its own `signal`

    @classmethod
    def of(cls, config: JobConfig) -> "Signal":
        rules = {source.name or "": source.signal for _, source in config.sources if source.signal is not None}
        rule = config.objective.signal if config.objective.needs_reward else TEACHER
        return cls(rule, config.solved_at, config.solved_at_by_source, rules)

    @classmethod
    def of_record(cls, config: Mapping[str, Any]) -> "Signal":
        """Return the signal of a recorded job. One of an older release has none, or a key of its own objective. An
        objective that is not installed here counts as one by rewards."""
        objective = config.get("objective") or {}
        rule = objective.get("signal")
        sources = data if isinstance(data := config.get("data"), list) else []
        by_source = {source["name"]: source["solved_at"] for source in sources if source.get("solved_at") is not None}
        rule = rule if isinstance(rule, str) and is_signal(rule) else "reward"
        rules = {source["name"]: source["signal"] for source in sources if source.get("signal") is not None}
        rule = rule if needs_reward(objective.get("type", "")) else TEACHER
        return cls(rule, config.get("solved_at", 1.0), by_source, rules)

    def rule_of(self, source: str) -> str:
        return self.rule if self.rule == TEACHER else self.rules.get(source, self.rule)

    def is_in(self, group: RolloutGroup) -> bool:
        """Return whether the group has signal; False if it failed."""
        rule = self.rule_of(group.source)
        if rule == TEACHER or group.is_supervised:
            return bool(group.responses)
        if rule == "reward":
            return do_rewards_differ(group)
        if rule == "solved":
            solved_at = self.by_source.get(group.source, self.solved_at)
            return len({is_solved(reward, solved_at) for reward in given_rewards(group)}) > 1
        return does_part_differ(rule.removeprefix(PART), group.responses)

    @property
    def words(self) -> str:
        """The words for groups without signal, of any source: `their responses had equal rewards`."""
        return "no signal (by the rule of their source)" if self.rules else self.words_of("")

    def words_of(self, source: str) -> str:
        """Return the words for a group of this source without signal: `its responses had equal rewards`."""
        return "equal rewards" if self.rule_of(source) == "reward" else f"no signal ({self.key_of(source)})"

    def key_of(self, source: str) -> str:
        """Return the key of the job that has the rule for this source, with its value."""
        return f"{'data' if source in self.rules else 'objective'}.signal = {self.rule_of(source)}"


def needs_reward(objective: str) -> bool:
    """Return whether the objective of this name learns from rewards; True for one that is not installed here."""
    try:
        return find_objective(objective).needs_reward
    except ValueError:
        return True


def does_part_differ(name: str, responses: Iterable[Response]) -> bool:
    """Return whether a part of the reward differs in float32 between the responses that have it."""
    values = [response.reward_parts[name] for response in responses if name in response.reward_parts]
    return len(set(array("f", [value for value in values if abs(value) <= MAX_REWARD]))) > 1
