"""The part of an audit that only a job of several sources has: by the kept groups, each prompt is of the source whose
turn it was, and a group was replaced from its own source as long as that had spare prompts."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from onbeat.config import JobConfig
from onbeat.streams.audit import Audit, Iteration, require
from services.broker.datasets.sources import places_in


@dataclass(frozen=True)
class Content:
    """The part of an accepted group that these checks need."""

    source: str
    has_signal: bool


def check_sources(config: JobConfig, audit: Audit, contents: Mapping[str, Content]) -> None:
    """Check all iterations whose groups are kept. Raises AuditViolation."""
    for number, opened in enumerate(audit.iterations[audit.first_iteration :], start=audit.first_iteration):
        if not opened.is_supervised and opened.digests.keys() <= contents.keys():
            names = [config.sources[place.source][1].name or "" for place in places_in(config, number)]
            check_iteration(names, config.rollout.num_prompts_per_iteration, number, opened, contents)


def check_iteration(
    names: list[str], num_prompts: int, number: int, opened: Iteration, contents: Mapping[str, Content]
) -> None:
    """Check one iteration. `names`: the source of each of its prompts by the weights, `num_prompts` and spare ones."""
    wanted = {f"{number}-{index}": name for index, name in enumerate(names[:num_prompts])}
    num_spares = Counter(names[num_prompts:])
    for group_id in opened.digests:  # the order of their acceptance
        content, next_id = contents[group_id], opened.replaced.get(group_id)
        name = wanted[group_id]
        require(content.source == name, f"group {group_id} is of source {content.source!r}, it was the turn of {name}")
        if next_id is not None:
            require(num_spares[name] > 0, f"group {group_id} was replaced although source {name} had no prompts left")
            wanted[next_id] = name
            num_spares[name] -= 1
        elif not content.has_signal:
            require(num_spares[name] == 0, f"group {group_id} was not replaced although it has no signal")
