"""Clients that never finish a request, over real sockets to a real broker process: none of them stays."""

import json
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.broker_fixtures import broker_process
from tests.world import job_body

pytestmark = pytest.mark.slow

TIMEOUT_S = 1.0
NEVER_S = 15.0
HEADERS = b"Host: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Iterator[int]:
    """Yield the port of a broker with short timeouts."""
    folder = tmp_path_factory.mktemp("broker")
    with broker_process(folder, redis_url, REQUEST_TIMEOUT_S=str(TIMEOUT_S)) as (url, _):
        yield int(url.rpartition(":")[2])
        assert "Traceback" not in (folder / "log").read_text()


def dribble(port: int, begin: bytes) -> tuple[bytes, float]:
    """Send a beginning, then a byte now and then. What is answered until the broker hangs up, and when that is."""
    started, answer = time.monotonic(), b""
    with socket.create_connection(("127.0.0.1", port), timeout=0.2) as stream:
        stream.sendall(begin)
        while time.monotonic() - started < NEVER_S:
            try:
                if begin:
                    stream.sendall(b" ")
                if not (part := stream.recv(4096)):
                    break
                answer += part
            except TimeoutError:
                continue
            except (BrokenPipeError, ConnectionResetError):  # the byte was sent after it had hung up
                break
    return answer, time.monotonic() - started


def test_endless_body_is_answered_408_and_the_connection_closed(port):
    answer, ended_s = dribble(port, b"POST /v1/jobs HTTP/1.1\r\n" + HEADERS + b'{"name": "')
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in head.lower()
    assert json.loads(body)["detail"] == "the body did not arrive within 1 s of its headers"
    assert TIMEOUT_S <= ended_s < NEVER_S / 2


def test_request_with_two_lengths_is_refused_with_what_follows(port):
    smuggled = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    lengths = b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" % len(b"0\r\n\r\n" + smuggled)
    with socket.create_connection(("127.0.0.1", port), timeout=NEVER_S) as stream:
        stream.sendall(b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\n" + lengths + smuggled)
        answer = b""
        while part := stream.recv(4096):
            answer += part
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"Content-Length or Transfer-Encoding, not both" in answer
    assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("begin", [b"", b"GET /livez HTTP/1.1\r\nX-Long: "], ids=["silence", "headers"])
def test_silent_client_or_endless_headers_are_disconnected(port, begin):
    answer, ended_s = dribble(port, begin)
    assert answer == b""
    assert TIMEOUT_S <= ended_s < NEVER_S / 2


def test_client_with_an_unread_body_is_disconnected_after_answer(port):
    answer, ended_s = dribble(port, b"GET /livez HTTP/1.1\r\n" + HEADERS)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert ended_s < NEVER_S / 2


@pytest.fixture
def slow_answer(port: int) -> Iterator[str]:
    """Return the path of a stream that ends after 2.5 s."""
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        job_id = client.post("/v1/jobs", json=job_body()).json()["id"]
        cancelling = threading.Timer(2.5, client.post, [f"/v1/jobs/{job_id}:cancel"])
        cancelling.start()
        yield f"/v1/jobs/{job_id}/stream"
        cancelling.join()


def test_slow_answer_is_allowed_and_its_connection_is_reused(port, slow_answer):
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        started = time.monotonic()
        answer = client.get(slow_answer)
        assert (answer.status_code, '"over"' in answer.text) == (200, True)
        assert time.monotonic() - started > 2 * TIMEOUT_S
        assert client.get("/livez").status_code == 200


def test_endless_headers_after_a_long_answer_are_disconnected(port, slow_answer):
    first = f"GET {slow_answer} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
    answer, ended_s = dribble(port, first + b"GET /livez HTTP/1.1\r\nX-Long: ")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.count(b"HTTP/1.1") == 1
    assert 2.5 + TIMEOUT_S <= ended_s < NEVER_S / 2
