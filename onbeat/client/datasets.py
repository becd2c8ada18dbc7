"""The client for /v1/datasets, and the data files beside a job file, which are uploaded with the job."""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from onbeat.client.jobs import Records, parse_list
from onbeat.client.transport import Transport, part_of, read_record
from onbeat.contracts.records import DATASETS_FOLDER, DatasetRecord

FILE_TYPES = ("jsonl", "parquet")
CHUNK_BYTES = 1 << 20
SYNC_S = 600.0  # time for a broker to write the end of a large file to its disk
DIGEST_CHARACTERS = 16  # characters of the digest, in the name of an uploaded file
PLACE = re.compile(r"\.\d+$")  # number of an item in a list, at the end of a field
NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")
MAX_STEM = 80


@dataclass(frozen=True)
class DataFile:
    """A file to upload, and the name that it will have. Unless another is given, the name has its digest in it."""

    source: Path
    name: str
    sha256: str

    @classmethod
    def at(cls, source: Path, name: str | None = None) -> "DataFile":
        """Read the file through. Raises ValueError where there is none."""
        try:
            with source.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise ValueError(f"{source} cannot be read: {error.strerror or error}") from error
        stem = NOT_IN_A_NAME.sub("-", source.stem).strip(".-_")[:MAX_STEM] or "data"
        suffix = NOT_IN_A_NAME.sub("", source.suffix)
        return cls(source, name or f"{stem}-{digest[:DIGEST_CHARACTERS]}{suffix}", digest)

    @property
    def path(self) -> str:
        """Its `data.path` in a job."""
        return f"{DATASETS_FOLDER}/{self.name}"


class AsyncDatasets:
    """The client for /v1/datasets. Methods raise ApiError for refusals, BrokerUnreachable if no broker can answer."""

    def __init__(self, client: Transport) -> None:
        self._client = client

    async def push(self, file: str | Path | DataFile, name: str | None = None) -> DatasetRecord:
        """Upload a file, unless it is there already; its `path` goes into a job. Raises ValueError for one that is too
        large or cannot be read."""
        data = file if isinstance(file, DataFile) else DataFile.at(Path(file), name)
        answer = await self._client.get("/v1/datasets")
        for record in parse_list(DatasetRecord, "datasets", answer):
            if (record.name, record.sha256) == (data.name, data.sha256):
                return record
        num_bytes, limit = data.source.stat().st_size, int(part_of(answer, "max_bytes"))
        if num_bytes > limit:
            raise ValueError(f"{data.source} has {num_bytes} bytes; the broker takes at most {limit} of a data file")
        sent = await self._client.request(
            "PUT",
            dataset_path(data.name),
            params={"sha256": data.sha256},
            content=chunks_of(data.source),
            headers={"Content-Type": "application/octet-stream", "Content-Length": str(num_bytes)},
            timeout=SYNC_S,
        )
        return read_record(DatasetRecord, sent)

    async def list(self) -> Records[DatasetRecord]:
        """Return the uploaded files, the newest first."""
        return parse_list(DatasetRecord, "datasets", await self._client.get("/v1/datasets"))

    async def delete(self, name: str) -> None:
        """Remove an uploaded file, which no unfinished job may name."""
        await self._client.request("DELETE", dataset_path(name))


def dataset_path(name: str) -> str:
    """Return the path of a file's name, whole: a broker refuses one with a slash, a query or a fragment."""
    if name in ("", ".", ".."):  # other paths, even when quoted
        raise ValueError(f"{name!r} is not the name of a data file; `onbeat data list` shows them")
    return f"/v1/datasets/{quote(name, safe='')}"


async def chunks_of(source: Path) -> AsyncIterator[bytes]:
    with source.open("rb") as file:
        while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
            yield chunk


def take_local_files(job: dict[str, Any], folder: Path, data_dir: Path | None = None) -> list[DataFile]:
    """Find the job's data files beside its own file, and name them in the job as the broker will have them.

    Paths that name no file here are left alone: they may be the broker's. `data_dir`: that of a broker on this machine;
    then a file that is not there either raises ValueError.
    """
    files = []
    for field, section in file_sections(job):
        source, is_bundled = (folder / section["path"]).resolve(), section["path"].startswith("bundled:")
        if source.is_file():
            files.append(DataFile.at(source))
            section["path"] = files[-1].path
        elif data_dir is not None and not (is_bundled or (data_dir / section["path"]).is_file()):
            raise ValueError(f"{field}.path: there is no file {source}; a path is relative to the job file")
    return files


def file_sections(value: Any, field: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the field and the section of all data of a job that is read from a file.

    >>> dict(file_sections({"evaluation": {"data": {"type": "jsonl", "path": "a.jsonl"}}}))
    {'evaluation.data': {'type': 'jsonl', 'path': 'a.jsonl'}}
    >>> list(file_sections({"data": [{"type": "jsonl", "path": "a.jsonl"}]}))
    [('data.0', {'type': 'jsonl', 'path': 'a.jsonl'})]
    """
    items: Sequence[tuple[str, Any]] = ()
    if isinstance(value, list):
        items = [(str(index), item) for index, item in enumerate(value)]
    elif isinstance(value, dict):
        is_data = PLACE.sub("", field).rpartition(".")[2] == "data" and value.get("type") in FILE_TYPES
        if is_data and isinstance(value.get("path"), str):
            yield field, value
        items = list(value.items())
    for name, item in items:
        yield from file_sections(item, f"{field}.{name}" if field else name)
