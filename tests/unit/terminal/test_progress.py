import asyncio
import io
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from onbeat.client import BrokerUnreachable
from onbeat.contracts.deadlines import SILENT_S, STARTING_S
from onbeat.contracts.records import (
    Diagnosis,
    EvaluationRecord,
    Event,
    Finding,
    IterationRecord,
    JobRecord,
    WorkerRecord,
)
from onbeat.contracts.states import JobState
from onbeat.terminal.follow import MAX_NOTICES_OF_A_KIND, NOTICE_KINDS, PIPE_WIDTH, Printer
from onbeat.terminal.formatting import Column, printable, table_lines
from onbeat.terminal.job_progress import START_STEPS, START_STEPS_OF_EXAMPLES, JobProgress, trainer_activity
from onbeat.terminal.job_view import JobView, is_silent, plain_line
from onbeat.terminal.live import look_until
from onbeat.terminal.report import make_report
from onbeat.terminal.summary import total_rows
from tests.unit.terminal.records import evaluation_record, iteration_record
from tests.unit.terminal.test_report import JOB

NOW = JOB.started_at + 65  # type: ignore[operator]
METRICS = {
    "train/kl": 0.01,
    "train/entropy": 1.2,
    "train/grad_norm": 0.53,
    "train/grad_cosine": 0.98,
    "rollout/response_tokens_mean": 12.4,
    "rollout/truncated_frac": 0.1,
}
MEASURED = {
    "reward_std": 0.4,
    "mismatch_mean": 0.0412,
    "rollout_idle_frac": 0.5,
    "trainer_idle_frac": 0.4,
    "metrics": METRICS,
}


def progress_of(num_committed: int, **changes: object) -> JobProgress:
    running = {"state": JobState.RUNNING, "next_iteration": num_committed, "finished_at": None}
    progress = JobProgress(JOB.model_copy(update=running))
    for i in range(num_committed + 1):
        progress.iterations[i] = iteration_record(i, i < num_committed, **changes)
    return progress


def text_of(progress: JobProgress, width: int = 100, height: int = 40, now: float = NOW) -> str:
    console = Console(file=io.StringIO(), width=width, height=height)
    console.print(JobView(progress, now))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_live_view_shows_what_everyone_does() -> None:
    progress = progress_of(4)
    progress.workers = [
        WorkerRecord(id="rollout-0", state="updating", policy_version=4, last_seen_at=0),
        WorkerRecord(id="of-another-job", job_id="job-2", state="updating", policy_version=9, last_seen_at=0),
    ]
    progress.trainer = "loading the model"
    text = text_of(progress)
    for part in ("iteration 4 of 12", "1 min 05 s elapsed", "about 16 s left", "0.300  ▁▃▆█", "50", "1 of 2 groups"):
        assert part in text
    assert ("updating, version 4" in text, "version 9" in text) == (True, False)
    assert [line.split()[0] for line in text.splitlines()][2:4] == ["reward", "speed"]
    assert progress_of(1).time_left_s() is None  # the first iteration, in which the engine starts, foretells nothing
    pending = JobProgress(JOB.model_copy(update={"state": JobState.PENDING, "started_at": None, "finished_at": None}))
    text = text_of(pending, now=JOB.created_at + 7)
    assert ("7 s waiting" in text, "rollouts     none yet" in text) == (True, True)


def test_live_view_has_the_essentials_of_the_dashboard() -> None:
    text = text_of(progress_of(4, **MEASURED))
    for part in ("std 0.40", "50 tokens/s", "25.0 tokens/s per device", "rollouts 50%", "trainer 40%"):
        assert part in text
    line = plain_line(progress_of(4, **MEASURED).committed[-1], progress_of(4))
    assert line.endswith(
        "rollouts idle 50%  trainer idle 40%  25.0 tokens/s per device  policy KL 0.0100  entropy 1.200  "
        "engine against trainer 0.0412 nats  gradient norm 0.53  cosine 0.98  "
        "responses 12.4 tokens  10% truncated  about 16 s left at 2.0 s an iteration"
    )


def test_supervised_iterations_show_the_loss_of_examples() -> None:
    progress = progress_of(2, is_supervised=True, reward_mean=None, metrics={"sft/loss": 1.25, "train/grad_norm": 0.5})
    text = text_of(progress)
    assert "loss 1.250" in text
    line = plain_line(progress.committed[-1], progress)
    assert "version 1  loss of examples 1.250" in line
    assert not any(word in line + text for word in ("reward", "rollouts idle"))
    report = make_report(progress.job, progress.committed)
    rows = dict(total_rows(report))
    assert rows["examples"].startswith("loss 1.250 (first) -> 1.250 (last)")
    assert not rows.keys() & {"reward", "overlap", "advice"}


