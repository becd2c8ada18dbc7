"""Problem documents (RFC 9457): every refusal and failure of the API is mapped to one here, and nowhere else."""

import json
import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from redis.exceptions import AuthenticationError, RedisError, ResponseError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from onbeat.config.explain import MAX_EXPLAINED, dotted, explain_error, explain_errors, show
from onbeat.contracts.errors import GroupsTrimmed, IllegalTransition, JobDeleted, JobNotFound, TooManyPending
from onbeat.contracts.records import RowCounts
from onbeat.streams.connection import explain_refusal
from onbeat.streams.unreadable import MISREAD, find_unreadable
from services.broker.admission.model_files import Complaint
from services.broker.admission.review import JobRefused
from services.broker.api.context import context_of
from services.broker.api.review import examine_the_rest
from services.broker.api.toml_body import FieldError, MalformedToml, field_errors
from services.broker.datasets.process import TooBusy
from services.broker.views.groups import GroupNotFound
from services.broker.views.live import TooManyWatchers

logger = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
REQUEST_ID = "onbeat.request_id"  # key of the scope
CLIENT_LEFT = 499  # the client is gone, but logs and metrics show it
MAX_REDIS_TEXT = 200  # characters of what Redis says
JOB_PATHS = ("/v1/jobs", "/v1/jobs:validate", "/v1/jobs:preview")
# Status, title (default: that of the status) and seconds until a retry of errors whose text is the detail.
REFUSALS: dict[type[Exception], tuple[int, str, int | None]] = {
    GroupNotFound: (404, "", None),
    JobNotFound: (404, "Job not found", None),
    IllegalTransition: (409, "Illegal transition", None),
    JobDeleted: (409, "", None),
    GroupsTrimmed: (410, "", None),
    TooManyPending: (429, "Too many pending jobs", 60),
    TooBusy: (503, "", 5),
    TooManyWatchers: (503, "", 5),
}


class Problem(BaseModel):
    """A problem document (RFC 9457). `errors` lists the wrong fields, each with what to do about it. `rows` counts the
    rows of a refused job's data, as far as they were looked at."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str = ""
    errors: list[FieldError] = []
    rows: list[RowCounts] | None = None


class ProblemResponse(JSONResponse):
    media_type = MEDIA_TYPE

    def render(self, content: Any) -> bytes:
        """Encode as JSON. Messages may quote what users sent: halves of characters, which UTF-8 lacks, are replaced."""
        return json.dumps(content, ensure_ascii=False).encode(errors="replace")


def problem(
    status: int,
    title: str,
    detail: str = "",
    errors: list[FieldError] | None = None,
    headers: Mapping[str, str] | None = None,
    rows: list[RowCounts] | None = None,
) -> ProblemResponse:
    body = Problem(title=title, status=status, detail=detail, errors=errors or [], rows=rows)
    return ProblemResponse(body.model_dump(exclude_none=True), status, headers=headers)


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route for OpenAPI."""
    schema = {"schema": {"$ref": "#/components/schemas/Problem"}}
    return {status: {"description": HTTPStatus(status).phrase, "content": {MEDIA_TYPE: schema}} for status in statuses}


def install(app: FastAPI) -> None:
    app.add_exception_handler(RequestValidationError, on_invalid_request)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(MalformedToml, on_malformed_toml)
    app.add_exception_handler(JobRefused, on_refused)
    for kind in REFUSALS:
        app.add_exception_handler(kind, on_refusal)
    app.add_exception_handler(RedisError, on_redis_error)
    app.add_exception_handler(ClientDisconnect, on_client_left)
    for kind in MISREAD:
        app.add_exception_handler(kind, on_misread)
    app.add_exception_handler(Exception, on_defect)
    generate = app.openapi
    app.openapi = lambda: with_problem(generate())  # type: ignore[method-assign]


def with_problem(spec: dict[str, Any]) -> dict[str, Any]:
    """Complete OpenAPI with the schema that `documented` refers to, and with the API key, which no route asks for."""
    schema = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
    spec["components"]["schemas"] |= schema.pop("$defs", {}) | {"Problem": schema}
    spec["components"]["securitySchemes"] = {"apiKey": {"type": "http", "scheme": "bearer"}}
    spec["security"] = [{"apiKey": []}, {}]  # none where the broker has no keys
    return spec


async def on_invalid_request(request: Request, error: Exception) -> ProblemResponse:
    assert isinstance(error, RequestValidationError)
    if any(details["type"] == "json_invalid" for details in error.errors()):
        reason = str(error.errors()[0].get("ctx", {}).get("error", "syntax error"))
        return problem(400, "Malformed JSON", f"the body is not valid JSON: {reason}")
    is_job = getattr(request.scope["route"], "path", None) in JOB_PATHS
    if is_job:
        complaints = explain_errors(error.errors(), error.body)
    else:
        complaints = [complaint for details in error.errors()[:MAX_EXPLAINED] for complaint in explain_other(details)]
    if is_job and isinstance(error.body, dict):
        wrong = [field for field, _ in complaints]
        misspelt = [
            f for f, details in zip(wrong, error.errors(), strict=False) if details["type"] == "extra_forbidden"
        ]
        complaints += await examine_the_rest(context_of(request), error.body, wrong, misspelt)
    detail = "Nothing was created or changed. Correct the fields and send it again."
    return problem(422, "Invalid request", detail, field_errors(request, complaints))


