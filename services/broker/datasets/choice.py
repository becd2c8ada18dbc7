"""The choice of an iteration's prompts by the outcomes of earlier ones, for all sources of a job: `Chooser`.

    the rows of all iterations before t
    the outcomes of all iterations before t - max_staleness, which are complete when iteration t opens
    the knowledge of a fork about its parent's rows

Every broker that opens iteration t, and every audit, comes to the same choice.
"""

import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from onbeat.config import DataConfig, JobConfig, ReasoningGymData
from onbeat.streams.ledger import Ledger
from onbeat.streams.outcomes import Outcome
from services.broker.datasets import DatasetError, DatasetSpec
from services.broker.datasets.difficulty import Knowledge, Pick, choose_levels, choose_rows
from services.broker.datasets.process import DatasetProcess
from services.broker.datasets.sources import SOURCE_BITS, Place, move_error, name_source, places_in

AT_ONCE = 200  # iterations that are read from the ledger at a time

OfSources = Mapping[int, Sequence[int]]  # number of a source -> its usable rows, ascending


@dataclass(frozen=True)
class Choice:
    """The record of a choice, which the iteration keeps. `picks`: one per prompt, spare ones last; None where a source
    has an order of its own. `num_rows`: how many rows a source had, by its number, if all could be used."""

    picks: Sequence[Pick | None]
    num_rows: Mapping[str, int]

    def to_json(self) -> str:
        picks = [None if pick is None else asdict(pick.rounded) for pick in self.picks]
        return json.dumps({"num_rows": self.num_rows, "picks": picks})

    @classmethod
    def from_json(cls, text: str) -> "Choice":
        stored = json.loads(text) if text else {"picks": [], "num_rows": {}}
        return cls([None if pick is None else Pick(**pick) for pick in stored["picks"]], stored["num_rows"])


class Chooser:
    """The knowledge of a job's sources, to which the ledger's records are added in the order of the iterations."""

    def __init__(self, config: JobConfig, before: str = "") -> None:
        """Begin with what a fork knows of its parent's rows, `before`; '' for nothing."""
        self.config = config
        stored = json.loads(before) if before else {}
        self._knowledge: dict[int, Knowledge] = {}
        for number, (_, source) in enumerate(config.sources):
            if (settings := source.chooses) is not None:
                text = stored.get(str(number))
                self._knowledge[number] = Knowledge.from_json(settings, text) if text else Knowledge(settings)

    def add_choice(self, iteration: int, choice: Choice) -> None:
        """Add the record of an iteration's choice: spare prompts may stay unused, so they are left out."""
        picks = choice.picks[: self.config.rollout.num_prompts_per_iteration]
        sources = [place.source for place in places_in(self.config, iteration)]
        for number, knowledge in self._knowledge.items():
            rows = [pick.row for source, pick in zip(sources, picks, strict=False) if pick and source == number]
            knowledge.add_choice(iteration, rows)

    def add_outcomes(self, iteration: int, outcomes: Iterable[Outcome]) -> None:
        by_source: dict[int, list[Outcome]] = {number: [] for number in self._knowledge}
        for outcome in outcomes:
            number, row = outcome.row >> SOURCE_BITS, outcome.row & ((1 << SOURCE_BITS) - 1)
            if number in by_source:
                by_source[number].append(replace(outcome, row=row))
        for number, visits in by_source.items():
            self._knowledge[number].add_outcomes(iteration, visits)

    def choose(self, iteration: int, usable: OfSources) -> Choice:
        """Choose a row or level for each prompt of an iteration. `usable`: of each source whose rows are chosen."""
        places, num_samples = places_in(self.config, iteration), self.config.rollout.num_samples_per_prompt
        picks: list[Pick | None] = [None] * len(places)
        for number, knowledge in self._knowledge.items():
            slots = [slot for slot, place in enumerate(places) if place.source == number]
            if not slots:
                continue
            prompts, source = [places[slot].index for slot in slots], self.config.sources[number][1]
            if isinstance(source, ReasoningGymData):
                chosen = choose_levels(knowledge, len(source.levels), prompts, num_samples)
            else:
                chosen = choose_rows(knowledge, usable[number], prompts, iteration, num_samples, self.config.seed)
            for slot, pick in zip(slots, chosen, strict=True):
                picks[slot] = pick
        return Choice(picks, {str(number): len(rows) for number, rows in usable.items() if isinstance(rows, range)})

    def places(self, iteration: int, choice: Choice) -> list[Place]:
        return [
            place if pick is None else replace(place, row=pick.row)
            for place, pick in zip(places_in(self.config, iteration), choice.picks, strict=True)
        ]

    @property
    def sources_with_rows(self) -> set[int]:
        """The numbers of the sources whose rows, not levels, are chosen."""
        return {n for n in self._knowledge if not isinstance(self.config.sources[n][1], ReasoningGymData)}

    def to_json(self, number_of: Callable[[DataConfig], int | None]) -> str:
        """Return what a fork knows of the rows; '' if nothing. `number_of`: number of a source in the fork; None: the
        fork does not have it."""
        stored = {
            str(number): knowledge.to_json()
            for place, knowledge in self._knowledge.items()
            if (number := number_of(self.config.sources[place][1])) is not None and knowledge.rows
        }
        return json.dumps(stored) if stored else ""


