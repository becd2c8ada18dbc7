"""Options of a job that decide what counts, for jobs whose processes die; each with the sign that it decided something.

Responses are random bytes of a tiny model: about a third has a letter, few have a digit.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onbeat.config import JobConfig
from onbeat.contracts.records import IterationRecord
from onbeat.streams.codec import RolloutGroup, do_rewards_differ, is_truncated
from onbeat.streams.signal import Signal
from tests.installed import install

OPINIONS = '''
def opine(responses: list[str], context: dict) -> list[float | None]:
    """Rank the responses by their characters; those of a length that 3 divides get no opinion."""
    ranks = sorted(responses)
    return [None if len(text) % 3 == 0 else float(ranks.index(text)) for text in responses]
'''
LETTER = {"name": "regex", "options": {"pattern": "[a-z]"}}
SMALL_PART = {"name": "regex", "options": {"pattern": "^.{1,4}$"}, "part": "short", "weight": 0.1}
PARTS = [LETTER | {"part": "letter"}, SMALL_PART]
SPARE = {"num_prompts_per_iteration": 4, "max_prompts_per_iteration": 12}
SAY = {"type": "jsonl", "path": "prompts.jsonl", "name": "say", "order": "difficulty"}
SOURCES = [
    SAY | {"weight": 2, "max_response_tokens": 6},
    {"type": "jsonl", "path": "prompts.jsonl", "name": "rank", "reward": {"name": "opinions"}, "solved_at": 1},
]
GAME = {"name": "guess_number", "options": {"max_guesses": 3}, "max_turns": 3}
PLAYED = [SAY | {"order": "in_order"}, SAY | {"order": "in_order", "name": "game", "environment": GAME}]

Group = RolloutGroup
Sign = Callable[[JobConfig, list[Group], list[IterationRecord]], bool]


def differs_in_vain(config: JobConfig, groups: list[Group], _: list[IterationRecord]) -> bool:
    """Return whether a group has other rewards and no signal, and whether one has signal."""
    signal = Signal.of(config)
    return any(map(signal.is_in, groups)) and any(
        do_rewards_differ(group) and not signal.is_in(group) for group in groups
    )


def is_replaced(config: JobConfig, groups: list[Group], records: list[IterationRecord]) -> bool:
    return sum(record.num_replaced for record in records) > 0


def abstains(config: JobConfig, groups: list[Group], _: list[IterationRecord]) -> bool:
    """Return whether a group with signal has a response without a reward."""
    signal = Signal.of(config)
    return any(signal.is_in(group) and any(r.has_no_reward for r in group.responses) for group in groups)


def is_partly_cut(config: JobConfig, groups: list[Group], _: list[IterationRecord]) -> bool:
    """Return whether a group with signal has a response that was cut and one that was not."""
    cut = [{is_truncated(response) for response in group.responses} for group in groups if do_rewards_differ(group)]
    return {True, False} in cut


def has_sources(config: JobConfig, groups: list[Group], _: list[IterationRecord]) -> bool:
    """Return whether each source has its limit and its reward, and both have signal."""
    signal, longest = Signal.of(config), {"say": 6, "rank": config.rollout.max_response_tokens}
    lengths = [len(response.token_ids) <= longest[group.source] for group in groups for response in group.responses]
    return all(lengths) and {group.source for group in groups if signal.is_in(group)} == {"say", "rank"}


def is_played(config: JobConfig, groups: list[Group], _: list[IterationRecord]) -> bool:
    """Return whether the responses of one source are episodes, and those of the other are not."""
    kinds = {(group.source, bool(response.turns)) for group in groups for response in group.responses}
    return kinds == {("say", False), ("game", True)}


def is_chosen(config: JobConfig, groups: list[Group], records: list[IterationRecord]) -> bool:
    """Return whether outcomes decided on prompts: the audit makes each choice again."""
    return all(record.num_chosen for record in records)


@dataclass(frozen=True)
class Options:
    sections: dict[str, Any]
    signs: tuple[Sign, ...]


GDPO = {"type": "grpo", "advantages_from": "parts", "signal": "part:letter"}
SOLVED = {"solved_at": 1.0, "objective": {"type": "dapo", "signal": "solved"}}
MASK = {"truncated": "mask", "stop": list("abcdefgh"), "num_samples_per_prompt": 4}
OPTIONS = {
    "": Options({}, ()),
    "solved": Options(SOLVED | {"reward": PARTS, "rollout": SPARE}, (differs_in_vain, is_replaced)),
    "part": Options(
        {"objective": {"type": "grpo", "signal": "part:letter"}, "reward": PARTS, "rollout": SPARE},
        (differs_in_vain, is_replaced),
    ),
    "parts": Options({"objective": GDPO, "reward": PARTS}, (differs_in_vain,)),
    "scaled parts": Options(
        {
            "objective": GDPO | {"advantages_from": "scaled_parts"},
            "reward": PARTS,
            "schedule": {"mode": "sync", "num_iterations": 2},
        },
        (differs_in_vain,),
    ),
    "opinions": Options(
        {"reward": {"name": "opinions", "options": {}}, "rollout": {"num_samples_per_prompt": 4}}, (abstains,)
    ),
    "mask": Options({"reward": LETTER, "rollout": MASK}, (is_partly_cut,)),
    "sources": Options({"data": SOURCES, "reward": LETTER}, (has_sources, is_chosen)),
    "environments": Options({"data": PLAYED, "reward": LETTER}, (is_played,)),
    "all": Options(
        SOLVED | {"data": SOURCES, "reward": PARTS, "rollout": SPARE | MASK},
        (differs_in_vain, is_replaced, abstains, is_partly_cut, has_sources, is_chosen),
    ),
}


def install_opinions(site: Path) -> str:
    """Install the reward `opinions` into a folder; return a PYTHONPATH with it."""
    install(site, "opinions", "[onbeat.rewards]\nopinions = opinions:opine\n", opinions=OPINIONS)
    return os.pathsep.join([str(Path(__file__).resolve().parents[2]), str(site)])


def check_signs(options: Options, config: JobConfig, groups: list[Group], records: list[IterationRecord]) -> None:
    """Check that the options decided something in this job."""
    missing = [sign.__name__ for sign in options.signs if not sign(config, groups, records)]
    assert not missing, f"these options decided nothing: not {missing}"
