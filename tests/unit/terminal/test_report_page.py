"""The report of a job: one HTML file that is sent to others, Markdown for a pull request, and JSON."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from starlette.exceptions import HTTPException

from onbeat.contracts.errors import GroupsTrimmed
from onbeat.contracts.records import EvaluationRecord, IterationRecord, JobRecord, Sample
from onbeat.local.stack import StackOptions, service_specs
from onbeat.terminal.before_after import Answer, BeforeAfter, Pair
from onbeat.terminal.report import make_report
from onbeat.terminal.report_markdown import markdown_of
from onbeat.terminal.report_page import page_of
from onbeat.terminal.run_report import Numbers, RunReport, rows_of_numbers, verdict
from tests.broker_thread import BrokerThread
from tests.unit.terminal.conftest import Command
from tests.unit.terminal.records import evaluation_record, iteration_record
from tests.world import job_body

VOID = {"meta", "line", "br"}
CLEAN = "clean: 4 groups"


def job(name: str = "small", state: str = "SUCCEEDED", num_iterations: int = 4, **fields: Any) -> JobRecord:
    fields = {"id": "job-1", "pool": "default", "created_at": 0.0, "config": job_body(name=name)} | fields
    return JobRecord.model_validate(fields | {"name": name, "state": state, "num_iterations": num_iterations})


def run_report(job: JobRecord, text: str = "plain") -> RunReport:
    """Return a report whose every text from outside is this one."""
    values = {"policy_version": 0, "num_tokens": 3, "finish_reason": "length", "iteration": 0, "group_id": "eval-0-0"}
    answer = Answer(Sample.model_validate({**values, "prompt": text, "response": text, "reward": 0.0}), False)
    curves = {"iteration/reward_mean": [(0, 0.25), (1, 0.75)], text: [(0, 1.0), (1, 2.0)], f"{text} 2": [(0, 1.0)]}
    return RunReport(
        job=job,
        report=make_report(job, [iteration_record(0), iteration_record(1)]) | {"error": text},
        curves=curves,
        verdict=text,
        numbers=list(rows_of_numbers(curves)),
        audit=text,
        findings=[text],
        before_after=BeforeAfter(0, 4, is_held_out=True, pairs=[Pair(text, answer, answer)]),
    )


def test_rows_are_named_only_where_a_trainer_has_chosen_them() -> None:
    chosen, given = job(max_tokens_per_micro_batch=640), job()
    assert "rows of 640 tokens" in page_of(run_report(chosen))
    assert "rows of None" not in page_of(run_report(given))
    assert make_report(chosen, [])["max_tokens_per_micro_batch"] == 640
    assert "max_tokens_per_micro_batch" not in make_report(given, [])


class Tags(HTMLParser):
    """The names of all tags of a page; each must be closed where it has to be."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


# ---- the page ----------------------------------------------------------------------------------------------------


def test_page_has_no_script_and_loads_nothing() -> None:
    hostile = "</div></title><script>alert('x')</script>"
    page = page_of(run_report(job(hostile), hostile))
    tags = Tags(page)
    assert tags.open == []
    assert not tags.names & {"script", "link", "img", "iframe", "object", "image", "use"}
    assert "<script" not in page
    assert page.count("&lt;script&gt;") > 10  # title, heading, verdict, audit, finding, answers, series, configuration
    assert re.search(r"(src|href)=|url\(|@import|https?:", page) is None


def test_page_shows_answers_and_folds_the_rest() -> None:
    page = page_of(run_report(job()))
    seen, folded = page.split("<details>", 1)
    assert "✗ wrong, reward 0, cut at the limit" in seen
    assert (seen.count("<svg role"), folded.count("<svg role")) == (1, 1)  # the reward, and the series of no chart
    assert "Always the same: plain 2 1." in folded
    assert "rollout.num_samples_per_prompt = 2" in folded


@pytest.mark.parametrize(
    ("state", "end"), [("RUNNING", "100"), ("PAUSED", "100"), ("SUCCEEDED", "100"), ("CANCELLED", "1"), ("FAILED", "1")]
)
def test_axis_is_that_of_the_job_unless_it_ended_early(state: str, end: str) -> None:
    page = page_of(run_report(job(state=state, num_iterations=100)))
    assert re.findall(r">(\d+)</text>", page)[-1] == end


