"""Trackers that keep up with a job, each in a thread of its own.

    ledger --read_points--> Follower (cursor) --log, log_samples--> tracker
                               |
                               +-- jobs/JOB/trackers/NAME.json: the cursor, so that no point is logged twice

There is no queue that could fill up: points that a slow or unreachable tracker has not taken yet stay in the ledger.
"""

import importlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

from redis.exceptions import RedisError

from onbeat.config import JobConfig
from onbeat.contracts.errors import LeaseLost, OnbeatError
from onbeat.contracts.states import JobState
from onbeat.streams.best_effort import best_effort
from onbeat.streams.ledger import Ledger
from services.trainer.job.interface import CannotServe, Stopped
from services.trainer.job.lease import Lease
from services.trainer.trackers.points import Cursor, Point, read_points
from services.trainer.trackers.samples import Row, read_rows
from services.trainer.world import PeerLost

logger = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 300
LOOK_S = 2.0  # time between looks into the ledger
RETRY_S = 60.0  # after an error of a tracker
CLOSE_S = 10.0  # all trackers together, at the end of the job

# The errors after which the job goes on with another trainer, or with this one when it has started again.
HANDS_OVER = (Stopped, PeerLost, CannotServe, RedisError, TimeoutError)

T = TypeVar("T")


class Tracker(Protocol):
    """A third-party library: any method may raise anything, or take long."""

    def log(self, point: Point) -> None: ...

    def log_samples(self, point: Point, rows: list[Row]) -> None:
        """Show a table of responses, right after the point that it belongs to."""

    def finish(self, has_succeeded: bool | None) -> None:
        """End the run; or, if `has_succeeded` is None, leave it to the job's next trainer."""


class LeasedJob:
    """The part of a job that a follower needs."""

    def __init__(self, lease: Lease) -> None:
        self._lease, self._id = lease, lease.job.id

    def read(self, cursor: Cursor) -> list[Point]:
        """Return new points; none while Redis is away (the training decides how long that may last)."""
        return self._ask(lambda ledger: read_points(ledger, self._id, cursor))

    def samples(self, point: Point) -> list[Row]:
        """Return the table of a point; empty if it has none, or while Redis is away."""
        return self._ask(lambda ledger: read_rows(ledger, self._id, point))

    def _ask(self, question: Callable[[Ledger], Coroutine[Any, Any, list[T]]]) -> list[T]:
        try:
            return self._lease.ask(question)
        except (RedisError, TimeoutError, OnbeatError) as error:
            logger.info("job %s: trackers get nothing new: %s", self._id, error)
            return []

    def has_succeeded(self) -> bool | None:
        """Return None if the job is not over, or if that is not known."""
        try:
            state = JobState(self._lease.ask(lambda ledger: ledger.jobs.fields(self._id))["state"])
        except (RedisError, TimeoutError, OnbeatError):
            return None
        return state is JobState.SUCCEEDED if state.is_final else None

    def warn(self, message: str) -> None:
        logger.warning("job %s: %s", self._id, message)
        with best_effort(f"job {self._id}: the event could not be stored"):
            self._lease.ask(lambda ledger: ledger.event_log.emit(self._id, "tracker.failed", message))


