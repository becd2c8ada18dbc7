"""Trackers: every point once, whatever restarts, fails or hangs. Those of others are fakes here."""

import math
import sys
import threading
import time
from html import unescape
from types import ModuleType

import pytest
from pydantic import ValidationError
from tensorboard.backend.event_processing.directory_watcher import DirectoryDeletedError
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.text.text_plugin import text_array_to_html
from tensorboard.util.tensor_util import make_ndarray

from onbeat.contracts.errors import JobFailed, LeaseLost
from onbeat.contracts.records import EvaluationRecord
from services.trainer.job.interface import JobCancelled, Stopped
from services.trainer.trackers import follow, points
from services.trainer.trackers.points import Cursor, Point
from services.trainer.trackers.samples import MAX_CHARS, Row, shorten
from services.trainer.trackers.tensorboard import Run as TensorBoard
from tests.trainer_fixtures import job_config
from tests.waiting import wait_until

LOOK_S = 0.01


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(follow, "LOOK_S", LOOK_S)


@pytest.fixture
def retries(monkeypatch):
    monkeypatch.setattr(follow, "RETRY_S", 0.02)


class LedgerOf:
    """Hands out what is after the cursor, a few points at a time."""

    def __init__(self, num_iterations, evaluations=()):
        self.num_iterations, self.evaluations, self.warnings, self.rows = num_iterations, evaluations, [], []

    def read(self, cursor):
        iterations = [point(number) for number in range(cursor.iteration + 1, self.num_iterations)][:3]
        return iterations + [evaluation(number) for number in self.evaluations if number > cursor.evaluation]

    def samples(self, point):
        return self.rows

    def warn(self, message):
        self.warnings.append(message)


def point(iteration):
    return Point(iteration, 1000.0 + iteration, {"iteration/reward_mean": iteration / 8, "train/grad_norm": 2.0})


def evaluation(number):
    return Point(number, 1000.5 + number, {"eval/reward_mean": 0.5}, is_evaluation=True)


def tracking(job, folder, *types, **options):
    trackers = [{"type": kind, **options} for kind in types]
    return follow.tracking(job, "job-1", job_config_with(trackers), folder)


def job_config_with(trackers):
    raw = job_config().model_dump(mode="json") | {"tracking": trackers}
    return type(job_config()).model_validate(raw)


def read_curve(folder, tag):
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value, event.wall_time) for event in events.Scalars(tag)]


# ---- TensorBoard -----------------------------------------------------------------------------------------------------


def test_curves_have_the_steps_values_and_times_of_the_ledger(tmp_path):
    job = LedgerOf(2, [0, 4])
    with tracking(job, tmp_path):
        wait_until(lambda: len(curve_or_none(tmp_path)) == 2, "two points are there while the job runs")
        job.num_iterations = 5
    expected = [(step, step / 8, 1000.0 + step) for step in range(5)]
    assert read_curve(tmp_path / "tensorboard", "iteration/reward_mean") == expected
    assert read_curve(tmp_path / "tensorboard", "eval/reward_mean") == [(0, 0.5, 1000.5), (4, 0.5, 1004.5)]


def curve_or_none(folder):
    try:
        return read_curve(folder / "tensorboard", "iteration/reward_mean")
    except (KeyError, DirectoryDeletedError):  # nothing there yet
        return []


def test_resumed_job_has_every_point_once_also_for_its_watcher(tmp_path):
    """The first trainer died with three iterations and an evaluation in its file; its successor repeats two of them."""
    folder = tmp_path / "tensorboard"
    dead = TensorBoard(folder)
    for entry in [evaluation(0), *map(point, range(3))]:
        dead.log(entry)
    watcher = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    watcher.Reload()
    assert len(watcher.Scalars("train/grad_norm")) == 3
    with tracking(LedgerOf(6, [0, 4]), tmp_path):
        pass
    watcher.Reload()
    assert [event.step for event in watcher.Scalars("train/grad_norm")] == list(range(6))
    assert [step for step, _, _ in read_curve(folder, "train/grad_norm")] == list(range(6))
    assert [step for step, _, _ in read_curve(folder, "eval/reward_mean")] == [0, 4]
    TensorBoard(folder).finish(has_succeeded=True)
    assert len(list(folder.iterdir())) == 2, "files do not pile up"


# ---- tables of samples -----------------------------------------------------------------------------------------------

ROW = Row(0, "2 + 2", "# *4*\n\n<b>| x", 0.5, False, "answer 1")


def test_tensorboard_shows_texts_as_they_are_in_a_table(tmp_path):
    job = LedgerOf(2, [0])
    job.rows = [ROW, ROW]
    with tracking(job, tmp_path):
        pass
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Tensors("samples/training")] == [0, 1]
    (table,) = events.Tensors("samples/evaluation")
    assert events.SummaryMetadata("samples/evaluation").plugin_data.plugin_name == "text"
    html = text_array_to_html(make_ndarray(table.tensor_proto), enable_markdown=True)
    assert [html.count(tag) for tag in ("<tr>", "<td>", "<b>", "<em>", "<h1>")] == [3, 18, 0, 0, 0]
    assert unescape(html).count(f"<code>{ROW.response}") == 2