def test_time_left_is_that_of_rl() -> None:
    """Six supervised iterations of 60 s, and then iterations of 2 s."""
    progress = progress_of(6, is_supervised=True, reward_mean=None, wall_s=60.0)
    config = JOB.config | {"warm_start": {"num_iterations": 6}}
    progress.job = progress.job.model_copy(update={"config": config})
    assert progress.time_left_s() is None, "nothing tells how long an iteration of RL takes"
    for iteration in (6, 7):
        progress.iterations[iteration] = iteration_record(iteration)
    assert progress.time_left_s() == 2.0 * 4
    sft = progress_of(6, is_supervised=True, reward_mean=None, wall_s=60.0)
    assert sft.time_left_s() == 60.0 * 6


@pytest.mark.parametrize(("width", "height"), [(200, 50), (60, 20), (40, 10), (20, 4), (5, 2)])
def test_live_view_fits_any_terminal(width: int, height: int) -> None:
    progress = progress_of(4, **MEASURED)
    progress.job = progress.job.model_copy(update={"name": "a name\x1b[2J " * 9})
    progress.workers = [WorkerRecord(id=f"rollout-{i}" * 3, state="idle", last_seen_at=NOW) for i in range(60)]
    progress.diagnosis = Diagnosis(is_healthy=False, findings=[Finding(sentence="all is wrong " * 50, is_problem=True)])
    lines = text_of(progress, width, height).splitlines()
    assert len(lines) < max(3, height)
    assert max(map(len, lines)) <= width
    assert "\x1b" not in "".join(lines)


def test_engine_that_starts_is_no_cause_for_alarm() -> None:
    progress = progress_of(0, num_accepted=0)
    finding = Finding(sentence="no rollout is alive", waits_for="a rollout", is_problem=True, since_s=500)
    progress.diagnosis = Diagnosis(is_healthy=False, findings=[finding])
    assert progress.waits_for is finding
    finding.is_problem = False
    assert trainer_activity(event_of("iteration.opened", iteration=5, policy_version=4)) is None  # opened ahead
    progress.trainer = trainer_activity(event_of("iteration.opened", iteration=0, policy_version=0)) or ""
    starting = WorkerRecord(id="rollout-0", state="starting", doing="importing vLLM", last_seen_at=NOW)
    progress.workers = [starting.model_copy(update={"job_id": JOB.id})]
    assert progress.waits_for is None  # the rollout says what it is at
    text = text_of(progress)
    assert "rollout-0    starting: importing vLLM" in text
    assert "waiting for the first group of iteration 0" in text
    out = io.StringIO()
    printer = Printer(Console(file=out, width=300), progress)
    for _ in range(2):
        printer.show_news()
    assert out.getvalue().splitlines() == [START_STEPS[1], "rollout-0: importing vLLM"]


def test_start_has_steps_until_responses_arrive() -> None:
    progress = progress_of(0, num_accepted=0)
    for changes, step in (
        ({"state": JobState.PENDING, "queue_position": 1}, 0),
        ({"state": JobState.PENDING, "queue_position": 2}, None),
        ({"state": JobState.RUNNING, "policy_version": None}, 1),
        ({"policy_version": 0}, 2),
        ({"state": JobState.PAUSED}, None),
    ):
        progress.job = progress.job.model_copy(update={"queue_position": None} | changes)
        assert progress.start_step == (None if step is None else START_STEPS[step])
        assert (step is None) == ("step " not in text_of(progress))
    progress.job = progress.job.model_copy(update={"state": JobState.RUNNING})
    progress.workers = [WorkerRecord(id="rollout-0", job_id=JOB.id, state="generating", last_seen_at=NOW)]
    assert progress.start_step == START_STEPS[3]
    assert progress_of(0, num_accepted=1).start_step is None
    assert progress_of(1).start_step is None


@pytest.mark.parametrize(
    "sections", [{"objective": {"type": "sft"}, "warm_start": {}}, {"warm_start": {"num_iterations": 2}}]
)
def test_start_with_examples_waits_for_no_rollouts(sections) -> None:
    progress = progress_of(0, num_accepted=0)
    for changes, step in (({"state": JobState.PENDING}, 0), ({"policy_version": None}, 1), ({"policy_version": 0}, 2)):
        changes = {"state": JobState.RUNNING, "queue_position": None, "config": sections} | changes
        progress.job = progress.job.model_copy(update=changes)
        assert progress.start_step == START_STEPS_OF_EXAMPLES[step]


