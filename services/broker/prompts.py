"""The prompts of a job's iterations: made ahead of time, or chosen when an iteration opens."""

import asyncio
import logging

from onbeat.config import JobConfig
from onbeat.streams.codec import PromptTask
from onbeat.streams.ledger import Ledger
from services.broker.datasets import DatasetError
from services.broker.datasets.choice import LedgerChooser
from services.broker.datasets.process import DatasetProcess
from services.broker.datasets.sources import read_places
from services.broker.tasks import build_tasks, produce_tasks

logger = logging.getLogger(__name__)


class JobPrompts:
    def __init__(self, ledger: Ledger, process: DatasetProcess, job_id: str) -> None:
        self._process, self._job_id = process, job_id
        self._chooser = LedgerChooser(ledger, process, job_id)
        self._prepared: dict[int, asyncio.Task[list[PromptTask]]] = {}

    def prepare(self, config: JobConfig, iteration: int) -> None:
        """Start to produce the prompts of an iteration ahead of time, and drop the prompts of earlier iterations. Where
        outcomes decide on them, they are not known yet."""
        if config.chooses_prompts:
            return
        for old in [number for number in self._prepared if number < iteration - 1]:
            self._prepared.pop(old).cancel()
        if iteration not in self._prepared and iteration < config.schedule.num_iterations:
            work = produce_tasks(config, iteration, self._process)
            self._prepared[iteration] = asyncio.create_task(work, name=f"prompts {self._job_id} {iteration}")

    async def take(self, config: JobConfig, iteration: int) -> tuple[list[PromptTask], str]:
        """Return the prompts of an iteration, spare ones last, and the record of their choice, '' where outcomes do not
        decide. Raises DatasetError if they fail both ahead of time and now."""
        if config.chooses_prompts:
            places, choice = await self._chooser.choose(config, iteration)
            return build_tasks(config, iteration, await read_places(config, places, self._process)), choice
        self.prepare(config, iteration)
        try:
            return await self._prepared[iteration], ""
        except DatasetError as error:
            logger.warning("job %s: prompts of iteration %d failed, trying again: %s", self._job_id, iteration, error)
            return await produce_tasks(config, iteration, self._process), ""

    async def close(self) -> None:
        for task in self._prepared.values():
            task.cancel()
        await asyncio.gather(*self._prepared.values(), return_exceptions=True)