def explain_other(error: Any) -> list[Complaint]:
    """Return (field, message) of an error in a request whose body, if it has one, is no job."""
    source, *location = error["loc"]
    if source != "body":
        return explain_error(error, None)
    message = f"{error['msg']}, got {show(error.get('input'))}"
    if error["type"] == "extra_forbidden":
        message = "is no key of this request; /openapi.json names those there are"
    return [(dotted(map(str, location)) or "body", message)]


async def on_malformed_toml(_: Request, error: Exception) -> ProblemResponse:
    assert isinstance(error, MalformedToml)
    message = f"the body is not valid TOML: {error}"
    return problem(400, "Malformed TOML", message, [FieldError(field="body", message=str(error), line=error.line)])


async def on_http_error(request: Request, error: Exception) -> ProblemResponse:
    assert isinstance(error, HTTPException)
    detail = error.detail if error.detail != HTTPStatus(error.status_code).phrase else ""
    if error.status_code in (404, 405) and not detail:
        detail = f"{request.method} {request.url.path} is not part of this API; see /openapi.json"
    headers = error.headers
    if error.status_code == 405:  # Starlette names the methods of the path's first route only
        headers = {"Allow": ", ".join(sorted(methods_of(request)))}
    return problem(error.status_code, HTTPStatus(error.status_code).phrase, detail, headers=headers)


def methods_of(request: Request) -> set[str]:
    """Return the methods of all routes with the path of the one that was asked."""
    path = getattr(request.scope["route"], "path", None)
    routes = (route for route in request.app.routes if getattr(route, "path", None) == path)
    return {method for route in routes for method in getattr(route, "methods", None) or ()}


async def on_refused(request: Request, error: Exception) -> ProblemResponse:
    assert isinstance(error, JobRefused)
    detail = "Nothing was created. Correct the fields and send it again."
    return problem(422, "Job refused", detail, field_errors(request, error.complaints), rows=error.rows or None)


async def on_refusal(_: Request, error: Exception) -> ProblemResponse:
    status, title, retry_s = next(REFUSALS[kind] for kind in type(error).__mro__ if kind in REFUSALS)
    headers = None if retry_s is None else {"Retry-After": str(retry_s)}
    return problem(status, title or HTTPStatus(status).phrase, str(error), headers=headers)


async def on_client_left(_: Request, __: Exception) -> Response:
    """Note that the client hung up before its body was complete; the answer only reaches the log."""
    return Response(status_code=CLIENT_LEFT)


async def on_redis_error(_: Request, error: Exception) -> ProblemResponse:
    title, detail = explain_redis(error)
    return problem(503, title, detail, headers={"Retry-After": "2"})


def explain_redis(error: Exception) -> tuple[str, str]:
    """Log the error, and return title and detail: Redis is away, or it is there and refuses a command."""
    logger.error("Redis failed a request: %s: %s", type(error).__name__, error)
    if isinstance(error, AuthenticationError):
        return "Redis refuses the broker", f"Nothing is lost. Redis: {explain_refusal(error)}"
    if not isinstance(error, ResponseError):
        return "Redis does not answer", "Nothing is lost; try again in a moment."
    causes = "Is the data of another version of Onbeat, does the user lack rights, or is memory full?"
    return "Redis refused a command", f"{str(error)[:MAX_REDIS_TEXT]}. {causes} See the broker's log."


async def on_misread(request: Request, error: Exception) -> ProblemResponse:
    """Answer 500 naming the field of the job's records that cannot be read. Raises the error if there is none."""
    job_id = request.path_params.get("job_id")
    unreadable = await find_unreadable(context_of(request).ledger, job_id) if job_id else None
    if unreadable is None:
        raise error
    logger.error("%s %s failed: %s", request.method, request.url.path, unreadable)
    remedy = "restore it from a backup of Redis, or let an admin delete the job"
    origin = "somebody else, or another version of Onbeat, has written it"
    return problem(500, "Unreadable record", f"{unreadable}. Onbeat does not write that: {origin}; {remedy}.")


async def on_defect(request: Request, error: Exception) -> ProblemResponse:
    """Answer 500; the server logs the defect with its traceback."""
    detail = f"{request.method} {request.url.path} failed because of a defect; see the broker's log."
    return problem(500, "Internal error", detail, headers={"X-Request-Id": request.scope.get(REQUEST_ID, "-")})
