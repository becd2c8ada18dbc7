"""The rows of supervised iterations, read from the job's file of examples."""

from onbeat.config import JobConfig
from services.broker.datasets import DatasetError, DatasetSpec
from services.broker.datasets.process import DatasetProcess
from services.broker.datasets.sources import move_error


async def read_rows(config: JobConfig, iteration: int, process: DatasetProcess) -> list[str]:
    """Return the rows of a supervised iteration: `{"row": NUMBER, "messages": [...]}` each. Raises DatasetError."""
    assert config.warm_start is not None
    num_rows = config.warm_start.num_rows_per_iteration
    try:
        items, _ = await process.read(DatasetSpec.of_examples(config), iteration * num_rows, num_rows)
    except DatasetError as error:
        raise move_error(error, "warm_start.data") from error
    return [item.model_dump_json(include={"row", "messages"}) for item in items]
