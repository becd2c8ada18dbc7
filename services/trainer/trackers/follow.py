"""Trackers that keep up with a job, each in a thread of its own.

    ledger --read_points--> Follower (cursor) --log--> tracker
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Protocol

from redis.exceptions import RedisError

from onbeat.config import JobConfig
from onbeat.errors import OnbeatError
from onbeat.streams.best_effort import best_effort
from services.trainer.job.lease import Lease
from services.trainer.trackers.points import Cursor, Point, read_points

logger = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 300
LOOK_S = 2.0  # between looks into the ledger
RETRY_S = 60.0  # after an error of a tracker
CLOSE_S = 10.0  # all trackers together, at the end of the job


class Tracker(Protocol):
    """A third-party library: any method may raise anything, or take long."""

    def log(self, point: Point) -> None: ...
    def finish(self, has_succeeded: bool) -> None: ...


class LeasedJob:
    """The part of a job that a follower needs."""

    def __init__(self, lease: Lease) -> None:
        self._lease, self._id = lease, lease.job.id

    def read(self, cursor: Cursor) -> list[Point]:
        """Return new points; none while Redis is away (the training decides how long that may last)."""
        try:
            return self._lease.ask(lambda ledger: read_points(ledger, self._id, cursor))
        except (RedisError, TimeoutError, OnbeatError) as error:
            logger.info("job %s: trackers get nothing new: %s", self._id, error)
            return []

    def warn(self, message: str) -> None:
        logger.warning("job %s: %s", self._id, message)
        with best_effort(f"job {self._id}: the event could not be stored"):
            self._lease.ask(lambda ledger: ledger.event_log.emit(self._id, "tracker.failed", message))


class Bookmark:
    """A tracker's cursor, and the file that keeps it, if any."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.cursor = Cursor()

    def load(self) -> None:
        text = self._path.read_text() if self._path is not None and self._path.is_file() else "{}"
        self.cursor = Cursor(**json.loads(text))

    def save(self) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(asdict(self.cursor)))
        os.replace(new, self._path)


class Follower:
    """A thread that keeps a tracker up with its job, and tries again after an error. The tracker is opened when it is
    first needed, and anew after an error."""

    def __init__(self, name: str, open_tracker: Callable[[], Tracker], job: LeasedJob, bookmark: Bookmark) -> None:
        self.name = name
        self._open_tracker, self._job, self._bookmark = open_tracker, job, bookmark
        self._tracker: Tracker | None = None
        self._has_warned = self._has_succeeded = False
        self._stop = threading.Event()
        self._is_abandoned = threading.Event()  # then nothing more is logged
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def close(self, has_succeeded: bool) -> None:
        """Ask the tracker to finish: no more points come."""
        self._has_succeeded = has_succeeded
        self._stop.set()

    def wait_closed(self, timeout_s: float) -> bool:
        """Wait for the thread. False: it is stuck and abandoned; it logs nothing more, even if it continues."""
        self._thread.join(max(0.0, timeout_s))
        self._is_abandoned.set()
        return not self._thread.is_alive()

    def _run(self) -> None:
        is_last = False
        while not is_last and not self._is_abandoned.is_set():
            is_last = self._stop.is_set()  # read first: the last look finds all that is in the ledger by then
            try:
                if self._tracker is None:
                    self._tracker = self._open_tracker()
                    self._bookmark.load()
                self._keep_up(self._tracker)
                if is_last and not self._is_abandoned.is_set():
                    self._tracker.finish(self._has_succeeded)
                pause_s = LOOK_S
            except ImportError as error:
                self._warn(f"{error}; install it where the trainer runs; the job goes on without this tracker")
                return
            except Exception as error:  # a third-party library: whatever it raises, the training continues
                logger.info("tracker %s", self.name, exc_info=True)
                self._warn(f"{first_line(error)}; tried again every {RETRY_S:.0f} s")
                self._tracker, pause_s = None, RETRY_S
            self._stop.wait(pause_s)

    def _keep_up(self, tracker: Tracker) -> None:
        """Log all new points. Raises what the tracker's library raises."""
        while points := self._job.read(self._bookmark.cursor):
            try:
                for point in points:
                    if self._is_abandoned.is_set():
                        return
                    if point.values:
                        tracker.log(point)
                    self._bookmark.cursor = self._bookmark.cursor.after(point)
            finally:  # points before one that failed must not be logged again
                if not self._is_abandoned.is_set():  # another trainer may keep its own cursor there by then
                    self._bookmark.save()

    def _warn(self, message: str) -> None:
        """Warn once per job."""
        if not self._has_warned:
            self._job.warn(f"tracker {self.name}: {message}")
        self._has_warned = True


def first_line(error: Exception) -> str:
    """Return the error's type and the first line of its message, which may be a page of advice."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:MAX_MESSAGE_CHARS]}"


@contextmanager
def tracking(job: LeasedJob, job_id: str, config: JobConfig, folder: Path) -> Iterator[list[Follower]]:
    """Run the trackers of a job until the end of the block. `folder`: the job's own."""
    opens = partial(open_tracker, "tensorboard", folder / "tensorboard")
    followers = [Follower("tensorboard", opens, job, Bookmark(None))]
    for tracker in config.tracking:
        bookmark = Bookmark(folder / "trackers" / f"{tracker.type}.json")
        opens = partial(open_tracker, tracker.type, tracker, config, job_id)
        followers.append(Follower(tracker.type, opens, job, bookmark))
    has_succeeded = False
    try:
        yield followers
        has_succeeded = True
    finally:
        deadline = time.monotonic() + CLOSE_S
        for follower in followers:
            follower.close(has_succeeded)
        for follower in followers:
            if not follower.wait_closed(deadline - time.monotonic()):
                job.warn(f"tracker {follower.name}: not finished within {CLOSE_S:.0f} s; its curves may end early")


def open_tracker(name: str, *arguments: object) -> Tracker:
    """Open a tracker, whose library is imported here. Raises ImportError, and what the library raises."""
    tracker: Tracker = importlib.import_module(f"services.trainer.trackers.{name}").Run(*arguments)
    return tracker
