import io
from collections.abc import AsyncIterator

import pytest
from rich.console import Console

from onbeat.client import BrokerUnreachable, Update
from onbeat.formatting import duration, printable, sparkline
from onbeat.job_progress import JobProgress, trainer_activity
from onbeat.job_view import JobView, evaluation_line, plain_line
from onbeat.progress import MAX_LOST_STREAMS, MAX_NOTICES_OF_A_KIND, Notices, Printer, listen
from onbeat.types import (
    Diagnosis,
    EvaluationRecord,
    Event,
    Finding,
    IterationRecord,
    IterationState,
    IterationUpdate,
    JobState,
    WorkerRecord,
)
from tests.unit.fake_broker import evaluation_json, iteration_json
from tests.unit.test_report import JOB

NOW = JOB.started_at + 65  # type: ignore[operator]
METRICS = {
    "train/kl": 0.01,
    "train/entropy": 1.2,
    "train/grad_norm": 0.53,
    "train/grad_cosine": 0.98,
    "rollout/response_tokens_mean": 12.4,
    "rollout/truncated_frac": 0.1,
}
MEASURED = {
    "reward_std": 0.4,
    "mismatch_mean": 0.0412,
    "rollout_idle_frac": 0.5,
    "trainer_idle_frac": 0.4,
    "metrics": METRICS,
}


def progress_of(num_committed: int, **changes: object) -> JobProgress:
    running = {"state": JobState.RUNNING, "next_iteration": num_committed, "finished_at": None}
    progress = JobProgress(JOB.model_copy(update=running))
    for i in range(num_committed + 1):
        record = IterationRecord.model_validate(iteration_json(i, i < num_committed) | changes)
        progress.apply(IterationUpdate(record=record))
    return progress


def text_of(progress: JobProgress, width: int = 100, height: int = 40, now: float = NOW) -> str:
    console = Console(file=io.StringIO(), width=width, height=height)
    console.print(JobView(progress, now))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_live_view_tells_what_everyone_does() -> None:
    progress = progress_of(4)
    progress.workers = [WorkerRecord(id="rollout-0", state="updating", policy_version=4, last_seen_at=0)]
    progress.trainer = "loading the model"
    text = text_of(progress)
    for part in ("iteration 4 of 12", "1 min 05 s elapsed", "about 16 s left", "0.300  ▁▃▆█", "50", "1 of 2 groups"):
        assert part in text
    assert "updating, version 4" in text
    assert [line.split()[0] for line in text.splitlines()][2:4] == ["reward", "speed"]


def test_live_view_has_the_essentials_of_the_dashboard() -> None:
    text = text_of(progress_of(4, **MEASURED))
    for part in (
        "spread 0.400",
        "50 tokens/s",
        "TPSPD 25.0",
        "rollouts 50%",
        "trainer 40%",
        "KL 0.0100",
        "entropy 1.200",
    ):
        assert part in text
    for part in ("mismatch 0.0412", "norm 0.53", "cosine 0.98", "12.4 tokens", "10% truncated"):
        assert part in text
    line = plain_line(progress_of(4, **MEASURED).committed[-1], progress_of(4))
    assert line.endswith(
        "rollouts idle 50%  trainer idle 40%  TPSPD 25.0  policy KL 0.0100  entropy 1.200  mismatch 0.0412  "
        "gradient norm 0.53  cosine 0.98  responses 12.4 tokens  10% truncated  about 16 s left"
    )


@pytest.mark.parametrize(("width", "height"), [(200, 50), (60, 20), (40, 10), (20, 4), (5, 2)])
def test_live_view_fits_any_terminal(width: int, height: int) -> None:
    progress = progress_of(4, **MEASURED)
    progress.job = progress.job.model_copy(update={"name": "a name\x1b[2J " * 9})
    progress.workers = [WorkerRecord(id=f"rollout-{i}" * 3, state="idle", last_seen_at=NOW) for i in range(60)]
    progress.apply(Diagnosis(is_healthy=False, findings=[Finding(sentence="all is wrong " * 50, is_problem=True)]))
    lines = text_of(progress, width, height).splitlines()
    assert len(lines) < max(3, height)
    assert max(map(len, lines)) <= width
    assert "\x1b" not in "".join(lines)


def test_a_problem_is_told_once_it_has_lasted() -> None:
    """A job that is submitted while its trainer starts is no cause for alarm."""
    progress = progress_of(0)
    for since_s, is_told in ((0.0, False), (9.9, False), (10.0, True)):
        finding = Finding(sentence="no trainer has asked for jobs", is_problem=True, since_s=since_s)
        progress.apply(Diagnosis(is_healthy=False, findings=[finding]))
        assert (progress.waits_for is not None) is is_told, since_s


def test_what_it_waits_for_is_shown_when_wrong_or_long() -> None:
    progress = progress_of(4)
    short = Finding(sentence="waits a little", waits_for="a group", since_s=2)
    long = Finding(sentence="waits long", waits_for="a group", since_s=60)
    problem = Finding(sentence="is broken", is_problem=True)
    told = [([short], None), ([short, long], "waits long"), ([long, problem], "is broken")]
    for findings, shown in told:
        progress.apply(Diagnosis(is_healthy=True, findings=findings))
        assert (progress.waits_for.sentence if progress.waits_for else None) == shown
        assert shown is None or shown in text_of(progress)
    progress.iterations[3].wall_s = 1000.0  # then a minute is not long
    progress.apply(Diagnosis(is_healthy=True, findings=[long]))
    assert progress.waits_for is None
    progress.apply(Diagnosis(is_healthy=False, findings=[problem]))
    progress.job = progress.job.model_copy(update={"state": JobState.SUCCEEDED})
    assert progress.waits_for is None


