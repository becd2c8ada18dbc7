"""The number of supervised iterations that the epochs of a warm start are, by the rows of its file."""

import math
from collections.abc import Sequence

from onbeat.config import JobConfig
from onbeat.config.warm_start import EXAMPLES
from onbeat.contracts.records import RowCounts
from services.broker.admission.review import JobRefused


def count_epochs(config: JobConfig, counts: Sequence[RowCounts]) -> JobConfig:
    """Return the job with a number of supervised iterations in place of their epochs. Raises JobRefused."""
    start = config.warm_start
    if start is None or start.epochs is None:
        return config
    of_file = next(count for count in counts if count.field == EXAMPLES)
    num_rows = of_file.num_accepted + of_file.num_refused + of_file.num_not_looked_at
    num_iterations = math.ceil(start.epochs * num_rows / start.num_rows_per_iteration)
    if num_iterations >= config.schedule.num_iterations:
        message = f"{start.epochs:g} epochs of {num_rows} rows are {num_iterations} supervised iterations, and the job "
        message += f"has {config.schedule.num_iterations} in all; raise that, or lower warm_start.epochs"
        raise JobRefused([("schedule.num_iterations", message)], counts)
    return config.with_warm_start(num_iterations)
