"""Rewards behind HTTP, against a real server that misbehaves; and what a rollout does with each outcome of a reward."""

import asyncio
import gzip
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from types import SimpleNamespace

import httpx
import pytest
from prometheus_client import REGISTRY

from onbeat.contracts.rewards import RewardConfig
from onbeat.process.children import MAX_ANSWER_BYTES
from onbeat.streams.codec import Reward
from services.broker.admission.review import RewardUse, review_reward
from services.rollout import claim_loop
from services.rollout.rewards import scorer as scorer_module
from services.rollout.rewards.outcome import RewardRefused, RewardRequest, RewardUnavailable, Score, ServiceMissing
from services.rollout.rewards.scorer import Scorer
from services.rollout.rewards.service import MAX_RETRY_AFTER_S, read_retry_after
from services.rollout.settings import RewardServiceSettings, Settings
from tests.conftest import free_port
from tests.integration.rollout.rollout_rig import G
from tests.integration.rollout.test_rewards import installed_reward, score  # noqa: F401, fixture
from tests.rollout_fakes import FakeEngine


@dataclass
class Call:
    path: str
    headers: dict[str, str]
    body: dict
    at: float = field(default_factory=time.monotonic)


Behaviour = Callable[[Call, asyncio.StreamWriter], Awaitable[None]]


