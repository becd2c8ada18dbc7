"""REST of data files: upload them, list them, remove them. A job names one by its `path`."""

import asyncio
from pathlib import PurePosixPath
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from onbeat.contracts.records import DatasetRecord
from onbeat.contracts.states import JobState
from onbeat.streams.inspection import existing_jobs
from services.broker.api.context import Broker, Context
from services.broker.api.problems import documented
from services.broker.uploads import NAME
from services.broker.views.records import job_record

router = APIRouter(prefix="/v1", tags=["datasets"], responses=documented(422, 503))

JOBS_AT_ONCE = 100
AS_BYTES = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
DatasetName = Annotated[str, Path(pattern=f"^{NAME.pattern}$")]


class DatasetList(BaseModel):
    """The uploaded files. `max_bytes` is the largest size of a file that can be uploaded."""

    datasets: list[DatasetRecord]
    max_bytes: int


ALREADY: dict[int | str, dict[str, Any]] = {200: {"model": DatasetRecord, "description": "The file is already there"}}


@router.put("/datasets/{name}", status_code=201, responses=documented(409, 413, 507) | ALREADY, openapi_extra=AS_BYTES)
async def put_dataset(
    name: DatasetName,
    broker: Broker,
    request: Request,
    response: Response,
    sha256: Annotated[str | None, Query(pattern=r"^[0-9a-f]{64}$")] = None,
) -> DatasetRecord:
    """Upload a JSONL or Parquet file as the request body.

    A file is never overwritten: the answer is 200 if the same file is already there, and 409 if another file has the
    name. With `sha256`, the upload is refused unless the body has this digest.
    """
    record, is_new = await broker.uploads.receive(name, request.stream(), sha256)
    response.status_code = 201 if is_new else 200
    return record


@router.get("/datasets")
async def list_datasets(broker: Broker) -> DatasetList:
    """List the uploaded files, newest first. A job uses one by its `path`."""
    return DatasetList(datasets=await asyncio.to_thread(broker.uploads.list), max_bytes=broker.uploads.max_bytes)


@router.delete("/datasets/{name}", status_code=204, responses=documented(404, 409, 507))
async def delete_dataset(name: DatasetName, broker: Broker) -> None:
    """Delete an uploaded file, unless an unfinished job uses it."""
    user = await find_user(broker, name)
    if user is not None:
        raise HTTPException(409, f"job {user} reads {name}; delete it when the job is over")
    if not await asyncio.to_thread(broker.uploads.remove, name):
        raise HTTPException(404, f"there is no dataset {name}; GET /v1/datasets lists those that are there")


async def find_user(broker: Context, name: str) -> str | None:
    """Return the id of an unfinished job that names the file, or None."""
    for state in (JobState.PENDING, JobState.RUNNING):  # RUNNING: all that were started and are not over
        first = 0
        while job_ids := await broker.ledger.lists.newest(state, first, JOBS_AT_ONCE):
            for job_id, fields in (await existing_jobs(broker.ledger, job_ids)).items():
                if names_file(job_record(fields).config, name):
                    return job_id
            first += JOBS_AT_ONCE
    return None


def names_file(value: object, name: str) -> bool:
    """Return whether a `path` anywhere in a job ends in this name."""
    if isinstance(value, list):
        return any(names_file(item, name) for item in value)
    if not isinstance(value, dict):
        return False
    path = value.get("path")
    is_named = isinstance(path, str) and PurePosixPath(path).name == name  # also with a / behind it
    return is_named or any(names_file(item, name) for item in value.values())
