"""The dashboard's files, which hold no data and need no key, and the schema of a job.

The files are those of the package at the first request. A name is looked up among them and never becomes a path.
"""

import hashlib
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

from onbeat.charts.table import TABLE_FILE
from onbeat.config import JobConfig
from services.broker.api.context import Broker

router = APIRouter()

FOLDER = Path(__file__).parents[1] / "dashboard"
INDEX = "index.html"
SHARED = {"charts.json": TABLE_FILE}  # assets that lie elsewhere in the package
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".toml": "application/toml",
    ".json": "application/json",
}
# Scripts and styles of this broker only, none within the page; no other host is asked or sent anything.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # keep it, but ask whether it is still the same: a new broker has new files
}


@dataclass(frozen=True)
class Asset:
    body: bytes
    media_type: str

    @cached_property
    def etag(self) -> str:
        return f'"{hashlib.sha256(self.body).hexdigest()[:32]}"'


@cache
def assets() -> dict[str, Asset]:
    """Read the assets by name, INDEX among them. Files that an editor or a system leaves there are not read."""
    paths = {path.relative_to(FOLDER).as_posix(): path for path in FOLDER.rglob("*")} | SHARED
    return {
        name: Asset(path.read_bytes(), MEDIA_TYPES[path.suffix])
        for name, path in paths.items()
        if path.suffix in MEDIA_TYPES and path.is_file()
    }


def answer(request: Request, asset: Asset) -> Response:
    """Return the asset, or 304 without a body to a client that has it. The server removes the body for HEAD."""
    headers = HEADERS | {"ETag": asset.etag}
    if is_known(request.headers.get("if-none-match", ""), asset.etag):
        return Response(status_code=304, headers=headers)
    return Response(asset.body, media_type=asset.media_type, headers=headers)


def is_known(if_none_match: str, etag: str) -> bool:
    """Return whether the client has the file. Proxies that compress mark its tag as weak: it is still the same file."""
    tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return etag in tags or tags == ["*"]


@cache
def read_only_index() -> Asset:
    """Return the index with the mark of a broker that changes nothing: its pages show no buttons that it refuses."""
    index = assets()[INDEX]
    return Asset(index.body.replace(b"<html ", b"<html data-read-only ", 1), index.media_type)


@router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
async def get_dashboard(request: Request, broker: Broker) -> Response:
    return answer(request, read_only_index() if broker.is_read_only else assets()[INDEX])


@router.api_route("/assets/{name:path}", methods=["GET", "HEAD"], include_in_schema=False)
async def get_asset(request: Request) -> Response:
    name = request.scope["path"].removeprefix("/assets/")  # `name:path` would lack the line end of "app.js%0A"
    asset = assets().get(name)
    if asset is None or name == INDEX:
        raise HTTPException(404, f"there is no asset {name[:100]!r}")
    return answer(request, asset)


@router.get("/v1/job-schema", tags=["jobs"])
async def get_job_schema() -> dict[str, Any]:
    """Return the JSON schema of a job, as `POST /v1/jobs` takes it."""
    return job_schema()


@cache
def job_schema() -> dict[str, Any]:
    return JobConfig.model_json_schema()
