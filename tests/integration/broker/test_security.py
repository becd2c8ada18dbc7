"""Permissions to call the broker, over the whole application on a real Redis and over real TLS; and the access log."""

import asyncio
import contextlib
import json
import logging
import os
import re
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from starlette.routing import Route

from onbeat.cli import main as onbeat_main
from onbeat.client import AsyncClient, BrokerUnreachable, Client
from onbeat.contracts.errors import ApiError
from onbeat.local.supervisor import ServiceSpec, Supervisor
from onbeat.process.api_keys import Role, keys_to_edit, new_key, read_keys, write_keys
from onbeat.streams.connection import connect
from onbeat.streams.ledger import Ledger
from services.broker.app import create_app
from services.broker.auth import MAX_BUCKETS, KeyRing, RateLimit
from services.broker.middleware import FAILURE_BURST
from services.broker.settings import Settings
from tests.broker_fixtures import Keys, bearer, broker_process, running_broker, start_service
from tests.conftest import free_port
from tests.integration.authority import Authority
from tests.waiting import eventually
from tests.world import job_body

DEADLINE_S = 60.0


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys.json")


@asynccontextmanager
async def broker_with(keys: Keys, ledger: Ledger, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with running_broker(ledger, keys.path.parent, api_keys_file=keys.path, **settings) as client:
        yield client


# ---- roles -------------------------------------------------------------------------------------------------------


def every_route() -> list[tuple[str, str]]:
    """Return every route of the real application, so that routes of tomorrow are included."""
    app = create_app(Settings(), Ledger(connect("redis://127.0.0.1:1")))
    routes = []
    for route in app.routes:
        while hasattr(route, "original_route"):
            route = route.original_route
        assert isinstance(route, Route), f"{route} is no plain route; decide who may use it"
        routes += [(method, route.path) for method in sorted(route.methods or {"GET"})]
    return routes


DASHBOARD = {(method, path) for method in ("GET", "HEAD") for path in ("/", "/docs", "/assets/{name:path}")}
OPEN = {("GET", "/livez"), ("GET", "/readyz"), *DASHBOARD}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *every_route(),
        *[("DELETE", "/v1/jobs/{job_id}"), ("POST", "/v1/nothing"), ("PUT", "/v1/jobs"), ("OPTIONS", "/v1/jobs")],
    ],
)
async def test_each_role_may_do_what_it_may_and_no_more(keys, ledger, method, path):
    moves = {f"/v1/jobs/{{job_id}}:{verb}" for verb in ("cancel", "pause", "resume")}
    for_submitters = {"/v1/jobs", "/v1/jobs:validate", "/v1/jobs:preview", "/v1/chat/completions", *moves}

    def role_for(method: str, path: str) -> Role | None:
        """Return the role that the documentation promises."""
        if (method, path) in OPEN:
            return None
        if method in ("GET", "HEAD"):
            return Role.READ
        is_upload = (method, path) == ("PUT", "/v1/datasets/{name}")
        return Role.SUBMIT if is_upload or (method == "POST" and path in for_submitters) else Role.ADMIN

    url = re.sub(r"{evaluation[^}]*}", "0", path.replace("{job_id}", "job-none"))
    url = url.replace("{name:path}", "vendor/htm.module.js").replace("{name}", "app.js")
    needed = role_for(method, path)
    async with broker_with(keys, ledger) as broker:
        without = await broker.request(method, url)
        assert without.status_code == (200 if needed is None else 401)
        for role in Role:
            answer = await broker.request(method, url, headers=keys.header(role))
            if needed is None or role.includes(needed):
                assert answer.status_code not in (401, 403), (role, answer.text)
            else:
                assert answer.status_code == 403
                assert method == "HEAD" or f"of role {needed}" in answer.json()["detail"]


