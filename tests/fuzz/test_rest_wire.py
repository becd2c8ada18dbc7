"""Requests that no HTTP library would send, and jobs that no user would submit: each is answered, none does harm."""

import contextlib
import copy
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz import fuzzed
from tests.fuzz.conftest import LiveBroker
from tests.world import job_body

pytestmark = pytest.mark.slow

DEADLINE_S = 60.0
PATIENCE_S = 0.2  # seconds: an answer to an incomplete request that comes later is not seen, but its defect is logged
JSON = "Content-Type: application/json"


@pytest.fixture(autouse=True)
def unharmed(live_broker: LiveBroker) -> Iterator[None]:
    yield
    live_broker.assert_unharmed()


def exchange(broker: LiveBroker, request: bytes, timeout_s: float = DEADLINE_S) -> bytes:
    """Send bytes and return all that comes back. A server that waits for more sees their end after `timeout_s`."""
    answer = b""
    opened = socket.create_connection(("127.0.0.1", broker.port), timeout=DEADLINE_S)
    with opened as stream, contextlib.suppress(ConnectionError):
        stream.sendall(request)
        stream.settimeout(timeout_s)
        with contextlib.suppress(TimeoutError):
            while part := stream.recv(1 << 16):
                answer += part
            return answer
        stream.settimeout(DEADLINE_S)
        stream.shutdown(socket.SHUT_WR)
        while part := stream.recv(1 << 16):
            answer += part
    return answer


def request_of(method: str, path: str, body: bytes = b"", *headers: str) -> bytes:
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: 127.0.0.1",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def assert_refused(answer: bytes, *statuses: int) -> dict[str, Any]:
    """Assert that the answer is one problem document with one of these statuses."""
    assert status_of(answer) in statuses, answer[:500]
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/problem+json" in head, answer[:500]
    problem: dict[str, Any] = json.loads(body)
    assert problem["status"] == status_of(answer)
    return problem


def assert_answered_or_closed(answer: bytes) -> None:
    """Assert an answer or a closed connection: a server below the application refuses malformed HTTP in plain text."""
    assert not answer or answer.startswith(b"HTTP/1.1 ")
    assert not answer or status_of(answer) < 500, answer[:500]


# ---- bodies ------------------------------------------------------------------------------------------------------

VALID = json.dumps(job_body()).encode()


def with_option(value: str) -> bytes:
    return json.dumps(job_body(reward={"options": {"x": "HERE"}})).replace('"HERE"', value).encode()


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(VALID[:-20], id="truncated"),
        pytest.param(VALID + VALID, id="two documents"),
        pytest.param(b"\xff\xfe\x00{", id="no text"),
        pytest.param(VALID.replace(b"test", b"te\xc3\x28st"), id="bad utf-8"),
        pytest.param(bytes(1000), id="zeros"),
        pytest.param(with_option("NaN"), id="not a number"),
        pytest.param(with_option("-Infinity"), id="infinite"),
        pytest.param(with_option("1e999"), id="too large for a float"),
        pytest.param(VALID.replace(b'"num_iterations": 3', b'"num_iterations": ' + b"9" * 5000), id="too many digits"),
        pytest.param(VALID.replace(b'"num_iterations": 3', b'"num_iterations": ' + b"9" * 4000), id="many digits"),
        pytest.param(with_option("[" * 200_000 + "]" * 200_000), id="deep list"),
        pytest.param(with_option('{"a":' * 100_000 + "1" + "}" * 100_000), id="deep object"),
        pytest.param(b'{"model":' * 50_000 + b"1" + b"}" * 50_000, id="deep job"),
        pytest.param(b'{"model":' * 100_000, id="unfinished depth"),
        pytest.param(json.dumps(dict.fromkeys(map(str, range(50_000)))).encode(), id="wide"),
        pytest.param(json.dumps({"k" * 900_000: 1}).encode(), id="long key"),
        pytest.param(with_option(r'"\ud800"'), id="surrogate"),
        pytest.param(VALID.replace(b'"test"', rb'"\udfff"'), id="surrogate in a name"),
        pytest.param(VALID.replace(b"prompts.jsonl", rb"prompts\u0000.jsonl"), id="null byte in a path"),
        pytest.param(VALID.replace(b'"name"', rb'"na\u0000me"'), id="null byte in a key"),
        pytest.param(VALID.replace(b"prompts.jsonl", b"....//....//../../../etc/passwd"), id="path above"),
        pytest.param(VALID.replace(b"prompts.jsonl", b"/dev/zero"), id="device"),
        pytest.param(b'"job"', id="a string"),
        pytest.param(b"null", id="null"),
        pytest.param(b"true", id="true"),
        pytest.param(b"1e400", id="a number"),
    ],
)
def test_a_body_that_is_no_job_is_a_problem(live_broker: LiveBroker, body: bytes) -> None:
    problem = assert_refused(exchange(live_broker, request_of("POST", "/v1/jobs", body, JSON)), 400, 422)
    assert problem["detail"]
    assert len(json.dumps(problem)) < 20_000, "the refusal repeats what was sent"


