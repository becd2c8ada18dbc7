"""TensorBoard event files, by TensorBoard's own record writer: `tensorboard --logdir FOLDER`."""

import os
import socket
import textwrap
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_TENSOR, Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.record_writer import RecordWriter

from services.trainer.trackers.points import Point
from services.trainer.trackers.samples import Row, table_name


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

    def log_samples(self, point: Point, rows: list[Row]) -> None:
        """Write a text of [rows, columns], which TensorBoard shows as a table. It takes cells for Markdown, and
        indented ones for code, which it shows as they are."""
        cells = [*Row._fields, *(textwrap.indent(str(value), " " * 4) for row in rows for value in row)]
        sizes = [TensorShapeProto.Dim(size=size) for size in (1 + len(rows), len(Row._fields))]
        texts = {"dtype": DT_STRING, "string_val": [cell.encode() for cell in cells]}
        tensor = TensorProto(tensor_shape=TensorShapeProto(dim=sizes), **texts)
        metadata = create_summary_metadata(display_name=None, description=None)
        metadata.data_class = DATA_CLASS_TENSOR
        table = Summary.Value(tag=table_name(point), tensor=tensor, metadata=metadata)
        self._write(Event(wall_time=point.time, step=point.step, summary=Summary(value=[table])))

    def finish(self, has_succeeded: bool | None) -> None:
        self._file.close()

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())
        self._file.flush()