async def test_idempotency_keys_of_two_api_keys_are_two(keys, ledger):
    async with broker_with(keys, ledger) as broker:

        async def submit(role: Role) -> str:
            headers = keys.header(role) | {"Idempotency-Key": f"key-{keys.path}"}
            answer = await broker.post("/v1/jobs", json=job_body(), headers=headers)
            assert answer.status_code == 201, answer.text
            return str(answer.json()["id"])

        first, other = await submit(Role.SUBMIT), await submit(Role.ADMIN)
        assert first != other
        assert await submit(Role.SUBMIT) == first


async def test_lookalike_of_an_open_or_submitter_path_is_neither(keys, ledger):
    async with broker_with(keys, ledger) as broker:
        for path in ("/livez/", "/livez%0A", "http://127.0.0.1//livez", "/livez/../v1/jobs", "/v1/jobs", "/%6civez/x"):
            assert (await broker.get(path)).status_code == 401, path
        for path in ("/v1/jobs%0A", "/v1/jobs/x:cancel%0A", "/v1/jobs/x:cancel/y", "/v1/jobs/x/y:cancel", "/v1//jobs"):
            assert (await broker.post(path, headers=keys.header(Role.SUBMIT))).status_code == 403, path


# ---- keys --------------------------------------------------------------------------------------------------------


async def test_refusal_is_a_problem_that_says_what_to_send(keys, ledger):
    async with broker_with(keys, ledger) as broker:
        answer = await broker.get("/v1/jobs")
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.headers["www-authenticate"] == 'Bearer realm="onbeat"'
        assert "ONBEAT_API_KEY" in answer.json()["detail"]
        right = keys.by_role[Role.READ]
        odd_headers = [
            [("Authorization", f"Basic {right}")],
            [("Authorization", right)],
            [("Authorization", "Bearer")],
            [("Authorization", f"Bearer {right}"), ("Authorization", f"Bearer {right}")],
            [("Authorization", b"Bearer onbeat_\xff\xfe_\x80")],
        ]
        for headers in odd_headers:
            assert (await broker.get("/v1/jobs", headers=headers)).status_code == 401, headers  # type: ignore[arg-type]
        assert (await broker.get("/v1/jobs", headers={"Authorization": f"bearer  {right}"})).status_code == 200


async def test_nobody_learns_which_ids_exist(keys, ledger):
    """A wrong secret, an unknown id, a revoked and an expired key get the same answer."""
    right = keys.by_role[Role.ADMIN]
    expired, entry = new_key("old", Role.ADMIN, timedelta(seconds=-1))
    revoked = keys.add(Role.ADMIN)
    keys.revoke(revoked)
    with keys_to_edit(keys.path) as entries:
        entries.append(entry)
    _, key_id, secret = right.split("_", 2)
    wrong = [f"onbeat_{key_id}_{secret[::-1]}", f"onbeat_{key_id[::-1]}_{secret}", revoked, expired]
    wrong += [f"onbeat_{key_id}_", key_id, secret, f"{right}x", right[:-1], right.upper()]
    wrong.append(read_keys(keys.path)[0].sha256)
    async with broker_with(keys, ledger) as broker:
        answers = []
        for key in wrong[:FAILURE_BURST]:
            answer = await broker.get("/v1/jobs", headers=bearer(key))
            answers.append((answer.status_code, answer.text, answer.headers["www-authenticate"]))
    assert len(set(answers)) == 1
    assert answers[0][0] == 401
    ring = KeyRing(keys.path)
    assert all(ring.find(key) is None for key in wrong)
    assert ring.find(right) is not None


def test_key_expires_at_its_time(keys):
    key = keys.add(Role.READ, timedelta(days=2))
    now = datetime.now(UTC)
    ring = KeyRing(keys.path, now=lambda: now)
    assert ring.find(key) is not None
    now += timedelta(days=2, seconds=-5)
    assert ring.find(key) is not None
    now += timedelta(seconds=5)
    assert ring.find(key) is None


def make_due(ring: KeyRing) -> None:
    ring._looked_at -= 3600