def test_long_text_loses_its_middle_only():
    assert shorten("x" * MAX_CHARS) == "x" * MAX_CHARS
    half = MAX_CHARS // 2
    gap = "\n[7 characters are left out here]\n"
    assert shorten("a" * half + "b" * 7 + "c" * half) == "a" * half + gap + "c" * half


@pytest.mark.parametrize("samples", [True, False])
def test_texts_reach_a_hosted_tracker_only_if_the_job_says_so(samples, wandb, tmp_path):
    job = LedgerOf(2, [0])
    job.rows = [ROW]
    with tracking(job, tmp_path, "wandb", samples=samples):
        pass
    logged = [(step, name) for step, values in wandb.rows for name in values if name.startswith("samples/")]
    assert logged == [(0, "samples/training"), (1, "samples/training"), (1, "samples/evaluation")] * samples


def test_table_that_fails_costs_a_notice_and_no_point(wandb, tmp_path, monkeypatch):
    asked = []

    def refuse(**table):
        asked.append(table)
        raise OSError("no space\nat all")

    monkeypatch.setattr(wandb, "Table", refuse)
    job = LedgerOf(5, [0])
    job.rows = [ROW]
    with tracking(job, tmp_path, "wandb", samples=True):
        pass
    assert [step for step, values in wandb.rows if "train/grad_norm" in values] == list(range(5))
    assert job.warnings == ["tracker wandb: OSError: no space; no more tables of samples, its curves continue"]
    assert asked == [{"columns": list(Row._fields), "data": [list(ROW)]}]


# ---- fakes of hosted trackers ----------------------------------------------------------------------------------------


class FakeLibrary(ModuleType):
    """W&B, which takes steps in ascending order and drops others, and Trackio; each keeps runs by their id."""

    def __init__(self, name):
        super().__init__(name)
        self.rows, self.inits, self.endings, self.step = [], [], [], 0
        self.error, self.refused = None, math.inf  # takes nothing from that step on
        self.answers = threading.Event()
        self.answers.set()
        self.has_been_asked = threading.Event()

    def Settings(self, **options):
        return options

    def init(self, **options):
        self.inits.append(options)
        if self.error is not None:
            raise self.error
        return self

    def define_metric(self, name, **options):
        pass

    def Table(self, **table):
        return table

    def log(self, values, step):
        self.has_been_asked.set()
        assert self.answers.wait(60)
        if step >= self.refused:
            raise RuntimeError("503")
        if step >= self.step or self.__name__ == "trackio":
            self.rows.append((step, values))
            self.step = step

    def mark_preempting(self):
        self.endings.append("preempting")

    def finish(self, **options):
        self.endings.append(options)


def library(name, monkeypatch):
    fake = FakeLibrary(name)
    monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.delitem(sys.modules, f"services.trainer.trackers.{name}", raising=False)
    return fake


@pytest.fixture
def wandb(monkeypatch):
    return library("wandb", monkeypatch)


@pytest.mark.parametrize(
    ("name", "endings"),
    [("wandb", ["preempting", {"exit_code": 1}, {"exit_code": 0}]), ("trackio", [{}, {}])],
)
def test_each_point_is_logged_once_over_two_trainers(name, endings, monkeypatch, tmp_path):
    fake = library(name, monkeypatch)
    with pytest.raises(Stopped), tracking(LedgerOf(4, [0]), tmp_path, name):
        raise Stopped
    with tracking(LedgerOf(7, [0, 4]), tmp_path, name):
        pass
    assert [step for step, values in fake.rows if "train/grad_norm" in values] == list(range(7))
    evaluations = [(step, values) for step, values in fake.rows if "eval/reward_mean" in values]
    assert [values.get("eval/after_iterations", step) for step, values in evaluations] == [0, 4]
    for options in fake.inits:
        assert (options["project"], options["name"], options["resume"]) == ("onbeat", "job-1", "allow")
        assert options["config"]["seed"] == 0
    assert fake.endings == endings


@pytest.mark.parametrize("error", [*follow.HANDS_OVER, JobFailed, JobCancelled])
def test_run_fails_with_its_job_only(error, monkeypatch, tmp_path):
    endings = []
    monkeypatch.setattr(TensorBoard, "finish", lambda run, has_succeeded: endings.append(has_succeeded))
    with pytest.raises(error), tracking(LedgerOf(1), tmp_path):
        raise error("x")
    assert endings == [None if error in follow.HANDS_OVER else False]


@pytest.mark.parametrize("has_succeeded", [True, False, None])
def test_run_of_a_lost_job_ends_as_the_job_has(has_succeeded, monkeypatch, tmp_path):
    endings, job = [], LedgerOf(1)
    monkeypatch.setattr(TensorBoard, "finish", lambda run, has_succeeded: endings.append(has_succeeded))
    monkeypatch.setattr(job, "has_succeeded", lambda: has_succeeded, raising=False)
    with pytest.raises(LeaseLost), tracking(job, tmp_path):
        raise LeaseLost("job-1")
    assert endings == [has_succeeded]