# ---- paths and headers -------------------------------------------------------------------------------------------

PATHS = [
    "/v1/jobs/%00",
    "/v1/jobs/a%00b/events",
    "/v1/jobs/..%2f..%2fetc%2fpasswd",
    "/v1/jobs/%2e%2e",
    "/v1/jobs/../../../../etc/passwd",
    "/v1/jobs/running%0a",
    "/v1/jobs/%ff%fe",
    "/v1/jobs/running{}",
    "/v1/jobs/*",
    "/v1/jobs/" + "a" * 50_000,
    "/v1/jobs/running/iterations?after=" + "9" * 5000,
    "/v1/jobs/running/iterations?after=1e400",
    "/v1/jobs/running/events?after=%00",
    "/v1/jobs/running/events?after=99999999999999999999-0",
    "/v1/jobs/running/evaluations/-1/samples",
    "/v1/jobs/running/samples?limit=%ff",
    "/v1/workers?pool=../",
    "/v1/workers?pool=%00",
    "/..%2f..%2f..%2fetc%2fpasswd",
    "//etc/passwd",
    "/dashboard/../../settings.py",
    "/dashboard/..%2f..%2fsettings.py",
]


@pytest.mark.parametrize("path", PATHS, ids=[path[:60] for path in PATHS])
def test_a_path_that_leads_nowhere_is_a_problem(live_broker: LiveBroker, path: str) -> None:
    assert_refused(exchange(live_broker, request_of("GET", path)), 404, 422, 431)


@pytest.mark.parametrize("method", ["TRACE", "OPTIONS", "PUT", "PATCH", "PROPFIND", "QUERY"])
def test_a_method_that_is_not_offered_is_a_problem(live_broker: LiveBroker, method: str) -> None:
    assert_refused(exchange(live_broker, request_of(method, "/v1/jobs/running")), 405)