def test_keys_of_a_swapped_link_are_read(tmp_path):
    """Kubernetes swaps links: keys.json -> ..data/keys.json, ..data -> a folder that is replaced."""
    pairs = [new_key(name, Role.READ) for name in ("a", "b")]
    for number, (_, entry) in enumerate(pairs):
        (tmp_path / f"v{number}").mkdir()
        write_keys(tmp_path / f"v{number}" / "keys.json", [entry])
    (tmp_path / "data").symlink_to("v0")
    (tmp_path / "keys.json").symlink_to("data/keys.json")
    ring = KeyRing(tmp_path / "keys.json")
    assert [bool(ring.find(key)) for key, _ in pairs] == [True, False]
    (tmp_path / "draft").symlink_to("v1")
    (tmp_path / "draft").rename(tmp_path / "data")
    make_due(ring)
    assert [bool(ring.find(key)) for key, _ in pairs] == [False, True]


def test_broken_file_keeps_the_keys_of_before_and_is_reported(keys, caplog):
    ring, right = KeyRing(keys.path), keys.by_role[Role.READ]
    good = keys.path.read_bytes()
    for broken in (b"{", b'{"keys": [{"id": "x"}]}', None):
        caplog.clear()
        keys.path.unlink(missing_ok=True)
        if broken is not None:
            keys.path.write_bytes(broken)
        for _ in range(3):
            make_due(ring)
            assert ring.find(right) is not None
        (record,) = caplog.records
        assert record.levelno == logging.ERROR
        assert str(keys.path) in record.message
        assert "stay in force" in record.message
    caplog.set_level(logging.INFO)
    keys.path.write_bytes(good)
    make_due(ring)
    assert ring.find(right) is not None
    assert f"API keys from {keys.path}" in caplog.records[-1].message  # so that whoever repaired it can see it
    keys.revoke(right)
    make_due(ring)
    assert ring.find(right) is None


def test_keys_command_makes_lists_and_revokes(tmp_path, monkeypatch, capsys):
    path = tmp_path / "keys.json"

    def onbeat(*arguments):
        monkeypatch.setattr(sys, "argv", ["onbeat", "keys", *arguments, "--file", str(path)])
        with pytest.raises(SystemExit) as caught:
            onbeat_main()
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out, captured.err

    made = [onbeat("new", "--role", role, "--name", f"for {role}", "--expires-days", "9")[1].strip() for role in Role]
    assert path.stat().st_mode & 0o777 == 0o600
    assert not any(key.split("_", 2)[2] in path.read_text() for key in made)
    assert [entry.role for entry in map(KeyRing(path).find, made) if entry] == list(Role)
    _, listed, _ = onbeat("list")
    assert "for submit" in listed
    assert not any(entry.sha256 in listed for entry in read_keys(path))
    key_id = made[0].split("_")[1]
    assert onbeat("revoke", key_id)[:2] == (0, f"revoked {key_id}\n")
    assert KeyRing(path).find(made[0]) is None
    assert KeyRing(path).find(made[1]) is not None
    code, _, error = onbeat("revoke", key_id)
    assert (code, f"there is no key '{key_id}'" in error) == (2, True)
    path.write_text("{}")
    before = path.read_bytes()
    code, out, error = onbeat("new", "--role", "read", "--name", "x")
    assert (code, out, "is broken at keys" in error, path.read_bytes()) == (2, "", True, before)


def test_edited_file_keeps_its_owner_and_a_link_stays_a_link(keys, tmp_path):
    """Otherwise the broker, another user, could not read it any more, and the revoked key stayed in force."""
    link = tmp_path / "link.json"
    link.symlink_to(keys.path)
    if os.getuid() == 0:
        os.chown(keys.path, 65534, 65534)
    before = keys.path.stat()
    with keys_to_edit(link) as entries:
        entries.pop()
    after = keys.path.stat()
    assert link.is_symlink()
    assert after.st_ino != before.st_ino
    assert (after.st_uid, after.st_gid) == (before.st_uid, before.st_gid)
    assert len(read_keys(link)) == len(entries)