def test_no_folder_of_the_machine_is_in_the_report() -> None:
    config = job_body(model={"path": "/home/ada/models/tiny"}, data={"type": "jsonl", "path": "/home/ada/a.jsonl"})
    config["evaluation"] = {"data": {"type": "jsonl", "path": "../ada/runs/b.jsonl"}}
    failed = job(state="FAILED", config=config, error="/home/ada/x/y.json is broken", checkpoint="/home/ada/c/last")
    run = run_report(failed)
    said = verdict(failed, [], [], {}, CLEAN)
    assert said == "Failed after 0 of 4 iterations: y.json is broken."
    for text in (page_of(run), markdown_of(run), json.dumps(run.differences)):
        assert "ada" not in text
        assert all(name in text for name in ("tiny", "a.jsonl", "b.jsonl"))


def test_job_without_iterations_has_a_page() -> None:
    queued = job(state="PENDING")
    said = verdict(queued, [], [], {}, CLEAN)
    run = RunReport(queued, make_report(queued, []), {}, said, [], CLEAN, [], None)
    assert "Not finished yet: pending after 0 of 4 iterations." in page_of(run)
    assert "there are no curves" in page_of(run)


# ---- the verdict -------------------------------------------------------------------------------------------------


def scored(*rewards: float, num_groups: int = 100) -> list[EvaluationRecord]:
    fields = {"reward_std": 0.4, "num_groups": num_groups}
    return [evaluation_record(0).model_copy(update={"reward_mean": reward, **fields}) for reward in rewards]


def committed(*rewards: float) -> list[IterationRecord]:
    return [iteration_record(place, reward_mean=reward, reward_std=0.1) for place, reward in enumerate(rewards)]


def learned(*losses: float) -> list[IterationRecord]:
    records = [iteration_record(place) for place in range(len(losses))]
    fields = {"reward_mean": None, "is_supervised": True}
    return [
        record.model_copy(update=fields | {"metrics": {"sft/loss": loss}})
        for record, loss in zip(records, losses, strict=True)
    ]


NEW_PROMPTS = "Nothing was held out, so this says nothing about new prompts."


@pytest.mark.parametrize(
    ("iterations", "evaluations", "sentence"),
    [
        ([], [], "Nothing was trained."),
        (committed(0.5), [], "There are too few iterations to say whether it learns."),
        (learned(2.5, 1.2), [], "The loss on its examples went from 2.5 to 1.2 in 2 iterations (4 s)."),
        (
            committed(0.2, 0.3, 0.8, 0.9),
            [],
            f"The reward in training rose from 0.25 to 0.85 in 4 iterations (8 s). {NEW_PROMPTS}",
        ),
        (
            committed(0.2, 0.9),
            scored(0.2, 0.5, 0.8),
            "The reward on held-out prompts rose from 0.2 to 0.8 in 2 iterations (4 s); 100 prompts.",
        ),
        (
            committed(0.2, 0.9),
            scored(0.8, 0.2),
            "The reward on held-out prompts fell from 0.8 to 0.2 in 2 iterations (4 s); 100 prompts.",
        ),
        (
            committed(0.2, 0.9),
            scored(0.3, 0.6, num_groups=8),
            "The reward on held-out prompts changed by no more than chance, from 0.3 to 0.6, in 2 iterations (4 s); "
            "8 prompts.",
        ),
        (
            committed(0.2, 0.9),
            scored(0.3),
            "The reward in training rose from 0.2 to 0.9 in 2 iterations (4 s). The held-out prompts were answered "
            "once so far: reward 0.3.",
        ),
    ],
)
def test_verdict_says_whether_it_learned(
    iterations: list[IterationRecord], evaluations: list[EvaluationRecord], sentence: str
) -> None:
    assert verdict(job(), iterations, evaluations, {}, CLEAN) == sentence


def test_verdict_says_what_speaks_against_it() -> None:
    curves = {"rollout/truncated_frac": [(0, 0.0), (1, 0.12)]}
    said = verdict(job(state="CANCELLED"), committed(0.2, 0.9), [], curves, "VIOLATION: a group was used twice")
    assert said.startswith("Cancelled after 2 of 4 iterations. ")
    assert "12% of the last responses were cut at the limit of tokens." in said
    assert said.endswith("The audit found a violation: do not rely on this run.")


def test_date_of_templates_is_no_difference() -> None:
    config = job_body(
        data={"type": "jsonl", "path": "a.jsonl", "now": "2026-11-30T01:52:56Z", "system_prompt": "Be brief."}
    )
    assert {"data.path", "data.system_prompt"} <= set(differences := run_report(job(config=config)).differences)
    assert "data.now" not in differences


