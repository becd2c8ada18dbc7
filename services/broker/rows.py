"""The rows of supervised iterations, read from the job's file of examples."""

from onbeat.config import JobConfig
from onbeat.config.warm_start import EXAMPLES
from services.broker.datasets import DatasetError, DatasetSpec
from services.broker.datasets.process import DatasetProcess
from services.broker.datasets.sources import move_error


async def read_rows(config: JobConfig, iteration: int, process: DatasetProcess) -> list[str]:
    """Return the rows of a supervised iteration: `{"row": NUMBER, "messages": [...]}` each. Raises DatasetError."""
    assert config.warm_start is not None
    num_rows, spec = config.warm_start.num_rows_per_iteration, DatasetSpec.of_examples(config)
    return await read(spec, iteration * num_rows, num_rows, process, EXAMPLES)


async def read_held_out_rows(config: JobConfig, process: DatasetProcess) -> list[str]:
    """Return the rows on which the loss is measured, as `read_rows` does; none if the job measures none."""
    spec = DatasetSpec.of_held_out_examples(config)
    return [] if spec is None else await read(spec, 0, spec.num_items, process, "warm_start.held_out.data")


async def read(spec: DatasetSpec, first: int, count: int, process: DatasetProcess, field: str) -> list[str]:
    try:
        items, _ = await process.read(spec, first, count)
    except DatasetError as error:
        raise move_error(error, field) from error
    return [item.model_dump_json(include={"row", "messages"}) for item in items]
