"""TensorBoard event files, by TensorBoard's own record writer: `tensorboard --logdir FOLDER`."""

import os
import socket
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from services.trainer.trackers.points import Point


class Run:
    """A file with all points since iteration 0: a trainer that resumes a job writes them again, from the ledger.

    So a resumed job has no point twice and none is missing, wherever the previous trainer died. The file starts with
    the marker that TensorBoard calls `purge_step`: readers forget the points of older files. The newest older file
    stays, because a TensorBoard that is reading it would not find the next one otherwise; the others are deleted.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        older = sorted(folder.glob("events.out.tfevents.*"))
        name = f"events.out.tfevents.{time.time_ns():019d}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("wb")
        self._records = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        start = SessionLog(status=SessionLog.SessionStatus.START)
        self._write(Event(wall_time=time.time(), step=0, session_log=start))
        for path in older[:-1]:
            path.unlink(missing_ok=True)

    def log(self, point: Point) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
        self._write(Event(wall_time=point.time, step=point.step, summary=Summary(value=values)))

    def finish(self, has_succeeded: bool | None) -> None:
        self._file.close()

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())
        self._file.flush()