class Follower(threading.Thread):
    """A thread that keeps a tracker up with its job, and tries again after an error. The tracker is opened when it is
    first needed, and anew after an error."""

    def __init__(
        self, name: str, arguments: tuple[object, ...], job: LeasedJob, file: Path | None, takes_tables: bool
    ) -> None:
        """Start the thread. `arguments`: of the tracker's `Run`; `file`: where its cursor is kept, if anywhere."""
        super().__init__(name=name, daemon=True)
        self._arguments, self._job, self._file = arguments, job, file
        self._cursor = Cursor()
        self._has_warned = False
        self._takes_tables = takes_tables
        self._has_succeeded: bool | None = None
        self._is_closing = threading.Event()
        self._is_abandoned = threading.Event()  # then nothing more is logged
        self.start()

    def close(self, has_succeeded: bool | None) -> None:
        """Ask the tracker to finish: no more points come. None: from this trainer; the job goes on with another."""
        self._has_succeeded = has_succeeded
        self._is_closing.set()

    def wait_closed(self, timeout_s: float) -> bool:
        """Wait for the thread. False: it is stuck and abandoned; it logs nothing more, even if it continues."""
        self.join(max(0.0, timeout_s))
        self._is_abandoned.set()
        return not self.is_alive()

    def run(self) -> None:
        tracker: Tracker | None = None
        is_last = False
        while not is_last and not self._is_abandoned.is_set():
            is_last = self._is_closing.is_set()  # read first: the last look finds all that is in the ledger by then
            try:
                if tracker is None:
                    tracker = open_tracker(self.name, *self._arguments)
                    kept = self._file.read_text("utf-8") if self._file is not None and self._file.is_file() else "{}"
                    self._cursor = Cursor(**json.loads(kept))
                self._keep_up(tracker)
                if is_last and not self._is_abandoned.is_set():
                    tracker.finish(self._has_succeeded)
                pause_s = LOOK_S
            except ImportError as error:
                self._warn(f"{error}; install it where the trainer runs; the job goes on without this tracker")
                return
            except Exception as error:  # a third-party library: whatever it raises, the training continues
                logger.info("tracker %s", self.name, exc_info=True)
                self._warn(f"{in_one_line(error)}; tried again every {RETRY_S:.0f} s")
                tracker, pause_s = None, RETRY_S
            self._is_closing.wait(pause_s)

    def _keep_up(self, tracker: Tracker) -> None:
        """Log all new points. Raises what the tracker's library raises."""
        while points := self._job.read(self._cursor):
            try:
                for point in points:
                    if self._is_abandoned.is_set():
                        return
                    if point.values:
                        tracker.log(point)
                    self._cursor = self._cursor.after(point)
                    if point.values and self._takes_tables:
                        self._log_samples(tracker, point)
            finally:  # points before one that failed must not be logged again
                if not self._is_abandoned.is_set():  # another trainer may keep its own cursor there by then
                    self._save_cursor()

    def _log_samples(self, tracker: Tracker, point: Point) -> None:
        """Log the table of a point that is logged. An error ends the tables, which must not hold up the curves."""
        try:
            rows = self._job.samples(point)
            if rows and not self._is_abandoned.is_set():
                tracker.log_samples(point, rows)
        except Exception as error:
            logger.info("tracker %s", self.name, exc_info=True)
            self._takes_tables = False
            self._job.warn(f"tracker {self.name}: {in_one_line(error)}; no more tables of samples, its curves continue")

    def _save_cursor(self) -> None:
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            new = self._file.with_suffix(".new")
            new.write_text(json.dumps(asdict(self._cursor)), "utf-8")
            os.replace(new, self._file)

    def _warn(self, message: str) -> None:
        """Warn once per job."""
        if not self._has_warned:
            self._job.warn(f"tracker {self.name}: {message}")
        self._has_warned = True


@contextmanager
def tracking(job: LeasedJob, job_id: str, config: JobConfig, folder: Path) -> Iterator[list[Follower]]:
    """Run the trackers of a job until the end of the block. `folder`: the job's data folder."""
    followers = [Follower("tensorboard", (folder / "tensorboard",), job, None, True)]
    for tracker in config.tracking:
        file = folder / "trackers" / f"{tracker.type}.json"
        followers.append(Follower(tracker.type, (tracker, config, job_id), job, file, tracker.samples))
    has_succeeded: bool | None = False
    try:
        yield followers
        has_succeeded = True
    except LeaseLost:  # it has another trainer, or is over
        has_succeeded = job.has_succeeded()
        raise
    except HANDS_OVER:
        has_succeeded = None
        raise
    finally:
        deadline = time.monotonic() + CLOSE_S
        for follower in followers:
            follower.close(has_succeeded)
        for follower in followers:
            if not follower.wait_closed(deadline - time.monotonic()):
                job.warn(f"tracker {follower.name}: not finished within {CLOSE_S:.0f} s; its curves may end early")


def in_one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]  # a message may be a page of advice
    return f"{type(error).__name__}: {lines[0][:MAX_MESSAGE_CHARS]}"


def open_tracker(name: str, *arguments: object) -> Tracker:
    """Open a tracker, whose library is imported here. Raises ImportError, and what the library raises."""
    tracker: Tracker = importlib.import_module(f"services.trainer.trackers.{name}").Run(*arguments)
    return tracker
