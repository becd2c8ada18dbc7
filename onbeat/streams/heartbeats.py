"""Heartbeats as they are stored in Redis. An unreadable one is skipped, and its id is returned.

It may come from another version of Onbeat or from another program: no process may stop because of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pydantic import ValidationError

from onbeat.types import TrainerRecord, WorkerRecord

RecordT = TypeVar("RecordT", WorkerRecord, TrainerRecord)


@dataclass(frozen=True)
class Heartbeats(Generic[RecordT]):
    records: list[RecordT] = field(default_factory=list)  # by id
    unreadable: list[str] = field(default_factory=list)  # ids


def read_heartbeats(found: Mapping[bytes, bytes], kind: type[RecordT]) -> Heartbeats[RecordT]:
    beats: Heartbeats[RecordT] = Heartbeats()
    for name, text in sorted(found.items()):
        try:
            beats.records.append(kind.model_validate_json(text))
        except ValidationError:
            beats.unreadable.append(name.decode(errors="replace"))
    return beats
