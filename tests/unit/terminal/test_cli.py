import io
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import httpx
import pytest

from onbeat.config import JobConfig, apply_override
from onbeat.contracts.completions import ChatFailed
from onbeat.contracts.records import Finding
from onbeat.streams.audit import AuditViolation
from onbeat.streams.chat import Chats, Reply
from onbeat.streams.keys import JobKeys
from services.broker.admission.review import Remarks
from tests.broker_thread import BrokerThread
from tests.scripted_trainer import CHECKPOINT
from tests.unit.terminal.conftest import Command
from tests.waiting import wait_until
from tests.world import World

EXAMPLES = Path(__file__).parents[3] / "examples"
QUICKSTART = EXAMPLES / "quickstart.toml"


@pytest.mark.usefixtures("trainer")
def test_create_list_get_cancel(onbeat: Command, job_file: str) -> None:
    job_id = onbeat("jobs", "create", job_file, "--set", "schedule.num_iterations=900").out.strip()
    wait_until(lambda: CHECKPOINT in onbeat("jobs", "get", job_id).out, "it has a checkpoint")
    header, row = onbeat("jobs", "list", "--state", "running").out.splitlines()
    assert header.split() == ["ID", "NAME", "POOL", "STATE", "ITERATIONS", "REWARD", "TIME", "CREATED"]
    assert row.split()[:4] == [job_id, "test", "default", "RUNNING"]
    assert json.loads(onbeat("jobs", "get", job_id).out)["config"]["schedule"]["num_iterations"] == 900
    assert onbeat("jobs", "cancel", job_id).out == f"{job_id} CANCELLING\n"
    onbeat("jobs", "watch", job_id, code=1)  # it did not succeed
    kept = f"its newest checkpoint is still at {CHECKPOINT}"
    assert onbeat("jobs", "delete", job_id).out == f"{job_id} deleted; {kept}\n"
    onbeat("jobs", "get", job_id, code=1)


def test_create_uploads_the_files_beside_the_job(onbeat: Command, broker: BrokerThread, job_file: str) -> None:
    printed = onbeat("jobs", "create", job_file)
    path = json.loads(onbeat("jobs", "get", printed.out.strip()).out)["config"]["data"]["path"]
    assert (broker.folder / path).read_bytes() == Path(job_file).with_name("prompts.jsonl").read_bytes()
    assert f"prompts.jsonl is {path} of the broker" in printed.err
    assert onbeat("data", "push", str(QUICKSTART), "--name", "other.jsonl").out == "datasets/other.jsonl\n"
    assert "other.jsonl" in onbeat("data", "list").out
    assert "no data file 'nope'; `onbeat data list` shows them" in onbeat("data", "delete", "nope", code=1).err


