"""Weights & Biases: the run has the job's id. Key, host and mode (`offline`) come from the environment (WANDB_*)."""

import wandb

from onbeat.config import JobConfig, WandbTracker
from services.trainer.trackers.points import Point
from services.trainer.trackers.samples import Row, table_name

INIT_TIMEOUT_S = 30.0


class Run:
    """A W&B run. It takes steps in ascending order only; an evaluation ends while later iterations are committed, so it
    goes with the newest step and has its own axis."""

    def __init__(self, tracker: WandbTracker, config: JobConfig, job_id: str) -> None:
        quiet = {"console": "off", "disable_git": True, "disable_code": True, "silent": True}
        self._run = wandb.init(
            project=tracker.project,
            entity=tracker.entity,
            tags=tracker.tags,
            id=job_id,
            name=job_id,
            resume="allow",
            reinit="create_new",
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(init_timeout=INIT_TIMEOUT_S, **quiet),
        )
        self._run.define_metric("eval/after_iterations", hidden=True)
        self._run.define_metric("eval/*", step_metric="eval/after_iterations")
        self._newest = self._run.step  # 0, or where a resumed run continues

    def log(self, point: Point) -> None:
        if point.is_evaluation:
            self._run.log(point.values | {"eval/after_iterations": point.step}, step=self._newest)
        else:
            self._newest = point.step
            self._run.log(point.values, step=point.step)

    def log_samples(self, point: Point, rows: list[Row]) -> None:
        table = wandb.Table(columns=list(Row._fields), data=[list(row) for row in rows])
        self._run.log({table_name(point): table}, step=self._newest)

    def finish(self, has_succeeded: bool | None) -> None:
        if has_succeeded is None:
            self._run.mark_preempting()  # W&B then shows it as preempted and not as failed, until it is resumed
        self._run.finish(exit_code=0 if has_succeeded else 1)
