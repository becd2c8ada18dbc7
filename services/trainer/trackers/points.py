"""The points of a job's curves, read from the ledger. Names are those of `GET /v1/jobs/JOB/metrics`."""

from dataclasses import asdict, dataclass
from heapq import merge

from onbeat.contracts.records import EvaluationRecord, IterationRecord
from onbeat.contracts.states import IterationState
from onbeat.streams.ledger import Ledger
from onbeat.streams.records import evaluation_series, metrics_point, read_evaluations, read_iterations

MAX_ITERATIONS = 200  # per read; the next read continues from there


@dataclass(frozen=True)
class Point:
    """The values of one iteration, or of one evaluation."""

    step: int  # number of the iteration; of an evaluation, the number of iterations that were done
    time: float  # Unix seconds: committed, or scored
    values: dict[str, float]
    is_evaluation: bool = False


@dataclass(frozen=True)
class Cursor:
    """The position of a tracker: it has everything up to these numbers."""

    iteration: int = -1
    evaluation: int = -1

    def after(self, point: Point) -> "Cursor":
        return Cursor(**asdict(self) | {"evaluation" if point.is_evaluation else "iteration": point.step})


async def read_points(ledger: Ledger, job_id: str, cursor: Cursor) -> list[Point]:
    """Return the points after the cursor, each curve in order. Raises JobNotFound, RedisError."""
    iterations = await read_iterations(ledger, job_id, cursor.iteration, MAX_ITERATIONS)
    points = [iteration_point(record) for record in iterations if record.state is IterationState.COMMITTED]
    evaluations = []
    for record in await read_evaluations(ledger, job_id, cursor.evaluation):
        if not record.state.is_over:
            break  # the ones after it wait, so that each curve grows in order
        evaluations.append(evaluation_point(record))
    return list(merge(points, evaluations, key=lambda point: point.time))  # an evaluation may end before an earlier one


def iteration_point(record: IterationRecord) -> Point:
    assert record.committed_at is not None, "a committed iteration has its time"
    values = metrics_point(record)
    if record.wall_s and record.prompt_tokens is not None and record.response_tokens is not None:
        values["iteration/tokens_per_s"] = (record.prompt_tokens + record.response_tokens) / record.wall_s
    return Point(record.iteration, record.committed_at, values)


def evaluation_point(record: EvaluationRecord) -> Point:
    """Return an evaluation's point; it has no values if the evaluation failed."""
    assert record.ended_at is not None, "an evaluation that is over has its time"
    values = {name: series[0][1] for name, series in evaluation_series([record]).items()}
    return Point(record.evaluation, record.ended_at, values, is_evaluation=True)