@pytest.mark.usefixtures("trainer")
def test_piped_watch_prints_a_line_per_iteration_without_codes(
    onbeat: Command, broker: BrokerThread, findings: list[Finding], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    learning = Finding(sentence="job-1 learns nothing", is_problem=True, key="reward")
    findings += [learning, Finding(sentence="trainer-0 is training iteration 1")]
    out = onbeat("jobs", "watch", broker.create_job(schedule={"num_iterations": 6})).out
    lines, _, summary = out.partition("\nstate ")
    assert "\x1b" not in lines  # the summary may be coloured: that was asked for
    for k in range(1, 7):
        assert lines.count(f"iteration {k}/6  version {k - 1}  reward 0.{k - 1}00  ") == 1
    assert lines.count("doctor: job-1 learns nothing") == 1
    assert "SUCCEEDED" in summary
    assert "0.100 (first 3) -> 0.400 (last 3)" in summary
    assert "clean: 12 groups, each used once" in summary
    assert "job-1 learns nothing" in summary
    assert "weights     sync 0.3 s an iteration, 15% of the model's bytes" in summary  # (1000 + 6 * 10) / 7000
    # Text of a model, a wrong response before and one after: no markup and no control code.
    assert summary.count("[bold]\\x1b[2J2") == 2
    assert re.search(r"\nbefore: ✗ wrong, reward 0: .*\nprompt: .*\nafter: ✗ wrong, reward 0.5: ", summary)


def test_summary_shows_the_responses_that_are_kept(onbeat: Command, broker: BrokerThread, trained: str) -> None:
    broker.run(broker.ledger.iterations.trim(trained, 0, 1))
    summary = onbeat("jobs", "watch", trained).out
    assert "\nbefore: " not in summary
    assert re.search(r"\nprompt: .*\nafter: .* (right|wrong), reward ", summary)
    assert "no example responses" not in summary


def test_doctor_tells_notes_from_problems(onbeat: Command, job_id: str, findings: list[Finding]) -> None:
    findings += [
        Finding(sentence="it stands", is_problem=True, key="reward"),
        Finding(sentence="it fails", is_problem=True),
        Finding(sentence="few groups teach", key="rollout.num_samples_per_prompt"),
        Finding(sentence="trainer-0 is training iteration 1"),
        Finding(sentence="its lease runs out", is_detail=True),
    ]
    lines = onbeat("doctor", job_id, code=1).out.splitlines()
    others = ["note     few groups teach", "ok       trainer-0 is training iteration 1"]
    assert lines == ["PROBLEM  it stands", "PROBLEM  it fails", *others, "2 problems"]
    assert "there is no job 'job-none'" in onbeat("doctor", "job-none", code=1).err
    del findings[:2]
    assert onbeat("doctor").out.splitlines() == [*others, "healthy"]
    verbose = onbeat("doctor", "--verbose").out.splitlines()
    assert verbose == [*others, "ok       its lease runs out", "healthy"]


def test_doctor_begins_its_verdict_with_learning(onbeat: Command, trained: str) -> None:
    verdict = onbeat("doctor", trained).out.splitlines()[-1]
    assert verdict.startswith("reward 0.00 to 0.20")
    assert verdict.endswith("; healthy")


def test_doctor_says_who_does_not_answer_and_why(
    onbeat: Command, broker: BrokerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.wire.failures = [503] * 9
    out = onbeat("doctor", "job-1", code=1).out
    assert out.startswith(f"PROBLEM  the broker at {broker.url} cannot do this now: not now (503)")
    assert "`onbeat doctor` without a job looks at Redis, too" in out
    monkeypatch.setattr("httpx.Timeout", lambda *_, timeout=httpx.Timeout, **__: timeout(0.3))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("ONBEAT_URL", url := f"http://127.0.0.1:{silent.getsockname()[1]}")
        out = onbeat("doctor", code=1).out
    assert out.startswith(f"PROBLEM  the broker at {url} does not answer (connected, but silent for 15 s)")
    assert "(--url, ONBEAT_URL)" in out


@pytest.mark.usefixtures("trainer")
def test_watch_says_what_the_doctor_finds(onbeat: Command, job_id: str, findings: list[Finding]) -> None:
    findings.append(Finding(sentence="no rollout is alive", is_problem=True))
    assert "doctor: no rollout is alive" in onbeat("jobs", "watch", job_id).out


def test_control_codes_of_a_model_do_not_reach_the_terminal(
    onbeat: Command, broker: BrokerThread, job_id: str, findings: list[Finding], monkeypatch: pytest.MonkeyPatch
) -> None:
    findings.append(Finding(sentence="job-1 failed: bad answer \x1b]0;x\x07\x1b[2J\x9b2J", is_problem=True))
    check = Mock(side_effect=AuditViolation("the group was accepted before \x1b[2J"))
    monkeypatch.setattr("services.broker.auditor.check_job", check)
    broker.run(broker.ledger.redis.hset(JobKeys(job_id).job, "name", "\x9b2J"))
    said = [onbeat("doctor", job_id, code=1), onbeat("audit", job_id, code=1), onbeat("jobs", "get", job_id)]
    said.append(onbeat("jobs", "get", "\x1b[2J", code=2))
    assert not {"\x1b", "\x07", "\x9b"}.intersection("".join(printed.out + printed.err for printed in said))
    assert "bad answer \\x1b]0;x\\x07" in said[0].out
    assert "VIOLATION: the group was accepted before" in said[1].out


@pytest.mark.usefixtures("trainer")
def test_evaluations_are_listed_watched_and_summarised(onbeat: Command, job_file: str) -> None:
    held_out = ["--set", "evaluation.data.path=prompts.jsonl", "--set", "evaluation.data.type=jsonl"]
    short = ["--set", "schedule.num_iterations=4", "--set", "evaluation.num_prompts=4"]
    solved = ["--set", "solved_at=0.4", "--set", "evaluation.num_samples_per_prompt=2"]
    out = onbeat("jobs", "create", job_file, *held_out, *short, *solved, "--watch").out
    assert out.count("evaluation 0  version 0  reward 0.000") == out.count("evaluation 4  version 4  reward 0.400") == 1
    assert "0.000 (first) -> 0.400 (last)  ▁█" in out
    job_id = out.split()[0]
    last = onbeat("jobs", "evaluations", job_id).out.splitlines()[2]
    assert last.split() == ["4", "4", "DONE", "0.400", "100%", "2.0", "0%", "0/4"]
    assert "evaluation 4" in onbeat("jobs", "samples", job_id, "--evaluation", "4").out


def test_run_refuses_what_is_wrong_before_it_starts_anything(onbeat: Command, tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    wrong_job = ["--set", "rollout.num_samples_per_prompt=1", "--set", "rollout.typo=3"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for words, message in (
            (["run", str(QUICKSTART), *wrong_job], "rollout.typo"),
            (["run", str(QUICKSTART), "--trainer-cores", "x"], "is not a list of cores"),
            (["run", str(tmp_path / "no.toml")], "no such job file"),
            (["run", str(QUICKSTART), "--engine", "transformer"], "is installed; did you mean transformers?"),
            (["up", "--engine", "transformer"], "--engine transformer: no engine of this name"),
            (["up", "--port", port], f"--port {port}: another process listens there; take another port"),
        ):
            assert message in onbeat(*words, "--data-dir", str(data_dir), code=2).err
        not_text = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
        assert "a name that is not UTF-8" in onbeat("run", str(QUICKSTART), "--data-dir", not_text, code=2).err
        assert "... cannot be used: File name too long" in onbeat("run", str(tmp_path / ("x" * 300)), code=1).err
        (tmp_path / "redis").mkdir()
        assert "another process listens there" in onbeat("view", str(tmp_path), "--port", port, code=2).err
    assert not data_dir.exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("job.json", b"[" * 100_000, "nested too deep for a job"),
        ("job.toml", b"a = " + b"[" * 100_000, "nested too deep for a job"),
        ("job.json", b"[]", "a job is one JSON object"),
        ("job.json", b'{"seed": 1, "seed": 2}', "not valid JSON: the key 'seed' is there twice"),
        ("job.yaml", b"name: x", "TOML or JSON, not YAML"),
        ("job.toml", 'name = "é"'.encode("latin-1"), "not text in UTF-8"),
        ("job.toml", b"\xff\xfen\x00", "not text in UTF-8"),
        ("job.toml", b"name x", "not valid TOML"),
    ],
)
def test_file_that_is_no_job_is_refused_in_a_sentence(
    onbeat: Command, tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    error = onbeat("run", str(tmp_path / name), "--data-dir", str(tmp_path / "data"), code=2).err
    assert message in error
    assert len(error.splitlines()) == 1


def test_mark_of_byte_order_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_bytes(b"\xef\xbb\xbf" + QUICKSTART.read_bytes())
    assert JobConfig.from_file(tmp_path / "job.toml") == JobConfig.from_file(QUICKSTART)


def test_wrong_job_file_is_explained_as_by_a_broker() -> None:
    overrides = ["rollout.num_samples_per_promt=3", "schedule.num_iterations=0", "objective.type=grop", "data.seeds=1"]
    with pytest.raises(ValueError, match="is no valid job") as caught:
        JobConfig.from_file(QUICKSTART, overrides)
    _, *lines = str(caught.value).splitlines()
    known = "answer_field, answer_pattern, as_chat, control_tokens, difficulty, environment, max_prompt_tokens, "
    known += "max_response_tokens, metadata_only, name, now, on_too_long, order, path, prompt_field, reward, signal, "
    known += "solved_at, system_prompt, template_options, type, weight"
    assert lines[0] == f"  data.seeds: unknown key; there are: {known}"
    assert lines[1] == "  rollout.num_samples_per_promt: unknown key; did you mean num_samples_per_prompt?"
    assert lines[2].startswith(
        "  objective.type: no objective 'grop' is installed here; did you mean grpo? There are: "
    )
    assert lines[3].startswith("  schedule.num_iterations: Input should be greater than or equal to 1, got 0 (")
    with pytest.raises(ValueError, match="has no effect") as caught:
        JobConfig.from_file(QUICKSTART, ["schedule.mode=bounded", "schedule.publish_above_kl=0.1"])
    expected = "  schedule.publish_above_kl: has no effect with max_staleness = 1; set that to 2 or more"
    assert str(caught.value).splitlines() == [f"{QUICKSTART} is no valid job:", expected]


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_examples_are_valid_jobs(example: Path) -> None:
    JobConfig.from_file(example)


def test_set_reaches_nested_keys_also_of_sections_left_out() -> None:
    overrides = [
        "schedule.num_iterations=3",
        "objective.kl.coef=0.1",
        "schedule.mode=sync",
        "reward.options.as_number=true",
    ]
    config = JobConfig.from_file(QUICKSTART, overrides)
    assert (config.schedule.num_iterations, config.schedule.mode, config.objective.kl.coef) == (3, "sync", 0.1)
    stored = apply_override(config.model_dump(mode="json"), "objective.importance.type=truncated")  # it has null there
    assert JobConfig.model_validate(stored).objective.importance.type == "truncated"
    for wrong in ("novalue", "=3", "name.x=3"):
        with pytest.raises(ValueError, match="--set"):
            JobConfig.from_file(QUICKSTART, [wrong])


def test_stack_that_has_ended_by_itself_says_why(
    onbeat: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("ONBEAT_URL", raising=False)
    monkeypatch.setattr("onbeat.process.brokers.DEFAULT_URL", "http://127.0.0.1:1")
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "stack.log"
    for text, is_told in (
        ("2026-11-23 15:00:00,000 INFO the stack is up at http://127.0.0.1:8800\n", False),
        (
            "2026-11-23 15:00:00,000 ERROR rollout-0 exited with code 1, after 4 restarts; last lines of x:\n"
            "  2026-11-23 14:59:59,000 ERROR a service's own line\n",
            True,
        ),
    ):
        log.write_text(text)
        for command in (["jobs", "list"], ["doctor"]):
            printed = "".join(onbeat(*command, "--data-dir", str(tmp_path), code=1))
            reason = f"the stack of {tmp_path} has ended: rollout-0 exited with code 1, after 4 restarts; {log} has"
            assert (reason in printed) == is_told, printed


def test_help_is_fast_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, time; sys.argv = ['onbeat', '--help']\n"
        "from onbeat.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = 'torch vllm transformers fastapi numpy httpx redis pydantic grpc services'.split()\n"
        "print('heavy imports:', [name for name in heavy if name in sys.modules])\n"
    )
    code += "print('seconds:', time.process_time())\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
    assert "Commands" in done.stdout
    assert "heavy imports: []" in done.stdout, done.stdout + done.stderr
    # The processor takes 0.2 s on an idle machine. The promise of half a second for the user is measured, not tested.
    assert float(done.stdout.rpartition("seconds:")[2]) < 2


def test_ctrl_c_while_modules_load_shows_no_traceback() -> None:
    interrupt = "sys.meta_path.insert(0, type('Interrupting', (), {'find_spec': lambda self, name, *_: "
    interrupt += "os.kill(os.getpid(), signal.SIGINT) if name == 'typer' else None})())"
    heard = "signal.signal(signal.SIGINT, signal.default_int_handler)"  # also where these tests run in the background
    code = f"import os, signal, sys; {heard}; from onbeat.start import main; {interrupt}; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_what_a_job_did_is_printed(onbeat: Command, trained: str, tmp_path: Path) -> None:
    assert onbeat("jobs", "list").out.splitlines()[1].split()[3:6] == ["SUCCEEDED", "3/3", "0.200"]
    rows = [line.split()[:4] for line in onbeat("jobs", "iterations", trained, "--last", "2").out.splitlines()[1:]]
    assert rows == [["1", "COMMITTED", "1", "0.100"], ["2", "COMMITTED", "2", "0.200"]]
    metrics = [line.split()[:3] for line in onbeat("jobs", "metrics", trained).out.splitlines()]
    assert metrics[1:3] == [["reward:"], ["iteration/reward_mean", "0", "0.2"]]
    assert metrics.index(["train/loss", "1.5", "1.25"]) > metrics.index(["training:"])
    named = onbeat("jobs", "metrics", trained, "iteration/reward_mean", "train/loss").out
    assert named.splitlines()[-1].split() == ["2", "0.2", "-"]
    error = onbeat("jobs", "metrics", trained, "loss", code=2).err
    assert "has no metric 'loss'; it has: iteration/" in error
    assert "KIND" in onbeat("jobs", "events", trained).out
    assert "reward" in onbeat("jobs", "samples", trained, "--iteration", "0").out
    assert ", 3 iterations committed, 6 groups accepted" in onbeat("audit", trained).out
    onbeat("jobs", "report", trained, "-o", str(tmp_path / "r.json"))
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["mode"], len(report["iterations"]), len(report["weights"])) == ("periodic", 3, 4)


@pytest.mark.usefixtures("trainer")
def test_samples_are_chosen_by_end_reward_and_text(onbeat: Command, broker: BrokerThread) -> None:
    job_id = broker.create_job(solved_at=0.15)  # the reward of iteration 1 is 0.1, and of the newest one 0.2
    onbeat("jobs", "watch", job_id)

    def chosen(*options: str) -> list[str]:
        return [sample["group_id"] for sample in json.loads(onbeat("jobs", "samples", job_id, "--json", *options).out)]

    assert chosen("--search", "OF 2-1") == ["2-1", "2-1"]
    assert chosen("--iteration", "1", "--wrong") == ["1-0", "1-1", "1-0", "1-1"]
    assert chosen("--wrong") == []
    assert onbeat("jobs", "samples", job_id, "--truncated").out == "no such samples\n"
    for other, said in ((["--evaluation", "0"], "leave them or --evaluation out"), (["--before-after"], "leave out")):
        assert said in onbeat("jobs", "samples", job_id, "--wrong", *other, code=2).err


@pytest.mark.usefixtures("trainer")
def test_samples_of_one_of_several_sources_are_shown(onbeat: Command, broker: BrokerThread) -> None:
    rows = {"type": "jsonl", "path": "prompts.jsonl"}
    job_id = broker.create_job(data=[{**rows, "name": "sums"}, {**rows, "name": "rest"}])
    onbeat("jobs", "watch", job_id)
    for name in ("sums", "rest"):
        samples = json.loads(onbeat("jobs", "samples", job_id, "--source", name, "--json").out)
        assert [sample["source"] for sample in samples] == [name] * 2  # one of two prompts, with two responses
    assert "sums" in onbeat("jobs", "samples", job_id, "--source", "sum", code=2).err
    assert "leave them or" in onbeat("jobs", "samples", job_id, "--source", "sums", "--evaluation", "0", code=2).err


def test_logs_of_local_services_are_printed(onbeat: Command, tmp_path: Path) -> None:
    assert "no stack was started with this data folder" in onbeat("logs", "--data-dir", str(tmp_path), code=2).err
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "trainer.log").write_text("a\nb\x1b[2J\nc\n")
    shown = onbeat("logs", "trainer", "-n", "2", "--data-dir", str(tmp_path)).out
    assert shown.splitlines()[1:] == ["b\\x1b[2J", "c"]
    assert "there are: trainer" in onbeat("logs", "broker", "--data-dir", str(tmp_path), code=2).err


def test_template_is_a_job_and_is_not_overwritten(
    onbeat: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = tmp_path / "my job.toml"
    assert f"`onbeat run '{job}'` trains" in onbeat("init", str(job)).out
    assert "ends with .toml" in onbeat("init", str(job.with_suffix(".json")), code=2).err
    assert JobConfig.from_file(job).name == "my-job"
    assert "is there already" in onbeat("init", str(job), code=2).err
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))  # as on a full disk, no byte can be written
    try:
        assert "cannot be written: File too large" in onbeat("init", str(tmp_path / "other.toml"), code=2).err
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "other.toml").exists()
    monkeypatch.delenv("ONBEAT_URL", raising=False)
    monkeypatch.setenv("ONBEAT_DATA_DIR", str(tmp_path))
    monkeypatch.setattr("onbeat.process.brokers.DEFAULT_URL", "http://127.0.0.1:1")
    reason = "No broker was asked about model, data and reward: no stack runs in"
    assert f"keys and values are right. {reason}" in onbeat("validate", str(job)).out
    onbeat("validate", str(job), "--set", "rollout.n=3", code=2)