def test_what_it_waits_for_is_shown_when_wrong_or_long() -> None:
    progress = progress_of(4)
    short = Finding(sentence="waits a little", waits_for="a group", since_s=2)
    long = Finding(sentence="waits long", waits_for="a group", since_s=60)
    problem = Finding(sentence="is broken", is_problem=True)
    young, lasting = (problem.model_copy(update={"since_s": since_s}) for since_s in (9.9, 10.0))
    cases = [([short], None), ([short, long], "waits long"), ([long, problem], "is broken")]
    cases += [([young], None), ([lasting], "is broken")]  # the services of a young job may just be starting
    for findings, shown in cases:
        progress.diagnosis = Diagnosis(is_healthy=True, findings=findings)
        assert (progress.waits_for.sentence if progress.waits_for else None) == shown
        assert shown is None or shown in text_of(progress)
    for record in progress.iterations.values():
        record.wall_s = 1000.0  # then a minute is not long
    progress.diagnosis = Diagnosis(is_healthy=True, findings=[long])
    assert progress.waits_for is None
    progress.diagnosis = Diagnosis(is_healthy=False, findings=[problem])
    progress.job = progress.job.model_copy(update={"state": JobState.SUCCEEDED})
    assert progress.waits_for is None


def test_silent_rollouts_are_told_apart_whatever_this_clock_says() -> None:
    progress = progress_of(4)
    seen_at = {"rollout-0": 5000.0, "rollout-1": 4960.0}
    working = {"state": "generating", "num_in_flight": 3}
    progress.workers = [WorkerRecord(id=name, last_seen_at=seen, **working) for name, seen in seen_at.items()]
    for clock in (0.0, 5001.0, 99999.0):
        text = text_of(progress, now=clock)
        assert "generating, answering 3" in text
        assert "rollout-1    silent for 4" in text
        assert text.count("silent") == 1


def test_rollout_that_starts_is_not_silent() -> None:
    def is_silent_after(seconds: float, job_id: str | None = None) -> bool:
        return is_silent(
            WorkerRecord(id="rollout-0", state="starting", job_id=job_id, last_seen_at=1000), 1000 + seconds
        )

    assert not is_silent_after(SILENT_S + 1)
    assert is_silent_after(SILENT_S + 1, "job-1"), "its engine starts, and it sends heartbeats"
    assert is_silent_after(STARTING_S + 1)


class Scripted:
    """A client of a job that runs: two events, one iteration more with each look, and evaluation 0, scored at last.

    The question for the rollouts fails as often as `num_losses` says.
    """

    def __init__(self, num_losses: int) -> None:
        self.jobs, self.num_losses, self.num_looks = self, num_losses, 0
        self.iterations_after: list[int] = []

    async def get(self, job_id: str) -> JobRecord:
        self.num_looks += 1
        return JOB.model_copy(update={"config": {"evaluation": {"every_iterations": 1}}, "state": JobState.RUNNING})

    async def events(self, job_id: str, after: str) -> list[Event]:
        known = [Event(id=f"{i}-0", time=0, kind="trainer.loading", message=f"loading {i}") for i in (1, 2)]
        return [event for event in known if event.id > after]

    async def iterations(self, job_id: str, after: int) -> list[IterationRecord]:
        self.iterations_after.append(after)
        return [iteration_record(i) for i in range(after + 1, self.num_looks)]

    async def explain(self, job_id: str) -> Diagnosis:
        return Diagnosis(is_healthy=True, findings=[])

    async def workers(self, pool: str) -> list[WorkerRecord]:
        self.num_losses -= 1
        if self.num_losses >= 0:
            raise BrokerUnreachable("http://here", "Redis does not answer (503)", 503)
        return []

    async def evaluations(self, job_id: str, after: int) -> list[EvaluationRecord]:
        return [evaluation_record(0, is_done=self.num_looks == 4)] if after < 0 else []


async def test_each_look_asks_for_what_is_new_also_after_a_lost_answer() -> None:
    client, out = Scripted(num_losses=1), io.StringIO()
    progress = JobProgress(JOB)
    printer = Printer(Console(file=out, width=300), progress)
    with pytest.raises(BrokerUnreachable):
        await progress.look(client)  # type: ignore[arg-type]
    assert [event.id for event in progress.news] == ["1-0", "2-0"]
    progress.news[0].kind = "job.warning"
    for _ in range(3):
        await progress.look(client)  # type: ignore[arg-type]
        printer.show_news()
    assert progress.trainer == "loading 2"
    assert client.iterations_after == [-1, -1, 1, 2]
    lines = [line.split("  ") for line in out.getvalue().splitlines()]
    shown = ["job.warning: loading 1", *(f"iteration {i}/12" for i in (1, 2, 3, 4)), "evaluation 0"]
    assert [
        line[0] for line in lines if line[0]
    ] == shown  # every line once; the evaluation was asked for again while it was open


