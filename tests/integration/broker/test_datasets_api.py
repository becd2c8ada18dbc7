"""Data files over REST, on a whole broker and a real Redis."""

import asyncio
import errno
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from onbeat.client import AsyncClient
from onbeat.contracts.errors import ApiError
from onbeat.streams.keys import JobKeys
from onbeat.streams.ledger import Ledger
from services.broker import uploads
from tests.broker_fixtures import running_broker, serving
from tests.tiny_models import write_tied_model
from tests.waiting import eventually
from tests.world import job_body

ROWS = b'{"prompt": "5 + 9 =", "answer": "14"}\n'
MAX_BYTES = 1 << 20


@pytest_asyncio.fixture
async def broker(ledger: Ledger, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with running_broker(ledger, tmp_path, max_dataset_bytes=MAX_BYTES) as client:
        yield client


@pytest_asyncio.fixture
async def client(broker: httpx.AsyncClient) -> AsyncIterator[AsyncClient]:
    async with AsyncClient("http://127.0.0.1") as client:
        client._http = broker
        yield client


def files_in(data_dir: Path) -> list[str]:
    return sorted(path.name for path in (data_dir / "datasets").iterdir())


def job_on(path: str, **sections: Any) -> dict[str, Any]:
    return job_body(data={"type": "jsonl", "path": path}, **sections)


async def test_uploaded_file_is_what_a_job_reads(broker, tmp_path):
    put = await broker.put("/v1/datasets/sums.jsonl", content=ROWS)
    assert put.status_code == 201, put.text
    digest = hashlib.sha256(ROWS).hexdigest()
    assert put.json() | {"uploaded_at": 0} == {
        "name": "sums.jsonl",
        "path": "datasets/sums.jsonl",
        "num_bytes": len(ROWS),
        "sha256": digest,
        "uploaded_at": 0,
    }
    listed = (await broker.get("/v1/datasets")).json()
    assert listed == {"datasets": [put.json()], "max_bytes": MAX_BYTES}
    created = await broker.post("/v1/jobs", json=job_on("datasets/sums.jsonl"))
    assert created.status_code == 201, created.text
    assert files_in(tmp_path) == [".sums.jsonl.sha256", "sums.jsonl"]


async def test_uploaded_file_never_changes(broker, tmp_path):
    assert (await broker.put("/v1/datasets/sums.jsonl", content=ROWS)).status_code == 201
    assert (await broker.put("/v1/datasets/sums.jsonl", content=ROWS)).status_code == 200
    other = await broker.put("/v1/datasets/sums.jsonl", content=ROWS * 2)
    assert other.status_code == 409
    assert "take another name" in other.json()["detail"]
    assert (tmp_path / "datasets" / "sums.jsonl").read_bytes() == ROWS
    (tmp_path / "datasets" / "copied.jsonl").write_bytes(ROWS)  # a copy by the broker's operator
    assert (await broker.put("/v1/datasets/copied.jsonl", content=ROWS)).status_code == 200
    assert (await broker.put("/v1/datasets/copied.jsonl", content=b"{}")).status_code == 409


@pytest.mark.parametrize("name", ["..", ".hidden", "a%2Fb", "%2e%2e%2fb", "a" * 129, "a%00b", "ä.jsonl"])
async def test_name_that_is_no_name_is_refused(broker, tmp_path, name):
    answer = await broker.put(f"/v1/datasets/{name}", content=ROWS)
    assert answer.status_code in (404, 405, 422), answer.text
    assert sorted(os.listdir(tmp_path)) == ["prompts.jsonl"]


async def test_too_large_file_leaves_nothing(broker, tmp_path):
    async def drip():
        for _ in range(12):
            yield b" " * 100_000

    for content in (b" " * (MAX_BYTES + 1), drip()):
        answer = await broker.put("/v1/datasets/sums.jsonl", content=content)
        assert answer.status_code == 413, answer.text
        assert f"at most {MAX_BYTES} bytes here; the broker's ONBEAT_MAX_DATASET_BYTES" in answer.json()["detail"]
    assert not (tmp_path / "datasets").exists() or files_in(tmp_path) == []


async def test_what_did_not_arrive_as_it_was_leaves_nothing(broker, tmp_path):
    answer = await broker.put("/v1/datasets/sums.jsonl", content=ROWS, params={"sha256": "0" * 64})
    assert answer.status_code == 422
    assert "send it again" in answer.json()["detail"]
    assert files_in(tmp_path) == []


async def test_upload_that_is_cut_off_leaves_nothing_and_is_no_defect(ledger, tmp_path, caplog):
    caplog.set_level("INFO", "onbeat.access")
    async with serving(ledger, tmp_path, has_conductor=False) as broker:
        _, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(broker.url).port)
        writer.write(b"PUT /v1/datasets/sums.jsonl HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n" + ROWS)
        await eventually("it has begun", lambda: (tmp_path / "datasets").exists() and files_in(tmp_path))
        writer.close()
        left = "route=/v1/datasets/{name} status=499"
        await eventually("the broker notes that its client left", lambda: left in caplog.text)
    assert files_in(tmp_path) == []
    assert "Traceback" not in caplog.text