async def test_invented_methods_make_no_series(keys, ledger):
    async with broker_with(keys, ledger) as broker:
        for number in range(50):
            await broker.request(f"BREW{number}", "/livez")
        metrics = (await broker.get("/metrics", headers=keys.header(Role.READ))).text
    assert "BREW" not in metrics
    assert 'method="other"' in metrics


def test_editors_of_the_keys_file_lose_nothing(tmp_path):
    command = [sys.executable, "-m", "onbeat.cli", "keys", "new", "--role", "read", "--name", "x"]
    command += ["--file", str(tmp_path / "keys.json")]
    editors = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    made = {editor.communicate(timeout=DEADLINE_S)[0].split("_")[1] for editor in editors}
    assert {entry.id for entry in read_keys(tmp_path / "keys.json")} == made


# ---- how often ---------------------------------------------------------------------------------------------------


def test_bucket_gives_a_burst_then_the_rate_and_forgets_the_idle():
    now = 100.0
    limit = RateLimit(rate_per_s=2.0, burst=3, clock=lambda: now)
    assert [limit.wait_s("a") for _ in range(4)] == [0, 0, 0, 0.5]
    assert limit.wait_s("b") == 0  # clients have separate limits
    now += 0.25
    assert limit.wait_s("a") == 0.25  # asking too early costs nothing
    now += 0.25
    assert [limit.wait_s("a"), limit.wait_s("a")] == [0, 0.5]
    now += 1000.0
    assert [limit.wait_s("a") for _ in range(4)] == [0, 0, 0, 0.5]  # never more than the burst
    for number in range(MAX_BUCKETS + 50):
        limit.wait_s(f"flood-{number}")
    assert len(limit._buckets) == MAX_BUCKETS
    assert "a" not in limit._buckets


async def test_excess_requests_of_one_key_are_refused_and_others_pass(keys, ledger):
    async with broker_with(keys, ledger, requests_per_s=0.001, request_burst=3) as broker:
        codes = [(await broker.get("/v1/jobs", headers=keys.header(Role.READ))).status_code for _ in range(3)]
        answer = await broker.get("/v1/jobs", headers=keys.header(Role.READ))
        assert (codes, answer.status_code) == ([200] * 3, 429)
        assert 900 < int(answer.headers["retry-after"]) <= 1000
        assert answer.headers["content-type"] == "application/problem+json"
        assert (await broker.get("/v1/jobs", headers=keys.header(Role.ADMIN))).status_code == 200
        assert (await broker.get("/livez")).status_code == 200


async def test_without_keys_an_address_is_limited(ledger, tmp_path):
    async with running_broker(ledger, tmp_path, requests_per_s=0.001, request_burst=2) as broker:
        assert [(await broker.get("/v1/jobs")).status_code for _ in range(3)] == [200, 200, 429]


async def test_wrong_keys_are_limited_and_lock_nobody_out(keys, ledger):
    async with broker_with(keys, ledger) as broker:
        codes = [(await broker.get("/v1/jobs", headers=bearer(f"x{i}"))).status_code for i in range(FAILURE_BURST + 2)]
        assert codes[:FAILURE_BURST] == [401] * FAILURE_BURST
        assert codes[FAILURE_BURST:] == [429] * 2
        assert (await broker.get("/v1/jobs", headers=keys.header(Role.READ))).status_code == 200


# ---- what is noted -----------------------------------------------------------------------------------------------


