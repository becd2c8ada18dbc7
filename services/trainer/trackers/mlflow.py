"""MLflow: a run of the experiment `project`. Server and credentials come from the environment (MLFLOW_TRACKING_*)."""

import csv
import io
from collections.abc import Iterator

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from onbeat.config import JobConfig, MlflowTracker
from services.trainer.trackers.points import Point
from services.trainer.trackers.samples import Row, table_name

JOB_TAG = "onbeat.job_id"
MAX_PARAMS = 100  # per request
MAX_PARAM_CHARS = 500


class Run:
    def __init__(self, tracker: MlflowTracker, config: JobConfig, job_id: str) -> None:
        self._client = MlflowClient()
        experiment = self._client.get_experiment_by_name(tracker.project)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(tracker.project)
        runs = self._client.search_runs([experiment_id], f"tags.`{JOB_TAG}` = '{job_id}'", max_results=1)
        if runs:
            self._run_id = runs[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return
        run = self._client.create_run(experiment_id, run_name=job_id, tags={JOB_TAG: job_id})
        self._run_id = run.info.run_id
        params = [Param(name, value[:MAX_PARAM_CHARS]) for name, value in flatten(config.model_dump(mode="json"))]
        for start in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + MAX_PARAMS])

    def log(self, point: Point) -> None:
        time_ms = int(point.time * 1000)
        metrics = [Metric(name, value, time_ms, point.step) for name, value in point.values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def log_samples(self, point: Point, rows: list[Row]) -> None:
        """Store a CSV file, which MLflow shows as a table; `log_table` lists all files in one tag of limited size."""
        text = io.StringIO()
        csv.writer(text).writerows([Row._fields, *rows])
        self._client.log_text(self._run_id, text.getvalue(), f"{table_name(point)}/{point.step:06d}.csv")

    def finish(self, has_succeeded: bool | None) -> None:
        if has_succeeded is not None:
            self._client.set_terminated(self._run_id, "FINISHED" if has_succeeded else "FAILED")


def flatten(section: dict[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values of nested sections, with dotted names.

    >>> list(flatten({"schedule": {"mode": "sync"}, "seed": 0}))
    [('schedule.mode', 'sync'), ('seed', '0')]
    """
    for name, value in section.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)
