"""Trackio: a run named after the job, on this machine or, by the environment (TRACKIO_*), on a Space or server."""

import trackio

from onbeat.config import JobConfig, TrackioTracker
from services.trainer.trackers.points import Point
from services.trainer.trackers.samples import Row, table_name


class Run:
    def __init__(self, tracker: TrackioTracker, config: JobConfig, job_id: str) -> None:
        self._run = trackio.init(
            project=tracker.project,
            name=job_id,
            resume="allow",
            config=config.model_dump(mode="json"),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, point: Point) -> None:
        self._run.log(point.values, step=point.step)

    def log_samples(self, point: Point, rows: list[Row]) -> None:
        table = trackio.Table(columns=list(Row._fields), data=[list(row) for row in rows])
        self._run.log({table_name(point): table}, step=point.step)

    def finish(self, has_succeeded: bool | None) -> None:
        self._run.finish()
