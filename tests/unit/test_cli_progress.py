import io

import pytest
from rich.console import Console

from onbeat.progress import (
    JobProgress,
    Notices,
    duration,
    evaluation_line,
    plain_line,
    printable,
    render_progress,
    sparkline,
    trainer_activity,
)
from onbeat.types import EvaluationRecord, Event, IterationRecord, IterationState, JobState, WorkerRecord
from tests.unit.fake_broker import evaluation_json, iteration_json
from tests.unit.test_report import JOB


def progress_of(num_committed: int) -> JobProgress:
    progress = JobProgress(JOB.model_copy(update={"state": JobState.RUNNING, "next_iteration": num_committed}))
    for i in range(num_committed + 1):
        progress.iterations[i] = IterationRecord.model_validate(iteration_json(i, i < num_committed))
    return progress


def text_of(progress: JobProgress) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(render_progress(progress, elapsed_s=65))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_live_view_tells_what_everyone_does() -> None:
    progress = progress_of(4)
    progress.workers = [WorkerRecord(id="rollout-0", state="updating", policy_version=4, last_seen_at=0)]
    progress.trainer = "loading the model"
    text = text_of(progress)
    for part in ("iteration 4 of 12", "1 min 05 s elapsed", "about 16 s left", "0.300  ▁▃▆█", "50", "1 of 2 groups"):
        assert part in text
    assert "updating, version 4" in text
    assert [line.split()[0] for line in text.splitlines()][2:4] == ["reward", "tokens/s"]


def test_views_of_a_bounded_job_with_evaluations() -> None:
    progress = progress_of(4)
    progress.iterations[4].state = IterationState.DRAINED
    progress.iterations[5] = IterationRecord.model_validate(iteration_json(5, False) | {"policy_version": 4})
    for evaluation, state in ((0, "DONE"), (2, "DONE"), (4, "OPEN")):
        record = EvaluationRecord.model_validate(evaluation_json(evaluation, state))
        progress.evaluations[evaluation] = record
    text = text_of(progress)
    assert "1 of 2 groups of iteration 5 on policy version 4" in text  # generated while 4 is trained
    assert "0.200  ▁█  version 2" in text
    line = "evaluation 2  version 2  reward 0.200  solved 50%  7 tokens  25% truncated"
    assert evaluation_line(progress.scored[-1]).plain == line
    stale = progress.iterations[3].model_copy(update={"staleness_max": 1})
    assert plain_line(stale, progress).plain.startswith("iteration 4/12  version 3  staleness 1  reward 0.300")


def test_live_view_before_anything_happened() -> None:
    progress = JobProgress(JOB.model_copy(update={"state": JobState.PENDING}))
    assert "iteration 0 of 12" in text_of(progress)
    assert progress.time_left_s() is None


@pytest.mark.parametrize(
    ("values", "line"),
    [([], ""), ([1.0], "▁"), ([0.0, 0.5, 1.0], "▁▅█"), ([3.0, 3.0], "▁▁"), ([1.0, 0.0], "█▁")],
)
def test_sparkline(values: list[float], line: str) -> None:
    assert sparkline(values) == line


def test_long_sparkline_shows_means_of_neighbours() -> None:
    assert sparkline([0.0, 0.0, 1.0, 1.0, 2.0, 4.0], width=3) == "▁▃█"
    assert len(sparkline([float(i) for i in range(1001)], width=40)) == 40


def test_durations() -> None:
    assert [duration(s) for s in (7.4, 59.6, 125, 12000)] == ["7 s", "1 min 00 s", "2 min 05 s", "3 h 20 min"]


def test_events_become_words() -> None:
    def said(kind: str, **data: object) -> str | None:
        return trainer_activity(Event(id="1", time=0, kind=kind, message="m", data=data))

    assert said("job.state", state="RUNNING") == "loading the model"
    assert said("weights.published", policy_version=3) == "published policy version 3"
    assert said("iteration.opened", iteration=5, policy_version=4) is None  # ahead of the trainer
    assert "iteration 2" in (said("iteration.drained", iteration=2) or "")
    assert said("worker.updated") is None


def test_notices_of_one_kind_are_bounded() -> None:
    console = Console(file=io.StringIO(), width=100)
    notices = Notices(console)
    notices.show([Event(id=str(i), time=0, kind="group.failed", message=f"g{i}") for i in range(100)])
    assert console.file.getvalue().count("\n") == 6  # type: ignore[attr-defined]


def test_control_codes_become_visible() -> None:
    assert printable("a\x1b[31m\r\nb ü") == "a\\x1b[31m\\r\\nb ü"