class Service:
    """A small HTTP server. Each call takes the next behaviour; the last one stays."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/score"
        self.calls: list[Call] = []
        self._behaviours: list[Behaviour] = []

    def will(self, *behaviours: Behaviour) -> None:
        self._behaviours = list(behaviours)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def stop(self) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            start, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines)
            body = json.loads(await reader.readexactly(int(headers["content-length"])))
            self.calls.append(Call(start.split()[1], headers, body))
            behaviour = self._behaviours.pop(0) if len(self._behaviours) > 1 else self._behaviours[0]
            await behaviour(self.calls[-1], writer)
        except ConnectionError:
            pass
        finally:
            writer.close()


def says(content: object, status: str = "200 OK", **headers: str) -> Behaviour:
    """Answers with this status and body (as JSON, unless it is bytes)."""
    payload = content if isinstance(content, bytes) else json.dumps(content).encode()
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    head = "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(payload)}", "Connection: close", *lines])

    async def answer(call: Call, writer: asyncio.StreamWriter) -> None:
        writer.write(head.encode() + b"\r\n\r\n" + payload)
        await writer.drain()

    return answer


async def score_by_length(call: Call, writer: asyncio.StreamWriter) -> None:
    await says({"scores": [len(response) for response in call.body["responses"]]})(call, writer)


async def hang_up(call: Call, writer: asyncio.StreamWriter) -> None:
    pass


async def never_answer(call: Call, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


@pytest.fixture
async def service():
    service = Service()
    await service.start()
    yield service
    await service.stop()


@pytest.fixture
async def scorer(service: Service, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("services.rollout.retries.FIRST_DELAY_S", 0.01)
    scorer = Scorer(1, {"judge": RewardServiceSettings(url=service.url)}, "w0")
    yield scorer
    await scorer.close()


def request(*responses: str, max_attempts: int = 1, timeout_s: float = 30.0, **options: object) -> RewardRequest:
    options = {"service": "judge"} | options
    return RewardRequest("http", options, {"answer": "4"}, list(responses), timeout_s, 512, max_attempts)


# ---- one call ------------------------------------------------------------------------------------------------------


async def test_one_post_scores_the_group(scorer, service):
    service.will(says({"scores": [1, {"reward": 0.5, "format": 1.0}]}))
    assert await score(scorer, request("a", "b", strictness=2)) == [Score(1.0, {}), Score(0.5, {"format": 1.0})]
    (call,) = service.calls
    assert call.path == "/score"
    assert call.body == {
        "service": "judge",
        "options": {"strictness": 2},
        "context": {"answer": "4"},
        "responses": ["a", "b"],
    }
    assert "authorization" not in call.headers


async def test_bearer_token_is_read_for_each_call(service, tmp_path):
    token = tmp_path / "token"
    scorer = Scorer(1, {"judge": RewardServiceSettings(url=service.url, bearer_token_file=token)}, "w0")
    service.will(score_by_length)
    with pytest.raises(
        RewardUnavailable, match=r"bearer_token_file of service judge in ONBEAT_REWARD_SERVICES: .*No such"
    ):
        await score(scorer, request("a"), deadline_s=1.0)
    for secret in ("first", "second"):
        token.write_text(f"{secret}\n")
        await score(scorer, request("a"))
    assert [call.headers["authorization"] for call in service.calls] == ["bearer first", "bearer second"]
    await scorer.close()


async def test_last_error_is_kept_if_the_next_try_comes_too_late(service, tmp_path, monkeypatch):
    async def oversleep(seconds):
        await asyncio.sleep(seconds + 1.0)

    late = SimpleNamespace(sleep=oversleep, get_running_loop=asyncio.get_running_loop)
    monkeypatch.setattr("services.rollout.rewards.scorer.asyncio", late)
    missing = RewardServiceSettings(url=service.url, bearer_token_file=tmp_path / "token")
    scorer = Scorer(1, {"judge": missing}, "w0")
    with pytest.raises(RewardUnavailable, match="No such file"):
        await score(scorer, request("a"), deadline_s=1.0)
    await scorer.close()


@pytest.mark.parametrize("content", ["old-secret\nnew-secret\n", "my secret", "secret\x00", "sécret", " \n"])
async def test_file_without_exactly_one_token_is_refused_not_quoted(service, tmp_path, content):
    token = tmp_path / "token"
    token.write_text(content)
    scorer = Scorer(1, {"judge": RewardServiceSettings(url=service.url, bearer_token_file=token)}, "w0")
    with pytest.raises(RewardUnavailable, match=r"bearer_token_file of service judge .* one token") as caught:
        await score(scorer, request("a"), deadline_s=1.0)
    assert "cret" not in str(caught.value).replace(str(token), "")
    assert service.calls == []
    await scorer.close()


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        (hang_up, "cannot be reached: RemoteProtocolError"),
        (says({}, "500 Internal Server Error"), "answers 500 Internal Server Error"),
        (says({}, "503 Service Unavailable"), "answers 503"),
        (says({}, "429 Too Many Requests"), "answers 429"),
        (says({}, "408 Request Timeout"), "answers 408"),
    ],
)
async def test_service_that_cannot_answer_is_asked_until_the_deadline(scorer, service, behaviour, words):
    def num_unreachable() -> float:
        return REGISTRY.get_sample_value("onbeat_rollout_reward_tries_total", {"outcome": "unreachable"}) or 0.0

    service.will(behaviour)
    before = num_unreachable()
    with pytest.raises(RewardUnavailable, match=words):
        await score(scorer, request("a"), deadline_s=1.5)
    assert len(service.calls) >= 3
    assert num_unreachable() == before + len(service.calls)
    service.will(behaviour, score_by_length)
    assert await score(scorer, request("bb")) == [Score(2.0, {})]


async def test_slow_service_runs_out_of_the_time_of_all_responses(scorer, service):
    service.will(never_answer)
    with pytest.raises(RewardUnavailable, match=r"timeout: service judge took longer than 0.6 s for 3 responses"):
        await score(scorer, request("a", "b", "c", timeout_s=0.2))


async def test_retry_after_is_waited_for(scorer, service):
    service.will(says({}, "429 Too Many Requests", Retry_After="1"), score_by_length)
    assert await score(scorer, request("a", max_attempts=2)) == [Score(1.0, {})]
    refused, served = service.calls
    assert served.at - refused.at >= 1.0


async def test_retry_after_beyond_the_groups_deadline_gives_up_at_once(scorer, service):
    service.will(says({}, "503 Service Unavailable", Retry_After="3600"))
    with pytest.raises(RewardUnavailable, match="answers 503"):
        await score(scorer, request("a", max_attempts=5), deadline_s=MAX_RETRY_AFTER_S - 10)
    assert len(service.calls) == 1


def test_retry_after_is_seconds_or_a_date_up_to_a_cap():
    def read(value: str | None) -> float:
        return read_retry_after(httpx.Response(429, headers={} if value is None else {"Retry-After": value}))

    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    assert (read("7"), read("99999"), read(None), read("soon"), read("-5")) == (7.0, MAX_RETRY_AFTER_S, 0.0, 0.0, 0.0)
    assert 20 < read(soon) <= 30
    assert read("Mon, 01 Jan 2001 00:00:00 GMT") == 0.0
    assert read("Mon, 01 Jan 2024 00:00:00 +99999999999999") == 0.0
    assert read("Mon, 01 Jan 99999999999999999999 00:00:00 GMT") == 0.0


@pytest.mark.parametrize("status", ["400 Bad Request", "401 Unauthorized", "404 Not Found", "422 Unprocessable"])
async def test_refused_request_is_not_repeated(scorer, service, status):
    service.will(says({}, status))
    with pytest.raises(RewardRefused, match=f"refused: service judge answers {status}"):
        await score(scorer, request("a", max_attempts=5))
    assert len(service.calls) == 1


async def test_redirect_is_not_followed(scorer, service):
    service.will(says({}, "307 Temporary Redirect", Location=service.url.replace("/score", "/elsewhere")))
    with pytest.raises(RewardRefused, match=r"307 .* redirects are not followed, correct its url"):
        await score(scorer, request("a", max_attempts=5))
    assert [call.path for call in service.calls] == ["/score"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"scores": [1.0]}, "gives 1 scores for 2 responses"),
        ({"scores": [1.0, 1.0, 1.0]}, "gives 3 scores for 2 responses"),
        ({"scores": [1.0, "1.0"]}, "scores.1"),
        ({"scores": [1.0, True]}, "scores.1"),
        ({"scores": [1.0, {"format": 1.0}]}, r"no 'reward', only \['format'\]"),
        ({"scores": [1.0, {"reward": 1.0, "parts": {"format": 1.0}}]}, "scores.1"),
        (b'{"scores": [1.0, NaN]}', "scores.1"),
        (b'{"scores": [1.0, Infinity]}', "scores.1"),
        (b'{"scores": [1.0, 1e999]}', "scores.1"),
        ({"scores": [1.0, 1e39]}, "scores.1.*less than or equal to 1000000"),
        ({"scores": [1.0, -1.1e6]}, "scores.1.*greater than or equal to -1000000"),
        ({"scores": [1.0, {"reward": 1.0, "format": 1e39}]}, "scores.1.*format.*less than or equal to 1000000"),
        (b'{"scores": [1.0, ' + b"9" * 5000 + b"]}", "number out of range"),
        ({"rewards": [1.0, 1.0]}, "answer.scores: Field required"),
        ([1.0, 1.0], "answer: Input should be an object"),
        (b"", "Invalid JSON"),
        (b"<html>", "Invalid JSON"),
        (b"[" * 100_000, "Invalid JSON"),
    ],
)
async def test_answer_without_one_finite_score_per_response_is_refused(scorer, service, content, words):
    service.will(says(content))
    with pytest.raises(RewardRefused, match=f"invalid: .*{words}"):
        await score(scorer, request("a", "b", max_attempts=2))
    assert len(service.calls) == 2


@pytest.mark.parametrize("score_of_key", [1.0, "no number"])
async def test_what_a_service_says_is_cut(scorer, service, score_of_key):
    service.will(says({"scores": [{"k" * 100_000: score_of_key}]}))
    with pytest.raises(RewardRefused, match=r"invalid: .*kkk") as caught:
        await score(scorer, request("a"))
    assert len(str(caught.value)) < 600


async def test_compressed_bomb_is_not_unpacked(scorer, service):
    service.will(says(gzip.compress(bytes(1 << 28)), Content_Encoding="gzip"))
    with pytest.raises(RewardRefused, match="Invalid JSON"):
        await score(scorer, request("a"))
    assert service.calls[0].headers["accept-encoding"] == "identity"


async def test_answer_without_end_is_cut(scorer, service):
    async def send_without_end(call: Call, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        while True:
            writer.write(b" " * 65536)
            await writer.drain()

    service.will(send_without_end)
    with pytest.raises(RewardRefused, match=f"more than {MAX_ANSWER_BYTES} bytes"):
        await score(scorer, request("a"))


# ---- a service that is away ----------------------------------------------------------------------------------------


async def test_service_that_hangs_ends_with_the_group(scorer, service, monkeypatch):
    monkeypatch.setattr(scorer_module, "LAST_MOMENT_S", 59.0)
    service.will(never_answer)
    deadline = asyncio.get_running_loop().time() + 60.0
    async with asyncio.timeout_at(deadline):  # as a group is cancelled
        with pytest.raises(RewardUnavailable, match="timeout"):
            await scorer.score(request("a", timeout_s=600.0, max_attempts=3), deadline)
    assert len(service.calls) == 1


async def test_group_without_time_does_not_ask_the_service(scorer, service):
    with pytest.raises(RewardUnavailable, match="the group has no time left for service judge"):
        await score(scorer, request("a", max_attempts=3), deadline_s=0.0)
    assert service.calls == []


# ---- settings ------------------------------------------------------------------------------------------------------


async def test_address_comes_from_the_operator_never_from_the_job(scorer, service):
    service.will(score_by_length)
    for name in ("other", service.url, None, ["judge"]):
        with pytest.raises(ServiceMissing, match=r"w0 has no reward service .*REWARD_SERVICES, it knows: judge"):
            await score(scorer, request("a", service=name))
    assert service.calls == []
    await score(scorer, request("a", url="http://127.0.0.1:1/"))  # an option like any other
    assert service.calls[0].body["options"] == {"url": "http://127.0.0.1:1/"}


def test_services_are_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("ONBEAT_REWARD_SERVICES", '{"judge": {"url": "https://judge.example/score"}}')
    assert Settings().reward_services == {"judge": RewardServiceSettings(url="https://judge.example/score")}


@pytest.mark.parametrize(
    ("services", "words"),
    [
        ({"judge": {"url": "ftp://judge"}}, "no http:// or https:// address"),
        ({"judge": {"url": "http://me:secret@judge"}}, "use bearer_token_file"),
        ({"judge": {"url": "ftp://me:secret@judge"}}, "use bearer_token_file"),
        ({"judge": {"url": "http://judge:http"}}, "[Pp]ort"),
        ({"judge": {"url": "http://judge/\x7f"}}, "cannot be called: Invalid non-printable"),
        ({"judge": {"url": "http://xn--/"}}, "cannot be called: Malformed A-label"),
        ({"judge": {"url": "http://judge", "token": "x"}}, "Extra inputs"),
        ({"../judge": {"url": "http://judge"}}, "pattern"),
    ],
)
def test_service_that_cannot_be_meant_is_refused_at_the_start(monkeypatch, services, words):
    monkeypatch.setenv("ONBEAT_REWARD_SERVICES", json.dumps(services))
    with pytest.raises(ValueError, match=words) as caught:
        Settings()
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("options", [{}, {"service": "http://judge"}, {"service": ""}, {"service": ["judge"]}])
def test_broker_refuses_a_job_that_names_no_service(options):
    def use_of(options: dict) -> RewardUse:
        return RewardUse("reward", RewardConfig(name="http", options=options), [])

    ((field, message),) = review_reward(use_of(options))
    assert field == "reward.options.service"
    assert "ONBEAT_REWARD_SERVICES of the rollouts" in message
    assert review_reward(use_of({"service": "judge-2.eu"})) == []


# ---- what a rollout makes of it ------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_loop, "RETRY_DELAY_S", 0.05)
    monkeypatch.setattr(claim_loop, "MISSING_SERVICE_S", 0.05)
    monkeypatch.setattr("services.rollout.retries.FIRST_DELAY_S", 0.01)


def reward(name: str = "behave", **options: object) -> Reward:
    return Reward(name=name, options_json=json.dumps(options), timeout_s=30.0, memory_limit_mb=512)


@pytest.mark.usefixtures("quick")
async def test_group_whose_reward_always_crashes_is_given_up(rig, monkeypatch):
    monkeypatch.setattr(claim_loop, "MAX_ENGINE_ERRORS", 1)  # the engine has nothing to do with it
    await rig.replace_job(max_group_attempts=2)
    rig.start_worker(FakeEngine(text="crash"))
    await rig.open(0, rig.task(0, 0, reward=reward()), rig.task(0, 1, reward=reward("exact")))
    failed, good = await rig.drained(0, timeout_s=60)
    assert failed.failure.kind == "generation_failed"
    assert (
        "given up after 2 attempts (rollout.max_group_attempts); last error: RewardUnavailable: "
        in failed.failure.message
    )
    assert [response.reward for response in good.responses] == [0.0] * G
    assert len(rig.engines[0].requests) == 3
    assert not rig.running[0][1].done()  # the rollout is none the worse


@pytest.mark.usefixtures("quick")
async def test_refused_group_is_recorded_and_the_rollout_goes_on(rig):
    rig.start_worker(FakeEngine(text="raise"))
    await rig.open(0, rig.task(0, 0, reward=reward()), rig.task(0, 1, reward=reward("exact")))
    failed, good = await rig.drained(0, timeout_s=60)
    assert failed.failure.kind == "reward_failed"
    assert failed.failure.message == "reward behave: response 0: raised: KeyError: 'no such thing'"
    assert len(good.responses) == G
    assert len(rig.engines[0].requests) == 2  # tried again by the reward, not by the engine
    await rig.commit(0)
    await rig.open(1, rig.task(1, 0))
    await rig.drained(1)


@pytest.mark.usefixtures("quick")
async def test_rollout_without_the_service_spends_no_attempt(rig, service):
    await rig.replace_job(max_group_attempts=1)
    service.will(score_by_length)
    rig.start_worker(FakeEngine())
    await rig.open(0, rig.task(0, 0, reward=reward("http", service="judge")))
    await rig.until_told("group.released", times=3)
    worker, running = rig.running[0]
    worker.stop()
    await asyncio.wait_for(running, timeout=60)
    assert rig.engines[0].requests == []
    missing = "w0 has no reward service 'judge' in ONBEAT_REWARD_SERVICES, it knows none"
    assert all(missing in message for message in await rig.event_messages("group.released"))
    rig.start_worker(FakeEngine(), reward_services={"judge": {"url": service.url}})
    (group,) = await rig.drained(0, timeout_s=60)
    assert [response.reward for response in group.responses] == [1.0] * G
    context = {"question": "2+2=", "answer": "4", "prompt_suffix": "<|im_start|>assistant\n"}
    assert service.calls[0].body["context"] == context
