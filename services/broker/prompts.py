"""The prompts of a job's iterations, or their rows of examples: made ahead of time, or chosen when one opens."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from onbeat.config import JobConfig
from onbeat.streams.codec import PromptTask
from onbeat.streams.ledger import Ledger
from services.broker.datasets import DatasetError
from services.broker.datasets.choice import LedgerChooser
from services.broker.datasets.process import DatasetProcess
from services.broker.datasets.sources import read_places
from services.broker.rows import read_held_out_rows, read_rows
from services.broker.tasks import build_tasks, produce_tasks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Contents:
    """The prompts of an iteration, spare ones last, or of a supervised one its rows."""

    tasks: Sequence[PromptTask] = ()
    choice: str = ""  # record of the prompts' choice, '' where outcomes do not decide
    rows: Sequence[str] = ()
    held_out: Sequence[str] = ()  # rows that the job keeps, with its first iteration


class JobPrompts:
    def __init__(self, ledger: Ledger, process: DatasetProcess, job_id: str) -> None:
        self._process, self._job_id = process, job_id
        self._chooser = LedgerChooser(ledger, process, job_id)
        self._prepared: dict[int, asyncio.Task[Contents]] = {}

    def prepare(self, config: JobConfig, iteration: int) -> None:
        """Start to read the prompts or rows of an iteration ahead of time, and drop those of earlier iterations. Where
        outcomes decide on prompts, they are not known yet."""
        for old in [number for number in self._prepared if number < iteration - 1]:
            self._prepared.pop(old).cancel()
        self._begin(config, iteration)
        if config.is_supervised(iteration):  # the first prompts, too, which may take long to read for the first time
            self._begin(config, config.first_generated)

    def _begin(self, config: JobConfig, iteration: int) -> None:
        if config.chooses_prompts and not config.is_supervised(iteration):
            return
        if iteration not in self._prepared and iteration < config.schedule.num_iterations:
            work = self._produce(config, iteration)
            self._prepared[iteration] = asyncio.create_task(work, name=f"prompts {self._job_id} {iteration}")

    async def take(self, config: JobConfig, iteration: int) -> Contents:
        """Return what an iteration opens with. Raises DatasetError if reading fails both ahead of time and now."""
        self.prepare(config, iteration)
        if iteration not in self._prepared:
            places, choice = await self._chooser.choose(config, iteration)
            return Contents(build_tasks(config, iteration, await read_places(config, places, self._process)), choice)
        try:
            return await self._prepared[iteration]
        except DatasetError as error:
            logger.warning("job %s: reading for iteration %d failed, trying again: %s", self._job_id, iteration, error)
            return await self._produce(config, iteration)

    async def _produce(self, config: JobConfig, iteration: int) -> Contents:
        if not config.is_supervised(iteration):
            return Contents(await produce_tasks(config, iteration, self._process))
        is_first = iteration == config.first_iteration
        held_out = await read_held_out_rows(config, self._process) if is_first else []
        return Contents(rows=await read_rows(config, iteration, self._process), held_out=held_out)

    async def close(self) -> None:
        for task in self._prepared.values():
            task.cancel()
        await asyncio.gather(*self._prepared.values(), return_exceptions=True)