# ---- what must not harm the job --------------------------------------------------------------------------------------


def test_library_that_is_not_installed_is_one_warning(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, "services.trainer.trackers.wandb", raising=False)
    job = LedgerOf(2)
    with tracking(job, tmp_path, "wandb"):
        time.sleep(5 * LOOK_S)
    (warning,) = job.warnings
    assert "tracker wandb" in warning
    assert "install it where the trainer runs" in warning
    assert len(read_curve(tmp_path / "tensorboard", "train/grad_norm")) == 2


def test_tracker_that_comes_back_gets_what_it_has_missed(wandb, retries, tmp_path):
    wandb.error = RuntimeError("no route to host\nand a page of advice")
    job = LedgerOf(3)
    with tracking(job, tmp_path, "wandb"):
        wait_until(lambda: len(wandb.inits) > 2, "it was tried again")
        wandb.error = None
        wait_until(lambda: len(wandb.rows) == 3, "all points are there")
    assert job.warnings == ["tracker wandb: RuntimeError: no route to host; tried again every 0 s"]


def test_point_before_a_refused_one_is_logged_once(wandb, retries, tmp_path):
    """Neither the trainer that tries again nor its successor repeats it."""
    wandb.refused = 1
    with tracking(LedgerOf(5), tmp_path, "wandb"):
        wait_until(lambda: len(wandb.inits) > 2, "it was tried again")
    assert [step for step, _ in wandb.rows] == [0]
    wandb.refused = math.inf
    with tracking(LedgerOf(5), tmp_path, "wandb"):
        pass
    assert [step for step, _ in wandb.rows] == list(range(5))


def test_tracker_without_a_cursor_gets_everything_when_reopened(retries, tmp_path, monkeypatch):
    log, errors = TensorBoard.log, [OSError("no space")]

    def fail_once(run, point):
        if point.step == 1 and errors:
            raise errors.pop()
        log(run, point)

    monkeypatch.setattr(TensorBoard, "log", fail_once)
    with tracking(LedgerOf(3), tmp_path):
        wait_until(lambda: len(curve_or_none(tmp_path)) == 3, "all points are there")


def test_tracker_that_hangs_ends_with_the_job_and_logs_no_more(wandb, tmp_path, monkeypatch):
    monkeypatch.setattr(follow, "CLOSE_S", 2.0)
    wandb.answers.clear()
    job = LedgerOf(3)
    with tracking(job, tmp_path, "wandb") as followers:
        assert wandb.has_been_asked.wait(20)
        wait_until(lambda: len(curve_or_none(tmp_path)) == 3, "three points are there")
        left_at = time.monotonic()
    assert time.monotonic() - left_at < 20
    assert job.warnings == ["tracker wandb: not finished within 2 s; its curves may end early"]
    wandb.answers.set()
    assert followers[-1].wait_closed(20)
    assert [step for step, _ in wandb.rows] == [0], "another trainer may own the job by now"
    assert wandb.endings == []
    assert not (tmp_path / "trackers" / "wandb.json").exists(), "another trainer may keep its cursor there by now"
    assert len(read_curve(tmp_path / "tensorboard", "train/grad_norm")) == 3


# ---- the job's section -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trackers", "said"),
    [
        ([{"type": "neptune"}], "does not match any of the expected tags"),
        ([{"type": "wandb", "api_key": "secret"}], "Extra inputs are not permitted"),
        ([{"type": "mlflow", "tracking_uri": "http://elsewhere"}], "Extra inputs are not permitted"),
        ([{"type": "trackio", "project": "../x"}], "should match pattern"),
        ([{"type": "wandb"}, {"type": "wandb", "project": "b"}], "two trackers of type wandb"),
    ],
)
def test_job_names_no_secret_no_address_and_no_unknown_tracker(trackers, said):
    with pytest.raises(ValidationError, match=said):
        job_config_with(trackers)


async def test_evaluation_that_ends_late_is_read_once_in_its_place(monkeypatch):
    ended_at = {0: 20.0, 4: 50.0, 8: 40.0, 12: 60.0}  # evaluation 8 ended before 4

    async def read_iterations(*_):
        return []

    async def read_evaluations(ledger, job_id, after):
        records = [EvaluationRecord(evaluation=n, state="DONE", ended_at=time) for n, time in ended_at.items()]
        return [record for record in records if record.evaluation > after]

    monkeypatch.setattr(points, "read_iterations", read_iterations)
    monkeypatch.setattr(points, "read_evaluations", read_evaluations)
    steps, cursor = [], Cursor()
    while new := await points.read_points(None, "job", cursor):
        for entry in new[:2]:  # the tracker fails after two
            steps, cursor = [*steps, entry.step], cursor.after(entry)
    assert steps == [0, 4, 8, 12]
