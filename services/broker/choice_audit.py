"""The part of an audit that only a job has whose prompts are chosen by outcomes: the outcomes are those of the kept
groups, each iteration's choice is the recorded one, and it follows from the records of the iterations before."""

from collections.abc import Iterable, Mapping

from onbeat.config import JobConfig
from onbeat.streams.audit import Audit, require
from onbeat.streams.codec import payload_digest
from onbeat.streams.ledger import Ledger
from onbeat.streams.outcomes import Outcome
from services.broker.datasets.choice import Choice, Chooser, read_choices


async def check_choices(
    ledger: Ledger, config: JobConfig, audit: Audit, outcomes: Mapping[str, Outcome | None]
) -> None:
    """Check all iterations with prompts that were opened. `outcomes`: of the groups that are kept, by their ids. Raises
    AuditViolation."""
    history = History(config, await ledger.iterations.outcomes_before(audit.job_id))
    first, stop = max(audit.first_iteration, config.first_generated), len(audit.iterations)
    async for number, text, recorded in read_choices(ledger, audit.job_id, first, stop):
        choice, opened = Choice.from_json(text), audit.iterations[number]
        is_logged = opened.choice == (payload_digest(text.encode()) if text else "")
        require(is_logged, f"iteration {number}: the record of its choice of prompts is not that of the log")
        history.check(number, choice)
        history.add(number, choice, recorded)
        kept = [outcomes[group_id] for group_id in opened.digests if group_id in outcomes]
        if len(kept) == opened.num_groups:  # else groups may have been accepted since the log was read
            check_outcomes(number, recorded, kept)


def check_outcomes(number: int, recorded: Iterable[Outcome], kept: Iterable[Outcome | None]) -> None:
    is_same = sorted(map(str, recorded)) == sorted(str(outcome) for outcome in kept if outcome is not None)
    require(is_same, f"iteration {number}: its recorded outcomes are not those of its groups")


class History:
    """The records of a job's iterations, as far as the choice of the next one may depend on them."""

    def __init__(self, config: JobConfig, before: str) -> None:
        self._config, self._chooser = config, Chooser(config, before)
        self._uncertain: list[tuple[int, list[Outcome]]] = []  # outcomes of the last `max_staleness` iterations

    def check(self, iteration: int, choice: Choice) -> None:
        """Check that a choice follows from what was added. That of rows of which some were left out, for their length,
        is not made again: the audit reads no data."""
        usable = {int(number): range(num_rows) for number, num_rows in choice.num_rows.items()}
        if usable.keys() == self._chooser.sources_with_rows:
            is_same = self._chooser.choose(iteration, usable).to_json() == choice.to_json()
            require(is_same, f"iteration {iteration}: its prompts are not those that follow from the outcomes before")

    def add(self, iteration: int, choice: Choice, outcomes: list[Outcome]) -> None:
        self._chooser.add_choice(iteration, choice)
        self._uncertain.append((iteration, outcomes))
        while len(self._uncertain) > self._config.max_staleness:
            self._chooser.add_outcomes(*self._uncertain.pop(0))