async def test_each_change_and_each_refusal_is_one_line(keys, ledger, caplog):
    def access_lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
        names = ("method", "route", "status", "job_id", "key_id", "role", "address")
        records = [vars(record) for record in caplog.records if record.name == "onbeat.access"]
        assert all(record["levelno"] == logging.INFO for record in records)
        return [{name: record[name] for name in names} for record in records]

    caplog.set_level(logging.INFO)
    key = keys.by_role[Role.SUBMIT]
    who = {"key_id": key.split("_")[1], "role": "submit", "address": "127.0.0.1"}
    nobody = {"key_id": "-", "role": "-", "address": "127.0.0.1"}
    async with broker_with(keys, ledger) as broker:
        answer = await broker.post("/v1/jobs", json=job_body(), headers=bearer(key) | {"X-Request-Id": "abc-1"})
        job_id = answer.json()["id"]
        assert answer.headers["x-request-id"] == "abc-1"
        assert "request_id=abc-1" in next(r.getMessage() for r in caplog.records if r.name == "onbeat.access")
        await broker.post(f"/v1/jobs/{job_id}:cancel", headers=bearer(key))
        await broker.post("/v1/jobs", content=b"{", headers=bearer(key) | {"Content-Type": "application/json"})
        await broker.post("/v1/jobs/a%0Ab=c:pause", headers=bearer(key))
        await broker.get("/v1/jobs", headers=bearer(key))  # changes nothing
        await broker.delete(f"/v1/jobs/{job_id}", headers=bearer(key))
        await broker.get("/v1/jobs")
    create, move = {"method": "POST", "route": "/v1/jobs"}, "/v1/jobs/{job_id}"
    assert access_lines(caplog) == [
        create | {"status": 201, "job_id": job_id} | who,
        {"method": "POST", "route": f"{move}:cancel", "status": 200, "job_id": job_id} | who,
        create | {"status": 400, "job_id": "-"} | who,
        {"method": "POST", "route": f"{move}:pause", "status": 422, "job_id": "-"} | who,
        {"method": "DELETE", "route": "unknown", "status": 403, "job_id": "-"} | who,
        {"method": "GET", "route": "unknown", "status": 401, "job_id": "-"} | nobody,
    ]


async def test_odd_request_id_is_replaced(broker):
    for sent in ("a b", "x" * 65, "", 'a"b', "a\tb"):
        answer = await broker.get("/livez", headers={"X-Request-Id": sent})
        assert re.fullmatch(r"[0-9a-f]{16}", answer.headers["x-request-id"]), sent


async def test_every_answer_has_the_headers_for_browsers(keys, ledger):
    async with broker_with(keys, ledger) as broker:
        for path, status in (("/livez", 200), ("/v1/jobs", 401)):
            answer = await broker.get(path)
            assert answer.status_code == status
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["cache-control"] == "no-store"
            assert answer.headers["x-frame-options"] == "DENY"


async def test_no_secret_is_logged(keys, ledger, caplog):
    caplog.set_level(logging.DEBUG)
    sent = [*keys.by_role.values(), new_key("unknown", Role.ADMIN)[0]]
    body = job_body(model={"path": "bundled:smollm2-135m-instruct"}, name="body-of-a-job")
    async with broker_with(keys, ledger) as broker:
        for key in sent:
            await broker.post("/v1/jobs", json=body, headers=bearer(key))
            await broker.post("/v1/nothing", json=body, headers=bearer(key))
        keys.path.write_text(json.dumps({"keys": [{"id": "aa", "sha256": sent[0]}]}))
        with pytest.raises(ValidationError) as caught:
            Settings(api_keys_file=keys.path)
    logged = caplog.text + "".join(map(repr, map(vars, caplog.records))) + str(caught.value)
    assert "key_id=" in logged
    assert not [key for key in sent if key.split("_", 2)[2] in logged]
    assert "body-of-a-job" not in "".join(r.getMessage() for r in caplog.records if r.name == "onbeat.access")