async def test_upload_needs_a_disk_that_has_space_left(broker, tmp_path, monkeypatch):
    monkeypatch.setattr(uploads, "free_bytes", lambda _: 10)
    answer = await broker.put("/v1/datasets/sums.jsonl", content=ROWS)
    assert (answer.status_code, "less than 1 GB free" in answer.text) == (507, True)
    assert files_in(tmp_path) == []


async def test_data_folder_that_is_read_only_is_named(broker, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refuse)
    answer = await broker.put("/v1/datasets/sums.jsonl", content=ROWS)
    assert (answer.status_code, "Read-only file system; ask whoever runs it" in answer.text) == (507, True)


async def test_file_of_an_unfinished_job_is_not_removed(broker, ledger, world, tmp_path):
    odd = await world.create_job()
    await ledger.redis.hset(JobKeys(odd).job, "config", "{")  # this broker cannot read it
    await broker.put("/v1/datasets/sums.jsonl", content=ROWS)
    for path in ("datasets/sums.jsonl", "datasets/sums.jsonl/."):
        job = (await broker.post("/v1/jobs", json=job_on(path))).json()["id"]
        refused = await broker.delete("/v1/datasets/sums.jsonl")
        assert (refused.status_code, job in refused.json()["detail"]) == (409, True)
        await broker.post(f"/v1/jobs/{job}:cancel")
    assert (await broker.delete("/v1/datasets/sums.jsonl")).status_code == 204
    assert (await broker.delete("/v1/datasets/sums.jsonl")).status_code == 404
    assert files_in(tmp_path) == []


async def test_client_uploads_a_file_once(client, broker, tmp_path):
    source = tmp_path / "my sums.jsonl"
    source.write_bytes(ROWS)
    record = await client.datasets.push(source)
    assert record.path == f"datasets/my-sums-{hashlib.sha256(ROWS).hexdigest()[:16]}.jsonl"
    assert await client.datasets.push(source) == record
    assert [listed.name for listed in await client.datasets.list()] == [record.name]
    with pytest.raises(ApiError, match="take another name"):
        await client.datasets.push(tmp_path / "prompts.jsonl", name=record.name)
    source.write_bytes(b" " * (MAX_BYTES + 1))
    with pytest.raises(ValueError, match=f"the broker takes at most {MAX_BYTES}"):
        await client.datasets.push(source)
    await client.datasets.delete(record.name)
    assert await client.datasets.list() == []


async def test_validation_says_what_creation_would_and_creates_nothing(broker):
    held_out = {"data": {"type": "jsonl", "path": "none-either.jsonl"}, "num_prompts": 1}
    before, job = (await broker.get("/v1/jobs")).json(), job_on("none.jsonl", evaluation=held_out)
    refused, checked = [await broker.post(path, json=job) for path in ("/v1/jobs", "/v1/jobs:validate")]
    assert (checked.status_code, checked.json()["errors"]) == (422, refused.json()["errors"])
    assert [error["field"] for error in checked.json()["errors"]] == ["data.path", "evaluation.data.path"]
    checked = await broker.post("/v1/jobs:validate", json=job_on("prompts.jsonl"))
    (rows,) = checked.json()["rows"]
    assert (checked.status_code, checked.json()["notes"], rows["num_accepted"]) == (200, [], 5)
    assert (await broker.get("/v1/jobs")).json() == before


async def test_dropped_prompts_are_an_event_of_the_job(broker, tmp_path):
    model = write_tied_model(tmp_path / "model")
    (tmp_path / "long.jsonl").write_bytes(ROWS + b'{"prompt": "%s", "answer": "1"}\n' % (b"x" * 200))
    job = job_on("long.jsonl", model={"path": str(model)})
    job["data"]["max_prompt_tokens"] = 100
    created = await broker.post("/v1/jobs", json=job)
    assert created.status_code == 201, created.text
    events = (await broker.get(f"/v1/jobs/{created.json()['id']}/events")).json()["events"]
    (warning,) = [event["message"] for event in events if event["kind"] == "job.warning"]
    assert "1 of 2 prompts have more than 100 tokens; the longest is line 2" in warning