def test_silent_rollouts_are_told_apart_whatever_this_clock_says() -> None:
    progress = progress_of(4)
    seen_at = {"rollout-0": 5000.0, "rollout-1": 4960.0}
    progress.workers = [WorkerRecord(id=name, state="idle", last_seen_at=seen) for name, seen in seen_at.items()]
    for clock in (0.0, 5001.0, 99999.0):
        text = text_of(progress, now=clock)
        assert "rollout-1    silent for 4" in text
        assert text.count("silent") == 1


class Flaky:
    """A client whose stream is lost as often as this says, and then tells that the job is over."""

    def __init__(self, num_losses: int) -> None:
        self.jobs, self.num_left, self.cursors = self, num_losses, list[str]()

    async def stream(self, job_id: str, after: str) -> AsyncIterator[Update]:
        self.cursors.append(after)
        yield Event(id=f"{len(self.cursors)}-0", time=0, kind="test") if self.num_left == 5 else JOB
        if self.num_left:
            self.num_left -= 1
            raise BrokerUnreachable("http://here", "lost")


class Lost(Flaky):
    async def stream(self, job_id: str, after: str) -> AsyncIterator[Update]:
        self.num_left -= 1
        if self.num_left >= 0:
            raise BrokerUnreachable("http://here", "lost")
        yield JOB


async def listen_to(client: Flaky) -> JobProgress:
    progress = progress_of(1)
    await listen(client, progress, Printer(Console(file=io.StringIO()), progress))  # type: ignore[arg-type]
    return progress


async def test_lost_stream_is_taken_up_where_it_broke_off_and_given_up_when_it_stays_away() -> None:
    client = Flaky(num_losses=5)
    assert (await listen_to(client)).job == JOB
    assert client.cursors == ["0", "1-0", "1-0", "1-0", "1-0", "1-0"]
    assert (await listen_to(Lost(MAX_LOST_STREAMS - 1))).job == JOB
    with pytest.raises(BrokerUnreachable):
        await listen_to(Lost(MAX_LOST_STREAMS))


class Behind(Flaky):
    """The question for its evaluations fails as often as this says."""

    async def stream(self, job_id: str, after: str) -> AsyncIterator[Update]:
        yield Event(id="1-0", time=0, kind="evaluation.done")
        yield JOB
        yield JOB

    async def evaluations(self, job_id: str, after: int) -> list[EvaluationRecord]:
        self.num_left -= 1
        if self.num_left >= 0:
            raise BrokerUnreachable("http://here", "Redis does not answer (503)", 503)
        return [EvaluationRecord.model_validate(evaluation_json(0))]


async def test_evaluations_that_the_broker_could_not_tell_are_asked_for_again() -> None:
    progress, out = progress_of(1), io.StringIO()
    progress.job.config["evaluation"] = {"every_iterations": 1}
    await listen(Behind(num_losses=1), progress, Printer(Console(file=out), progress))  # type: ignore[arg-type]
    assert list(progress.evaluations) == [0]
    assert out.getvalue().count("evaluation 0") == 1


def test_views_of_a_bounded_job_with_evaluations() -> None:
    progress = progress_of(4)
    progress.iterations[4].state = IterationState.DRAINED
    progress.iterations[5] = IterationRecord.model_validate(iteration_json(5, False) | {"policy_version": 4})
    for evaluation, state in ((0, "DONE"), (2, "DONE"), (4, "OPEN")):
        record = EvaluationRecord.model_validate(evaluation_json(evaluation, state))
        progress.evaluations[evaluation] = record
    text = text_of(progress)
    assert "1 of 2 groups of iteration 5 on version 4" in text  # generated while 4 is trained
    assert "0.200  ▁█  version 2" in text
    line = "evaluation 2  version 2  reward 0.200  solved 50%  7 tokens  25% truncated"
    assert evaluation_line(progress.scored[-1]) == line
    stale = progress.iterations[3].model_copy(update={"staleness_max": 1})
    assert "  policy staleness 1  " in plain_line(stale, progress)


def test_live_view_before_anything_happened() -> None:
    progress = JobProgress(JOB.model_copy(update={"state": JobState.PENDING, "started_at": None, "finished_at": None}))
    text = text_of(progress, now=JOB.created_at + 7)
    assert "iteration 0 of 12" in text
    assert "7 s waiting" in text
    assert "rollouts     none yet" in text
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


@pytest.mark.parametrize("kind", ["checkpoint.failed", "job.warning"])
def test_a_full_disk_is_noticed(kind: str) -> None:
    lines: list[str] = []
    Notices(lines.append).show(
        [Event(id="1", time=0, kind=kind, message="no room"), Event(id="2", time=1, kind="x", message="")]
    )
    assert lines == [f"{kind}: no room"]


def test_notices_of_one_kind_are_bounded() -> None:
    lines: list[str] = []
    Notices(lines.append).show([Event(id=str(i), time=0, kind="group.failed", message=f"g{i}") for i in range(100)])
    assert len(lines) == MAX_NOTICES_OF_A_KIND + 1


def test_control_codes_become_visible() -> None:
    assert printable("a\x1b[31m\r\nb ü") == "a\\x1b[31m\\r\\nb ü"
