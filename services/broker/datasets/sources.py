"""Prompts of several sources: which row of which source a slot gets, and errors that name the source.

Slots are counted from the job's first iteration, so that shares hold from a fork on. Rows are not: a fork goes on in
each source about where its parent has stopped, and exactly there if it has the parent's weights and the parent is no
fork. Spare prompts go through the iteration's slots again, so that each source has spare ones of its own; a slot has
its rows side by side.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from onbeat.config import JobConfig, ReasoningGymData
from services.broker.datasets import DatasetError, DatasetSpec, PromptItem, moved_field
from services.broker.datasets.process import DatasetPool, DatasetProcess

SOURCE_BITS = 40  # bits of a row's number below the place of its source, which together name a prompt of the job


@dataclass(frozen=True)
class Place:
    """The place of a prompt: the number of its source, and its own number among the prompts of this source. `row`: the
    row or level that was chosen for it; None: the one whose turn it is."""

    source: int
    index: int
    row: int | None = None


def place_of(config: JobConfig, slot: int, turn: int = 0) -> Place:
    """Return the place of the prompt for a slot, counted from the job's first iteration; after turn 0 of a spare one.

    A pure function of the weights, the slot and the fork.
    """
    slots, before = config.slots, config.first_iteration * config.rollout.num_prompts_per_iteration
    source = slots.source(slot)
    num_earlier = slots.count(source, before) + slots.count(source, slot)
    return Place(source, num_earlier * config.rollout.num_rows_per_slot + turn)


def places_in(config: JobConfig, iteration: int) -> list[Place]:
    """Return the places of an iteration's prompts, the spare ones last."""
    num_prompts = config.rollout.num_prompts_per_iteration
    first = (iteration - config.first_iteration) * num_prompts
    turns = (divmod(index, num_prompts) for index in range(config.rollout.num_reserved_prompts))
    return [place_of(config, first + slot, turn) for turn, slot in turns]


async def read_places(
    config: JobConfig, places: Sequence[Place], process: DatasetProcess | DatasetPool
) -> list[PromptItem]:
    """Read the prompts of these places, with the names of their sources. Raises DatasetError, and TooBusy as
    `DatasetPool` does."""
    prompts: dict[Place, PromptItem] = {}
    for number, (field, source) in enumerate(config.sources):
        wanted = [place for place in places if place.source == number]
        if not wanted:
            continue
        try:
            items = await read_source(DatasetSpec.of_job(config, number), wanted, process)
        except DatasetError as error:
            raise name_source(config, move_error(error, field)) from error
        for place, item in zip(wanted, items, strict=True):
            row = None if item.row is None else item.row + (number << SOURCE_BITS)
            prompts[place] = item.model_copy(update={"row": row, "source": source.name or ""})
    return [prompts[place] for place in places]


async def read_source(
    spec: DatasetSpec, places: Sequence[Place], process: DatasetProcess | DatasetPool
) -> list[PromptItem]:
    """Read the prompts of places in one source. Raises DatasetError, and TooBusy as `DatasetPool` does."""
    rows = [place.row for place in places if place.row is not None]
    if not rows:
        first, last = min(place.index for place in places), max(place.index for place in places)
        items, _ = await process.read(spec, first, last + 1 - first)
        return [items[place.index - first] for place in places]
    if not isinstance(spec.data, ReasoningGymData):
        return await process.read_rows(spec, rows)
    items_by_place: dict[Place, PromptItem] = {}
    for level in sorted(set(rows)):
        of_level = [place for place in places if place.row == level]
        items = await process.read_rows(spec.of_level(level), [place.index for place in of_level])
        items_by_place |= {
            place: item.model_copy(update={"row": level}) for place, item in zip(of_level, items, strict=True)
        }
    return [items_by_place[place] for place in places]


def move_error(error: DatasetError, field: str) -> DatasetError:
    """Return an error of `data` as one of another field of the job with such a section, such as `data.1`."""
    return DatasetError(moved_field(error.field, field), error.message)


def name_source(config: JobConfig, error: DatasetError) -> DatasetError:
    """Return the error with the name of the source whose field it blames, if it blames one of several."""
    for field, source in config.sources:
        if source.name is not None and f"{error.field}.".startswith(f"{field}."):
            return DatasetError(error.field, f"source {source.name}: {error.message}")
    return error