class LedgerChooser:
    """A chooser that reads the ledger of its job as far as an iteration needs it, and each record once."""

    def __init__(self, ledger: Ledger, process: DatasetProcess, job_id: str) -> None:
        self._ledger, self._process, self._job_id = ledger, process, job_id
        self._chooser: Chooser | None = None
        self._num_choices = self._num_outcomes = 0  # iterations that were read

    async def choose(self, config: JobConfig, iteration: int) -> tuple[list[Place], str]:
        """Return the places of an iteration's prompts, with the rows that were chosen, and the record of the choice.
        Raises DatasetError."""
        usable = await read_usable(config, self._process)
        chooser = await self._read(config, iteration)
        choice = chooser.choose(iteration, usable)
        return chooser.places(iteration, choice), choice.to_json()

    async def _read(self, config: JobConfig, iteration: int) -> Chooser:
        if self._chooser is None:
            self._chooser = Chooser(config, await self._ledger.iterations.outcomes_before(self._job_id))
            self._num_choices = self._num_outcomes = config.first_iteration
        self._chooser.config = config  # a resume may have added iterations
        async for number, choice, _ in read_choices(self._ledger, self._job_id, self._num_choices, iteration):
            self._chooser.add_choice(number, Choice.from_json(choice))
            self._num_choices = number + 1
        num_complete = iteration - config.max_staleness
        async for number, _, outcomes in read_choices(self._ledger, self._job_id, self._num_outcomes, num_complete):
            self._chooser.add_outcomes(number, outcomes)
            self._num_outcomes = number + 1
        return self._chooser


async def read_choices(
    ledger: Ledger, job_id: str, first: int, stop: int
) -> AsyncIterator[tuple[int, str, list[Outcome]]]:
    """Yield the iterations from `first` to before `stop`: their number, the record of their choice, and the outcomes of
    their groups so far."""
    for start in range(first, stop, AT_ONCE):
        wanted = range(start, min(stop, start + AT_ONCE))
        for number, (choice, outcomes) in zip(wanted, await ledger.iterations.choices(job_id, wanted), strict=True):
            yield number, choice, outcomes


async def read_usable(config: JobConfig, process: DatasetProcess) -> dict[int, Sequence[int]]:
    """Return the usable rows of each source whose rows are chosen. Raises DatasetError."""
    usable: dict[int, Sequence[int]] = {}
    for number, (field, source) in enumerate(config.sources):
        if source.chooses is None or isinstance(source, ReasoningGymData):
            continue
        try:
            usable[number] = await process.rows(DatasetSpec.of_job(config, number))
        except DatasetError as error:
            raise name_source(config, move_error(error, field)) from error
    return usable


async def inherited_outcomes(ledger: Ledger, config: JobConfig) -> str:
    """Return what a fork knows of its parent's rows, '' if it is none or its parent chose none: of each source that
    both have, with the same rows."""
    if config.fork is None or not config.chooses_prompts:
        return ""
    parent_id, iteration = config.fork.job, config.fork.iteration
    parent = JobConfig.of_job(await ledger.jobs.fields(parent_id))
    if not parent.chooses_prompts:
        return ""
    chooser = Chooser(parent, await ledger.iterations.outcomes_before(parent_id))
    async for number, choice, outcomes in read_choices(ledger, parent_id, parent.first_iteration, iteration):
        chooser.add_choice(number, Choice.from_json(choice))
        chooser.add_outcomes(number, outcomes)
    rows_of_fork = [rows_of(source) for _, source in config.sources]

    def number_of(source: DataConfig) -> int | None:
        return rows_of_fork.index(rows_of(source)) if rows_of(source) in rows_of_fork else None

    return chooser.to_json(number_of)


def rows_of(source: DataConfig) -> tuple[object, ...]:
    """Return what the rows of a source depend on; levels, for a generated task."""
    if isinstance(source, ReasoningGymData):
        return source.type, source.task, str(source.options), str(source.levels)
    return source.type, source.path, getattr(source, "subset", None), getattr(source, "split", None)