@pytest.mark.usefixtures("broker")
def test_validate_asks_the_broker(onbeat: Command, job_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong_here in ("", "rollout.n=3"):  # the broker also says what else is wrong
        overrides = [text for text in (wrong_here, "model.path=bundled:no-such-model") if text]
        options = [part for text in overrides for part in ("--set", text)]
        assert "model.path: " in onbeat("validate", job_file, *options, code=2).err
    note = "2 of 9 prompts are left out"
    monkeypatch.setattr("services.broker.api.jobs.review", AsyncMock(return_value=Remarks([note])))
    assert f"note: {note}" in onbeat("validate", job_file).out


@pytest.mark.usefixtures("broker")
def test_validate_counts_rows_as_json(onbeat: Command, job_file: str) -> None:
    folder = Path(job_file).parent
    (folder / "rows.jsonl").write_text('{"prompt": "a", "answer": 42.0}\n{"prompt": "b", "answer": "seven"}\n')
    rows = ["--set", "data={type = 'jsonl', path = 'rows.jsonl'}", "--set", "reward={name = 'exact'}"]
    shown = json.loads(onbeat("validate", job_file, *rows, "--json").out)
    (counts,) = shown["rows"]
    assert shown["is_accepted"] is True
    assert (counts["num_accepted"], counts["num_changed"], counts["num_refused"]) == (2, 1, 0)
    assert list(counts["reasons"].values()) == [1]
    (folder / "rows.jsonl").write_text('{"prompt": "a", "answer": 42.0}\n{"prompt": "b", "answer": [1]}\n')
    rows[1] = "data={type = 'jsonl', path = 'other.jsonl'}"
    (folder / "rows.jsonl").rename(folder / "other.jsonl")
    refused = json.loads(onbeat("validate", job_file, *rows, "--json", code=1).out)
    assert refused["is_accepted"] is False
    (error,) = refused["errors"]
    assert error["field"] == "data.answer_field"
    assert "line 2 has the answer [1], which is a list" in error["message"]
    (counts,) = refused["rows"]
    assert (counts["num_accepted"], counts["num_refused"]) == (1, 1)
    assert counts["reasons"]["refused: data.answer_field"] == 1


@pytest.mark.usefixtures("broker")
def test_error_of_the_system_is_one_line(onbeat: Command) -> None:
    (line,) = onbeat("validate", "a" * 300, code=1).err.splitlines()
    assert line.startswith("error: aaa")
    assert line.endswith(" cannot be used: File name too long")


def test_chat_keeps_the_conversation(onbeat: Command, broker: BrokerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer_chats(chats: Chats) -> None:
        """Be a rollout that repeats the last message, unless it is too long."""
        while True:
            if (taken := await chats.take(1.0)) is None:
                continue
            chat_id, request = taken
            last = request.messages[-1].text
            message = {"content": f"{len(request.messages)}: {last}\x1b[2J"}
            reply = Reply(body=json.dumps({"choices": [{"message": message}]}), is_last=True)
            if last == "too long":
                reply = Reply.of_error(ChatFailed(400, "invalid_value", "max_tokens: lower it"))
            await chats.say(chat_id, reply)

    job_id, _ = broker.run(World(broker.ledger).started_job())
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntoo long\ntwo\n"))
    with broker.meanwhile(answer_chats(Chats(broker.ledger.redis, job_id))):
        assert onbeat("chat", job_id, "2 + 2").out == "1: 2 + 2\\x1b[2J\n"
        printed = onbeat("chat", job_id, code=1)  # a message was refused
        monkeypatch.setattr("sys.stdin", io.StringIO("one\n"))
        onbeat("chat", job_id)
    assert printed.out == "1: one\\x1b[2J\n3: two\\x1b[2J\n"  # no prompt is printed
    assert "max_tokens: lower it" in printed.err