POST = b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(POST + b"Content-Length: many\r\n\r\n{}", id="no length"),
        pytest.param(POST + b"Content-Length: -5\r\n\r\n{}", id="negative length"),
        pytest.param(POST + b"Content-Length: " + b"9" * 40 + b"\r\n\r\n{}", id="endless length"),
        pytest.param(POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", id="two lengths"),
        pytest.param(POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}", id="two framings"),
        pytest.param(POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}", id="no chunk"),
        pytest.param(POST + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n{}", id="endless chunk"),
        pytest.param(POST + b"Transfer-Encoding: lies\r\n\r\n{}", id="unknown coding"),
        pytest.param(b"GET /livez HTTP/1.1\r\n: x\r\n\r\n", id="no header name"),
        pytest.param(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n and more\r\n\r\n", id="folded header"),
        pytest.param(b"GET /livez HTTP/1.1\r\nHost: \0\r\n\r\n", id="zero in a header"),
        pytest.param(b"GET /livez\r\n\r\n", id="no version"),
        pytest.param(b"GET /livez HTTP/9.9\r\n\r\n", id="strange version"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", id="HTTP/2"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200), id="TLS"),
        pytest.param(
            b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
            id="web socket",
        ),
        pytest.param(bytes(range(256)) * 4, id="noise"),
        pytest.param(POST + b"" + JSON.encode() + b"\r\nContent-Length: 900\r\n\r\n" + VALID[:20], id="short body"),
        pytest.param(
            request_of("POST", "/v1/jobs", b"{}", JSON).replace(b"Connection: close\r\n", b"") + b"more" * 1000,
            id="long body",
        ),
        pytest.param(request_of("GET", "/livez", b"", "X: " + "x" * 5_000_000), id="large header"),
        pytest.param(request_of("GET", "/livez", b"", *(f"X-{i}: y" for i in range(50_000))), id="many headers"),
        pytest.param(request_of("GET", "/" + "a" * 5_000_000), id="long path"),
    ],
)
def test_what_is_no_http_is_refused_or_closed(live_broker: LiveBroker, sent: bytes) -> None:
    assert_answered_or_closed(exchange(live_broker, sent, PATIENCE_S))


# ---- at random ---------------------------------------------------------------------------------------------------


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the places of everything inside a JSON document."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in inside for place in ((*path, key), *places(item, (*path, key)))]


JOBS = [
    job_body(),
    job_body(schedule={"mode": "bounded", "max_staleness": 2}, reward={"name": "regex", "options": {"pattern": "a"}}),
    job_body(
        data={"type": "reasoning_gym", "task": "chain_sum", "options": {"max_terms": 2}},
        evaluation={"data": {"type": "jsonl", "path": "prompts.jsonl"}, "num_prompts": 2, "num_samples_per_prompt": 2},
    ),
]
HOSTILE = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 2**31, 2**63, 2**64, 10**30, -(10**30), 1e308, 5e-324, -0.0, 0.5]),
    st.sampled_from(["", "\0", "a/../b", "(" * 50, "(a+)+$", "\u202e", "x" * 5000, "bundled:", "/", "{}", "%s"]),
    st.sampled_from([[], {}, [[]], {"type": "grpo"}, {"mode": "sync"}, {"": {}}, [None] * 100]),
    st.text(max_size=20),
)


@st.composite
def spoiled_jobs(draw: st.DrawFn) -> Any:
    job = copy.deepcopy(draw(st.sampled_from(JOBS)))
    for _ in range(draw(st.integers(1, 3))):
        *way, key = draw(st.sampled_from(places(job)))
        here = job
        for step in way:
            here = here[step]
        if draw(st.booleans()):
            here[key] = draw(HOSTILE)
        elif isinstance(here, dict):
            here[draw(st.sampled_from(["type", "mode", "path", "options", "_", ""]))] = here.pop(key)
        if not places(job):
            break
    return job


@fuzzed(150)
@given(spoiled_jobs())
def test_corrupted_job_is_created_as_sent_or_refused_by_field(live_broker: LiveBroker, job: Any) -> None:
    with httpx.Client(base_url=live_broker.url, timeout=DEADLINE_S) as client:
        response = client.post("/v1/jobs", json=job)
        if response.status_code == 201:
            record = response.json()
            assert {key: record["config"][key] for key in ("name", "seed") if key in job} == {
                key: job[key] for key in ("name", "seed") if key in job
            }
            assert client.get(response.headers["location"]).json() == record
            assert client.post(f"/v1/jobs/{record['id']}:cancel").json()["state"] == "CANCELLED"
        else:
            assert response.status_code == 422, response.text
            assert all(error["field"] and error["message"] for error in response.json()["errors"])
            assert response.json()["errors"], response.text
