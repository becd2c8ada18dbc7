"""`onbeat reward try` with rewards that ask a service, and with several sources, each with its own reward."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import build_tokenizer
from tests.unit.terminal.conftest import Command

pytestmark = pytest.mark.slow

Answer = Callable[[dict[str, Any]], Any]

START = """
[model]
path = "{model}"
[rollout]
num_prompts_per_iteration = 2
num_samples_per_prompt = 2
max_response_tokens = 8
[schedule]
num_iterations = 1
"""
DATA = """
[data]
type = "jsonl"
path = "rows.jsonl"
"""
HTTP = '[reward]\nname = "http"\noptions = { service = "check", strictness = 2 }\ntimeout_s = 5.0\n'
JUDGE = '[reward]\nname = "judge"\noptions = { service = "grader", rubric = "Is it right?", mode = "pairs" }\n'


class Service:
    """A small server in a thread. `answer` makes the body of an answer from that of a request; None: 503."""

    def __init__(self) -> None:
        self.answer: Answer = lambda body: None
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[str | None] = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.bodies.append(body)
                service.headers.append(self.headers["Authorization"])
                answer = service.answer(body)
                self.send_response(503 if answer is None else 200)
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/"


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    service = Service()
    thread = threading.Thread(target=service.server.serve_forever)
    thread.start()
    (tmp_path / "token").write_text("secret-token", encoding="utf-8")
    where = {"url": service.url, "bearer_token_file": str(tmp_path / "token")}
    services = {"check": where, "grader": where | {"model": "grader-1"}}
    monkeypatch.setenv("ONBEAT_REWARD_SERVICES", json.dumps(services))
    yield service
    service.server.shutdown()
    thread.join()
    service.server.server_close()


@pytest.fixture
def write_job(tmp_path: Path) -> Callable[[str], str]:
    build_tokenizer().save_pretrained(tmp_path / "model")
    for name, sign in (("rows", "+"), ("more", "*")):
        rows = [{"prompt": f"{n} {sign} {n} =", "answer": str(2 * n if sign == "+" else n * n)} for n in (3, 4, 5)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def write(sections: str) -> str:
        path = tmp_path / "job.toml"
        path.write_text(START.format(model=tmp_path / "model") + sections, encoding="utf-8")
        return str(path)

    return write


def test_service_is_asked_as_a_rollout_asks_it(service: Service, write_job: Any, onbeat: Command) -> None:
    service.answer = lambda body: {"scores": [{"reward": 0.5, "form": 1.0, "tone": None}, None]}
    shown = onbeat("reward", "try", write_job(DATA + HTTP), "--rows", "2").out
    assert shown.count("own answer  '6'\n              reward 0.5  form 1\n") == 1
    assert shown.count("empty       ''\n              no opinion\n") == 2
    assert "  ends with   '" in shown
    assert "<|im_start|>assistant\\n'\n" in shown
    first = service.bodies[0]
    assert (first["service"], first["options"], first["responses"]) == ("check", {"strictness": 2}, ["6", ""])
    assert first["context"]["prompt_suffix"].endswith("<|im_start|>assistant\n")
    assert service.headers == ["Bearer secret-token"] * 2
    assert service.url not in shown
    assert "secret" not in shown


def test_failure_of_a_service_is_shown_and_no_zero(service: Service, write_job: Any, onbeat: Command) -> None:
    job = write_job(DATA + HTTP)
    shown = onbeat("reward", "try", job, "--rows", "1", code=1).out
    assert shown.count("failed: service check answers 503 Service Unavailable") == 2
    assert len(service.bodies) == 1, "it is asked once"
    service.answer = lambda body: {"scores": [1.0, 0.5, 0.0]}
    shown = onbeat("reward", "try", job, "--rows", "1", code=1).out
    assert "failed: service check gives 3 scores for 2 responses" in shown
    service.answer = lambda body: {"scores": [1.0, float("nan")]}
    assert "failed: service check: answer.scores" in onbeat("reward", "try", job, "--rows", "1", code=1).out


def judged(body: dict[str, Any]) -> dict[str, Any]:
    """Prefer the longer response."""
    mark = body["messages"][0]["content"].split("two lines that consist of ")[1].split(".")[0]
    *_, first, second = [text.strip("\n") for text in body["messages"][1]["content"].split(mark)[1::2]]
    answer = json.dumps({"better": 1 if len(first) > len(second) else 2})
    return {"choices": [{"message": {"role": "assistant", "content": answer}}]}


def test_judge_compares_the_responses_to_a_row(service: Service, write_job: Any, onbeat: Command) -> None:
    service.answer = judged
    shown = onbeat("reward", "try", write_job(DATA + JUDGE), "--rows", "2").out
    assert shown.count("own answer  ") == shown.count("reward 1\n") == shown.count("reward 0\n") == 2
    assert {body["model"] for body in service.bodies} == {"grader-1"}
    service.answer = lambda body: {"choices": [{"message": {"content": "Both are fine."}}]}
    job = write_job(DATA + JUDGE.replace("right", "short"))
    shown = onbeat("reward", "try", job, "--rows", "1", code=1).out
    assert "failed: judge grader did not answer with the JSON that it was asked for" in shown


def test_service_that_is_not_in_the_settings_is_one_sentence(
    write_job: Any, onbeat: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ONBEAT_REWARD_SERVICES", raising=False)
    several = JUDGE.replace("[reward]", "[[reward]]") + '[[reward]]\nname = "exact"\n'
    shown = onbeat("reward", "try", write_job(DATA + several), "--rows", "2", code=1).out
    sentence = "reward judge is not tried: this command has no judge (a service with a `model`) 'grader' in "
    sentence += "ONBEAT_REWARD_SERVICES, it knows none; set it here as for the rollouts\n"
    assert shown.count(sentence) == shown.count("is not tried") == 1
    assert shown.count("own answer, exact") == shown.count("empty, exact") == 2, "the others are"


def test_settings_that_cannot_be_read_are_named(
    write_job: Any, onbeat: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONBEAT_REWARD_SERVICES", '{"check": {"url": "nowhere"}}')
    error = onbeat("reward", "try", write_job(DATA + HTTP), "--rows", "1", code=2).err
    assert "ONBEAT_REWARD_SERVICES: 'nowhere' is no http:// or https:// address" in error


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        (HTTP.replace('"check"', "7"), "reward.options.service: reward http needs the name of a service here"),
        (JUDGE.replace("pairs", "pair"), "reward.options.mode: reward judge has the modes score, ranking, pairs, not"),
        (JUDGE.replace("rubric", "rubrik"), "reward.options: reward judge has no option 'rubrik'; it has: service"),
    ],
)
def test_wrong_options_are_those_of_a_submission(write_job: Any, onbeat: Command, section: str, sentence: str) -> None:
    assert sentence in onbeat("reward", "try", write_job(DATA + section), "--rows", "1", code=2).err


SOURCES = """
[[data]]
name = "sums"
type = "jsonl"
path = "rows.jsonl"
[[data]]
name = "squares"
type = "jsonl"
path = "more.jsonl"
[data.reward]
name = "http"
options = { service = "check" }
timeout_s = 5.0
[reward]
name = "exact"
"""


def test_rows_of_each_source_have_its_own_reward(service: Service, write_job: Any, onbeat: Command) -> None:
    service.answer = lambda body: {"scores": [0.25, 0.75]}
    shown = onbeat("reward", "try", write_job(SOURCES), "--rows", "2").out
    titles = ["sums, row 0", "sums, row 1", "squares, row 0", "squares, row 1"]
    pieces = [shown.split(f"\n{title}\n")[1].split("\n\n")[0] for title in titles]
    assert all("reward 1\n" in f"{piece}\n" and "reward 0.25" not in piece for piece in pieces[:2])
    assert all("reward 0.25\n" in piece and piece.rstrip().endswith("reward 0.75") for piece in pieces[2:])
    assert [body["context"]["question"] for body in service.bodies] == ["3 * 3 =", "4 * 4 ="]


WITH_GAMES = """
[[data]]
name = "sums"
type = "jsonl"
path = "rows.jsonl"
[[data]]
name = "games"
type = "jsonl"
path = "rows.jsonl"
environment = { name = "guess_number" }
[reward]
name = "exact"
"""


def test_source_of_an_environment_is_left_out_with_a_note(write_job: Any, onbeat: Command) -> None:
    shown = onbeat("reward", "try", write_job(WITH_GAMES), "--rows", "1").out
    assert "note: source games is left out, because its reward comes from an environment" in shown
    assert shown.count("own answer  '6'\n              reward 1\n") == 1
    assert "games, row" not in shown
    played = WITH_GAMES.replace('[reward]\nname = "exact"\n', '[environment]\nname = "shop"\n')
    error = onbeat("reward", "try", write_job(played), "--rows", "1", code=2).err
    assert "the reward of this job comes from its environment, which plays whole episodes: run an iteration" in error