async def test_events_before_a_run_continues_are_no_news() -> None:
    progress = JobProgress(JOB, cursor="1-0")
    await progress.look(Scripted(num_losses=0))  # type: ignore[arg-type]
    assert [event.id for event in progress.news] == ["2-0"]


@pytest.fixture
def is_hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onbeat.terminal.live.LOOK_S", 0.01)
    monkeypatch.setattr("onbeat.terminal.live.REDRAW_S", 0.005)


@pytest.mark.usefixtures("is_hasty")
async def test_broker_that_stays_away_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onbeat.terminal.live.UNREACHABLE_DEADLINE_S", 0.1)
    waited: list[float] = []

    async def look() -> None:
        raise BrokerUnreachable("http://here", "lost")

    with pytest.raises(BrokerUnreachable):
        await look_until(asyncio.Event(), look, waited.append)
    assert waited[-1] > 0.05


def event_of(kind: str, message: str = "m", **data: object) -> Event:
    return Event(id="1", time=0, kind=kind, message=message, data=data)


def test_notices_are_shown_a_bounded_number_of_each_kind() -> None:
    progress, out = progress_of(0), io.StringIO()
    failed = [event_of("group.failed", f"reward {chr(97 + number % 26)} raised") for number in range(100)]
    progress.news = [event_of("checkpoint.failed"), event_of("x"), *failed, event_of("job.warning")]
    Printer(Console(file=out, width=300), progress).show_news()
    lines = [line for line in out.getvalue().splitlines() if not line.endswith("times)")]
    more = "group.failed: more of these are counted, not shown"
    shown = ["checkpoint.failed: m", *(f"group.failed: reward {name} raised" for name in "abcde"), more]
    assert lines == [*shown, "job.warning: m"]
    assert MAX_NOTICES_OF_A_KIND == 5


def test_notice_that_comes_again_is_counted() -> None:
    progress, out = progress_of(0), io.StringIO()
    printer = Printer(Console(file=out, width=300), progress)
    message = "/data/jobs/job-1/checkpoints/iteration-{:06d} cannot be written: no space left; training goes on"
    for number in range(1, 6):
        progress.news = [event_of("checkpoint.failed", message.format(number)), event_of("job.state", "RUNNING")]
        printer.show_news()
    start = "checkpoint.failed: /data/jobs/job-1/checkpoints/iteration-{:06d} cannot be wri…"
    lines = [line for line in out.getvalue().splitlines() if not line.startswith("job.state")]
    assert lines == [
        f"checkpoint.failed: {message.format(1)}",
        f"{start.format(2)} (2 times)",
        f"{start.format(4)} (4 times)",
    ]
    assert out.getvalue().count("job.state: RUNNING") == 5


def test_lines_in_a_pipe_have_120_characters_at_most() -> None:
    progress, out = progress_of(4, **MEASURED), io.StringIO()
    progress.news = [event_of("job.warning", "a sentence that goes on and on; " * 12)]
    Printer(Console(file=out, width=300), progress).show_news()
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= PIPE_WIDTH == 120
    assert sum(line.startswith("iteration ") for line in lines) == 4
    whole = " ".join(line.strip() for line in lines)
    assert "10% truncated" in whole
    assert whole.count("a sentence that goes on and on;") == 12


def test_all_kinds_of_notices_are_emitted_somewhere() -> None:
    sources = [path for folder in ("onbeat/streams", "services") for path in Path(folder).rglob("*")]
    texts = [path.read_text() for path in sources if path.suffix in (".py", ".lua")]
    unknown = [kind for kind in NOTICE_KINDS if not any(f'"{kind}"' in text or f"'{kind}'" in text for text in texts)]
    assert not unknown


def test_control_codes_become_visible() -> None:
    assert printable("a\x1b[31m\r\nb ü") == "a\\x1b[31m\\r\\nb ü"
    assert printable("pay\u200dpal \u202eevil") == "pay\\u200dpal \\u202eevil"
    assert printable("\u200d\U0001f680 a\u200d\U0001f680") == "\\u200d\U0001f680 a\\u200d\U0001f680"
    for emoji in ("👩‍🚀", "👩🏽‍🚀", "🏳️‍🌈", "🏃‍♀️‍➡️"):  # emoji of several parts
        assert printable(f"a {emoji} b") == f"a {emoji} b"


@pytest.mark.parametrize("width", [None, 14])
def test_columns_of_wide_characters_are_aligned_in_cells(width: int | None) -> None:
    columns = [Column("name"), Column("reward", is_number=True)]
    names = ["日本語のモデル", "👩‍🚀 run", "e\u0301tude", "a name in ascii"]
    title, *rows = table_lines(columns, [[name, "12345"] for name in names], width)
    assert {cell_len(row) for row in rows} == {cell_len(title)}
    assert width is None or cell_len(title) <= width