# ---- without keys ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example:8800", "Origin": "http://evil.example:8800"}, 403),  # a name made to point here
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "localhost:8800", "Origin": "https://evil.example"}, 403),
        ({"Host": "localhost:8800", "Origin": "null"}, 403),
        ({"Host": "localhost:8800", "Origin": "http://localhost:3000"}, 403),
        ({"Host": "localhost:8800", "Origin": "http://localhost:8800"}, 404),
        ({"Host": "localhost:8800"}, 404),
        ({"Host": "[::1]:8800"}, 404),
        ({"Host": "127.0.0.1"}, 404),
    ],
)
async def test_web_page_cannot_use_a_broker_without_keys(broker, headers, status):
    assert (await broker.post("/v1/jobs/job-none:cancel", headers=headers)).status_code == status
    for path in ("/", "/assets/app.js"):
        assert (await broker.get(path, headers=headers)).status_code == (403 if status == 403 else 200)
    assert (await broker.get("/livez", headers=headers)).status_code == 200  # probes come as they come


async def test_broker_opened_to_everybody_takes_any_name(ledger, tmp_path):
    async with running_broker(ledger, tmp_path, host="0.0.0.0", allow_anonymous=True) as broker:
        assert (await broker.get("/v1/jobs", headers={"Host": "broker.example"})).status_code == 200


