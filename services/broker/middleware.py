"""The middleware around every request: timing, access log, authorization and limits.

Envelope -> Gate -> BodyLimit -> the route: a refusal costs no more than its headers.
"""

import asyncio
import logging
import math
import re
import secrets
import time
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onbeat.process.api_keys import ApiKey
from onbeat.process.network import is_loopback
from services.broker.api.problems import REQUEST_ID, ProblemResponse, problem
from services.broker.auth import CALLER, OPEN_PATHS, READING, KeyRing, RateLimit, is_upload, required_role
from services.broker.metrics import Meters, known_method

access_log = logging.getLogger("onbeat.access")

MAX_HEADER_BYTES = 16 * 1024  # URL included
FAILURES_PER_S, FAILURE_BURST = 0.2, 10  # wrong keys from one address; a right key is admitted all the same
CLEAN_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
CLEAN_JOB_ID = re.compile(r"[A-Za-z0-9._-]{1,200}")


class Gate:
    """A gate that admits a request if its key has the role that the route requires and has not called too often.

    `keys` None: every caller is an admin. `is_local`: then only programs of this machine are admitted, not requests
    from a web page in its browser. `is_read_only`: only requests are admitted that change nothing.
    """

    def __init__(
        self, app: ASGIApp, keys: KeyRing | None, limit: RateLimit, is_local: bool, is_read_only: bool
    ) -> None:
        self._app, self._keys, self._limit, self._is_local = app, keys, limit, is_local
        self._is_read_only = is_read_only
        self._failures = RateLimit(FAILURES_PER_S, FAILURE_BURST)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        assert scope["type"] == "http", "the server takes no web sockets"
        await (self._refusal(scope) or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> ProblemResponse | None:
        if self._is_read_only and scope["method"] not in READING:
            detail = "this is a read-only view; `onbeat up` in the same folder continues the jobs"
            return problem(403, "Forbidden", detail)
        if size_of_headers(scope) > MAX_HEADER_BYTES:
            detail = f"URL and headers together may have at most {MAX_HEADER_BYTES} bytes"
            return problem(431, "Request header fields too large", detail)
        role, headers = required_role(scope["method"], scope["path"]), Headers(scope=scope)
        if "transfer-encoding" in headers and "content-length" in headers:  # one of them is false: RFC 9112, 6.1
            detail = "a request may have Content-Length or Transfer-Encoding, not both"
            return problem(400, "Bad request", detail, headers={"Connection": "close"})
        is_probe = role is None and scope["path"] in OPEN_PATHS
        if self._keys is None and self._is_local and not is_probe and not is_from_here(headers):
            return refuse_page(headers)
        if role is None:
            return None
        if self._keys is None:
            return self._refuse_haste(address_of(scope))
        sent = bearer_token(headers)
        key = self._keys.find(sent) if sent else None
        if key is None:
            if wait_s := self._failures.wait_s(address_of(scope)):
                return refuse_haste(wait_s, "too many requests without a valid API key from this address")
            return refuse_unknown(has_key=bool(sent))
        scope[CALLER] = key
        if too_hasty := self._refuse_haste(key.id):
            return too_hasty
        if not key.role.includes(role):
            return problem(
                403, "Forbidden", f"this call needs an API key of role {role}; the one sent has the role {key.role}"
            )
        return None

    def _refuse_haste(self, who: str) -> ProblemResponse | None:
        wait_s = self._limit.wait_s(who)
        return refuse_haste(wait_s, "more requests than this broker accepts from one caller") if wait_s else None


def size_of_headers(scope: Scope) -> int:
    return len(scope["path"]) + len(scope["query_string"]) + sum(len(n) + len(value) for n, value in scope["headers"])


def bearer_token(headers: Headers) -> str:
    """Return the bearer token; '' without one or with two Authorization headers."""
    sent = headers.getlist("authorization")
    scheme, _, token = (sent[0] if len(sent) == 1 else "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def refuse_unknown(*, has_key: bool) -> ProblemResponse:
    """Refuse any key that is not in force in the same way, so that the answer does not reveal which ids exist."""
    if has_key:
        detail = "the API key is unknown, revoked or expired; ask the operator of this broker for another one"
        challenge = 'Bearer realm="onbeat", error="invalid_token"'
    else:
        detail = "send an API key as 'Authorization: Bearer KEY'; the onbeat command takes it from ONBEAT_API_KEY"
        challenge = 'Bearer realm="onbeat"'
    return problem(401, "Unauthorized", detail, headers={"WWW-Authenticate": challenge})


def refuse_haste(wait_s: float, reason: str) -> ProblemResponse:
    after_s = math.ceil(wait_s)
    detail = f"{reason}; try again in {after_s} s"
    return problem(429, "Too many requests", detail, headers={"Retry-After": str(after_s)})


def is_from_here(headers: Headers) -> bool:
    """Return whether the request is neither from another site's page nor to another site's name that points here."""
    host = headers.get("host", "")
    name = re.sub(r":\d*$", "", host)  # the host without the port
    is_own_page = headers.get("origin") in (None, f"http://{host}", f"https://{host}")
    return is_own_page and is_loopback(name.strip("[]"))


def refuse_page(headers: Headers) -> ProblemResponse:
    return problem(
        403,
        "Forbidden",
        f"this broker has no API keys and answers only programs on this machine: Host is {headers.get('host', '')!r}, "
        f"Origin {headers.get('origin', '')!r}. Call it as 127.0.0.1, or give it keys (ONBEAT_API_KEYS_FILE)",
    )


def address_of(scope: Scope) -> str:
    return scope["client"][0] if scope.get("client") else "-"


class Envelope:
    """A request id, security headers for browsers, a duration for the metrics, and an access log line for requests that
    write or are refused.

    The line has no body, no query and nothing that a client could choose freely.
    """

    def __init__(self, app: ASGIApp, meters: Meters) -> None:
        self._app, self._meters = app, meters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started = time.perf_counter()
        sent_id = Headers(scope=scope).get("x-request-id", "")
        scope[REQUEST_ID] = sent_id if CLEAN_REQUEST_ID.fullmatch(sent_id) else secrets.token_hex(8)
        status, location = 500, ""

        async def send_marked(message: Message) -> None:
            nonlocal status, location
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                status, location = message["status"], headers.get("location", "")
                headers["X-Request-Id"] = scope[REQUEST_ID]
                headers["X-Content-Type-Options"] = "nosniff"
                headers["X-Frame-Options"] = "DENY"
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        try:
            await self._app(scope, receive, send_marked)
        finally:
            route = getattr(scope.get("route"), "path", "unknown")  # the template: few label values
            self._meters.observe_request(scope["method"], route, status, time.perf_counter() - started)
            if scope["method"] not in READING or status in (401, 403):
                note_access(scope, route, status, location)


def note_access(scope: Scope, route: str, status: int, location: str) -> None:
    key: ApiKey | None = scope.get(CALLER)
    job_id = scope.get("path_params", {}).get("job_id") or location.removeprefix("/v1/jobs/")
    fields = {
        "method": known_method(scope["method"]),
        "route": route,
        "status": status,
        "job_id": job_id if CLEAN_JOB_ID.fullmatch(job_id) else "-",
        "key_id": key.id if key else "-",
        "role": key.role.value if key else "-",
        "address": address_of(scope),
        "request_id": scope[REQUEST_ID],
    }
    access_log.info(" ".join(f"{name}={value}" for name, value in fields.items()), extra=fields)


@dataclass(frozen=True)
class BodyRule:
    """The limits of a body: its size, the time from the headers to its end, and `silence_s` between two parts."""

    max_bytes: int
    timeout_s: float
    silence_s: float = math.inf
    remedy: str = "put large data into files"


class BodyLimit:
    """A limit that rejects bodies that are too large or too late. Responses are not limited."""

    def __init__(self, app: ASGIApp, rule: BodyRule, upload_rule: BodyRule) -> None:
        self._app, self._rule, self._upload_rule = app, rule, upload_rule

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        rule = self._upload_rule if is_upload(scope["method"], scope["path"]) else self._rule
        detail = f"a request may have at most {rule.max_bytes} bytes here; {rule.remedy}"
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced[:20]) > rule.max_bytes:
            return await problem(413, "Request too large", detail)(scope, receive, send)
        num_bytes, is_complete = 0, False
        now = asyncio.get_running_loop().time
        deadline = now() + rule.timeout_s

        async def receive_limited() -> Message:
            nonlocal num_bytes, is_complete
            if is_complete:  # a further call waits for the end of the connection
                return await receive()
            try:
                async with asyncio.timeout_at(min(deadline, now() + rule.silence_s)):
                    message = await receive()
            except TimeoutError:
                late = f"the body did not arrive within {rule.timeout_s:g} s of its headers"
                if now() < deadline:
                    late = f"nothing more of the body came for {rule.silence_s:g} s"
                raise HTTPException(408, late, {"Connection": "close"}) from None
            is_complete = not message.get("more_body", False)
            num_bytes += len(message.get("body", b""))
            if num_bytes > rule.max_bytes:
                raise HTTPException(413, detail)
            return message

        await self._app(scope, receive_limited, send)