def test_numbers_are_means_of_both_ends() -> None:
    curves = {
        "iteration/reward_mean": [(x, x / 10) for x in range(12)],
        "eval/reward_mean": [(0, 0.2), (6, 0.4), (12, 0.8)],
        "iteration/overlap_frac": [(0, 0.5)],
    }
    assert list(rows_of_numbers(curves)) == [
        Numbers("Held-out reward", "0.2", "0.8"),
        Numbers("Reward in training", "0.2", "0.9"),
        Numbers("Overlap", "50%", ""),
    ]


# ---- other forms, and the command --------------------------------------------------------------------------------


def test_markdown_is_short_and_shows_hostile_text() -> None:
    hostile = "<b> | `x` [y](z)\n# no heading"
    text = markdown_of(run_report(job(hostile), hostile))
    heading = r"\<b\> \| \`x\` \[y\](z) \# no heading"
    assert text.startswith(f"### {heading}\n\n{heading}\n\n| | first | last |\n")
    assert text.count(heading) == 4  # name, verdict, audit, finding
    text = markdown_of(run_report(job()))
    assert "| Reward in training | 0.25 | 0.75 |" in text
    assert len(text.splitlines()) < 40
    assert text.index("Audit") < text.index("```toml")


def test_report_is_written_in_every_form(
    onbeat: Command, broker: BrokerThread, trainer: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    evaluation = {"data": job_body()["data"], "num_prompts": 2, "every_iterations": 2}
    job_id = broker.create_job(evaluation=evaluation)
    onbeat("jobs", "watch", job_id)
    assert onbeat("report", job_id).out == "report.html is written\n"
    page = (tmp_path / "report.html").read_text()
    assert page.index("Held-out reward") < page.index("The same held-out prompts") < page.index("train/loss")
    assert "prompt of eval-0-0" in page
    assert "/somewhere" not in page
    assert onbeat("report", job_id, "--format", "md").out.startswith("### test\n\nThe reward on held-out prompts")
    told = json.loads(onbeat("report", job_id, "--json").out)
    assert "ask for two forms" in onbeat("report", job_id, "--json", "--format", "md", code=2).err
    assert told["iterations"] == json.loads(onbeat("jobs", "report", job_id).out)["iterations"]
    assert told["before_after"]["pairs"][0]["after"]["reward"] == 0.3
    onbeat("report", job_id, "--format", "md", "-o", "r.md")
    assert (tmp_path / "r.md").read_text().startswith("### test")


@pytest.mark.parametrize("error", [GroupsTrimmed("job-1", 0, 1), HTTPException(403, "no samples for you")])
def test_report_lacks_samples_only_if_they_are_no_longer_kept(
    onbeat: Command, trained: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr("services.broker.api.samples.read_samples", AsyncMock(side_effect=error))
    code = 0 if isinstance(error, GroupsTrimmed) else 1
    said = onbeat("report", trained, "-o", str(tmp_path / "r.html"), code=code).err
    assert ("no samples for you" in said) == (code == 1)
    assert code or "prompt of 0-0" not in (tmp_path / "r.html").read_text()


def test_view_starts_only_a_broker_that_changes_nothing(tmp_path: Path) -> None:
    (broker,) = service_specs(StackOptions(tmp_path, is_view=True), "redis://127.0.0.1:1", 8800)
    assert (broker.name, broker.env["ONBEAT_IS_READ_ONLY"]) == ("broker", "true")


def test_view_of_a_folder_without_a_run_is_refused(
    onbeat: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "is no data folder of a run" in onbeat("view", str(tmp_path), code=2).err
    monkeypatch.setenv("ONBEAT_DATA_DIR", str(tmp_path / "other"))
    assert f"{tmp_path / 'other'} is no data folder of a run" in onbeat("view", code=2).err


def test_view_and_up_refuse_data_that_no_server_here_reads(onbeat: Command, tmp_path: Path) -> None:
    (tmp_path / "redis" / "appendonlydir").mkdir(parents=True)
    (tmp_path / "redis" / "server.json").write_text('{"kind": "Redis", "version": "99.1.0"}')
    for words in (["view", str(tmp_path)], ["up", "--data-dir", str(tmp_path)]):
        error = onbeat(*words, code=1).err
        assert f"{tmp_path / 'redis'} holds data of Redis 99.1.0, which " in error
        assert "put redis-server 99.1.0 or newer on the PATH" in error