# ---- the process -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"HOST": "0.0.0.0"}, "onbeat keys new"),
        ({"HOST": "broker.example"}, "ONBEAT_ALLOW_ANONYMOUS"),
        ({"API_KEYS_FILE": "missing.json"}, "missing.json cannot be read"),
        ({"API_KEYS_FILE": "broken.json"}, "broken.json is broken at keys"),
        ({"TLS_CERT": "cert.pem"}, "ONBEAT_TLS_KEY is not; set both"),
        ({"TLS_CERT": "broken.json", "TLS_KEY": "broken.json"}, "not a PEM certificate"),
    ],
)
def test_broker_without_protection_or_secrets_does_not_start(tmp_path, monkeypatch, env, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.json").write_text("{}")
    for name, value in env.items():
        monkeypatch.setenv(f"ONBEAT_{name}", value)
    with pytest.raises(ValidationError, match=re.escape(message)):
        Settings()


@pytest.fixture
def tls_broker(tmp_path: Path, keys: Keys, redis_url: str, authority: Authority) -> Iterator[str]:
    """Yield the URL of a broker process with TLS and keys."""
    cert, key = authority.issue("localhost", "127.0.0.1")
    files = {"TLS_CERT": str(cert), "TLS_KEY": str(key), "API_KEYS_FILE": str(keys.path)}
    trusted = ssl.create_default_context(cafile=authority.cert)
    with broker_process(tmp_path, redis_url, trusted, LOG_FORMAT="json", **files) as (url, _):
        yield url


async def test_client_and_command_speak_tls_with_a_key(tls_broker, keys, authority, tmp_path, monkeypatch):
    monkeypatch.setattr("onbeat.client.transport.RETRY_DELAYS_S", (0.01, 0.01, 0.01))
    submitter = keys.by_role[Role.SUBMIT]
    async with AsyncClient(tls_broker, submitter, ca_file=authority.cert) as client:
        job = await client.jobs.create(job_body())
        await client.jobs.cancel(job.id)
    with Client(tls_broker, keys.by_role[Role.READ], ca_file=authority.cert) as blocking:
        assert await asyncio.to_thread(blocking.jobs.get, job.id)
        with pytest.raises(ApiError, match="needs an API key of role submit; the one sent has the role read"):
            await asyncio.to_thread(blocking.jobs.cancel, job.id)
    async with AsyncClient(tls_broker, ca_file=authority.cert) as client:
        with pytest.raises(ApiError, match="ONBEAT_API_KEY"):
            await client.jobs.list()
    async with AsyncClient(tls_broker, submitter) as client:
        with pytest.raises(BrokerUnreachable, match="CERTIFICATE_VERIFY_FAILED"):
            await client.jobs.list()
    async with AsyncClient(tls_broker.replace("https", "http"), submitter) as client:
        with pytest.raises(BrokerUnreachable):
            await client.jobs.list()
    command = [sys.executable, "-m", "onbeat.cli", "--ca-file", str(authority.cert), "jobs", "get", job.id]
    env = os.environ | {"ONBEAT_URL": tls_broker, "ONBEAT_API_KEY": submitter}
    got = await asyncio.to_thread(subprocess.run, command, env=env, capture_output=True, text=True, timeout=DEADLINE_S)
    assert '"state": "CANCELLED"' in got.stdout, got.stderr
    log = (tmp_path / "log").read_text()
    lines = [json.loads(line) for line in log.splitlines()]
    (created, *_) = [line for line in lines if line["logger"] == "onbeat.access"]
    assert (created["job_id"], created["key_id"], created["status"]) == (job.id, submitter.split("_")[1], 201)
    assert submitter not in log


async def test_old_tls_huge_headers_and_borrowed_addresses_are_refused(tls_broker, authority, tmp_path):
    old = ssl.create_default_context(cafile=authority.cert)
    old.minimum_version = ssl.TLSVersion.TLSv1
    old.maximum_version = ssl.TLSVersion.TLSv1_1
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises(httpx.ConnectError):
        await asyncio.to_thread(httpx.get, f"{tls_broker}/livez", verify=old, trust_env=False, timeout=30)
    trusted = ssl.create_default_context(cafile=authority.cert)
    async with httpx.AsyncClient(base_url=tls_broker, verify=trusted, trust_env=False, timeout=30) as client:
        for path, headers in (("/livez", {"X-Long": "x" * 200_000}), (f"/livez?{'x' * 60_000}", {})):
            with contextlib.suppress(httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):  # it may hang up
                assert (await client.get(path, headers=headers)).status_code in (400, 431)
        assert (await client.get("/v1/jobs", headers={"X-Forwarded-For": "1.2.3.4"})).status_code == 401

    def accesses():
        lines = (tmp_path / "log").read_text().splitlines(keepends=True)
        return [line for line in map(json.loads, lines) if line["logger"] == "onbeat.access"]

    (line,) = await eventually("a line for the refused request, which is logged after its answer", accesses)
    assert line["address"] == "127.0.0.1"  # nobody was named as a trusted proxy


@pytest.mark.parametrize(
    ("service", "user_info"),
    [*((name, "me:s3cr3t%2Fword") for name in ("broker", "trainer", "rollout")), ("broker", ":1234#s3cr3tword")],
)
def test_redis_password_is_not_logged_when_redis_is_unreachable(tmp_path, service, user_info):
    url = f"redis://{user_info}@127.0.0.1:{free_port()}/0"
    process = start_service(service, tmp_path, REDIS_URL=url, REDIS_RETRY_S="1", LOG_LEVEL="DEBUG")
    try:
        assert process.wait(180) in (1, 2)
    finally:
        process.kill()
    log = (tmp_path / "log").read_text()
    assert "s3cr3t" not in log
    assert "word" not in log.replace("password", "").replace("PASSWORD", "")
    assert "ONBEAT_REDIS_URL is no URL of Redis" in log or "Redis at 127.0.0.1" in log


def test_secrets_of_the_shell_do_not_reach_local_services(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("ONBEAT_")]:
        monkeypatch.delenv(name)
    for name in ("API_KEY", "API_KEYS_FILE", "TLS_KEY", "REDIS_PASSWORD_FILE", "REDIS_RETRY_S"):
        monkeypatch.setenv(f"ONBEAT_{name}", "of-the-shell")
    report = tmp_path / "found"
    code = "import os, sys, time; open(sys.argv[1], 'w').write(' '.join(os.environ) + ' END'); time.sleep(300)"
    command = [sys.executable, "-c", code, str(report)]

    def missing():
        return "" if report.exists() and "END" in report.read_text() else "nothing found yet"

    supervisor = Supervisor(tmp_path, print, [], tmp_path / "scratch")
    try:
        supervisor.start([ServiceSpec("spy", command, 0, missing=missing, ready_deadline_s=DEADLINE_S)])
    finally:
        supervisor.stop()
    names = report.read_text().split()
    assert [name for name in names if name.startswith("ONBEAT_")] == ["ONBEAT_REDIS_RETRY_S"]
