import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from onbeat.contracts.errors import OnbeatError
from onbeat.contracts.records import IterationRecord, JobRecord, WeightsRecord
from onbeat.terminal.report import check_report_path, make_report, write_report
from onbeat.terminal.summary import print_rows, total_rows
from tests.scripted_trainer import weights_record
from tests.unit.terminal.conftest import FakeTerminal
from tests.unit.terminal.records import evaluation_record, iteration_record

PROMISED = """iteration policy_version reward_mean num_groups num_responses prompt_tokens response_tokens wall_s
generate_s train_s weight_sync_s rollout_idle_frac trainer_idle_frac staleness_max mismatch_mean mismatch_max tpspd"""
JOB = JobRecord.model_validate(
    {
        "id": "j",
        "name": "n",
        "pool": "default",
        "state": "SUCCEEDED",
        "created_at": 90.0,
        "started_at": 95.0,
        "finished_at": 130.0,
        "num_iterations": 12,
        "config": {"schedule": {"mode": "periodic"}},
    }
)


def records(num_committed: int, **changes: float) -> list[IterationRecord]:
    return [iteration_record(i, **changes) for i in range(num_committed)]


def test_report_has_the_promised_names() -> None:
    weights = [weights_record(version) for version in range(3)]
    report = make_report(JOB, records(2), weights=weights)
    assert {"job_id", "state", "mode", "totals", "iterations"} <= report.keys()
    assert (report["job_id"], report["state"], report["mode"]) == ("j", "SUCCEEDED", "periodic")
    assert all(set(record) >= set(PROMISED.split()) for record in report["iterations"])
    assert len(report["iterations"]) == 2
    assert report["weights"] == [record.model_dump() for record in weights]


def test_totals_by_hand() -> None:
    totals = make_report(JOB, records(12))["totals"]
    assert totals["reward_mean_first5"] == pytest.approx(0.2)
    assert totals["reward_mean_last5"] == pytest.approx(0.9)
    assert (totals["iterations"], totals["wall_s"], totals["job_s"]) == (12, 24.0, 35.0)
    assert (totals["tokens"], totals["num_stale"], totals["staleness_max"]) == (1200, 12, None)
    warm = [iteration_record(i, is_supervised=True, reward_mean=None) for i in range(7)]
    assert make_report(JOB, warm + records(12)[7:])["totals"]["reward_mean_first5"] == pytest.approx(0.9)
    # 100 tokens at 25 on 2 devices for 2 s, then 100 at 10 on 2 devices for 5 s: 200 tokens in 14 device-seconds
    mixed = records(1) + records(1, wall_s=5.0, tpspd=10.0)
    assert make_report(JOB, mixed)["totals"]["tpspd"] == pytest.approx(200 / 14)


def test_report_leaves_out_what_has_no_numbers_yet() -> None:
    evaluations = [evaluation_record(0), evaluation_record(9, is_done=False)]
    iterations = [*records(2, staleness_max=2, num_replaced=3, num_stale=0), iteration_record(2, is_committed=False)]
    report = make_report(JOB, iterations, evaluations)
    assert [(record["evaluation"], record["pass_at_k"]) for record in report["evaluations"]] == [(0, 0.5)]
    assert (len(report["iterations"]), report["totals"]["staleness_max"]) == (2, 2)
    assert dict(total_rows(report))["groups"] == "6 replaced"
    totals = make_report(JOB.model_copy(update={"started_at": None}), [])["totals"]
    assert totals["reward_mean_first5"] is totals["tpspd"] is totals["job_s"] is None


def test_totals_of_weights_by_hand() -> None:
    versions = [weights_record(version, open_s) for version, open_s in enumerate((None, 0.9, 0.2, 0.4))]
    # Two rollouts, each 1000 bytes to join and then 10 for each of three deltas: 2060 of 8000 bytes.
    report = make_report(JOB, records(3), weights=versions)
    totals = report["totals"]
    assert (totals["weight_bytes_full"], totals["weight_bytes_received"]) == (8000, 2060)
    assert totals["weight_open_s"] == 0.4  # the joining, which waited for no step, is no part of the median
    assert dict(total_rows(report))["weights"] == "sync 0.4 s an iteration, 26% of the model's bytes"
    untold = WeightsRecord(policy_version=1, rollouts=weights_record(1).rollouts)
    joined = make_report(JOB, records(1), weights=[versions[0], untold])  # a share of like with like
    assert dict(total_rows(joined))["weights"] == "sync 100% of the model's bytes"
    assert "weights" not in dict(total_rows(make_report(JOB, records(1))))


def test_report_and_summary_say_which_side_is_short_of_devices() -> None:
    report = make_report(JOB, records(12, rollout_idle_frac=0.1, trainer_idle_frac=0.9))
    assert report["advice"].startswith("with 2 more machines, to generate: about ")
    assert dict(total_rows(report))["advice"] == report["advice"]
    assert make_report(JOB, records(3))["advice"] is None


def test_report_and_summary_say_how_much_overlapped() -> None:
    report = make_report(JOB, records(3, overlap_frac=0.4))
    assert report["overlap"].startswith("during 40% of the time of generation, ")
    assert dict(total_rows(report))["overlap"] == report["overlap"]
    assert report["iterations"][0]["overlap_frac"] == 0.4
    assert make_report(JOB, records(3))["overlap"] is None


@pytest.mark.parametrize(
    ("num_iterations", "text"),
    [
        (0, "-"),
        (1, "0.000"),
        (9, "0.150 (first 4) -> 0.650 (last 4)  "),
        (20, "0.200 (first 5) -> 1.700 (last 5)  "),
    ],
)
def test_summary_compares_no_iteration_with_itself(num_iterations: int, text: str) -> None:
    report = make_report(JOB, records(num_iterations))
    assert dict(total_rows(report))["reward"].rstrip("▁▂▃▄▅▆▇█") == text


@pytest.mark.parametrize(("file", "num_lines"), [(io.StringIO(), 1), (FakeTerminal(), 3)])
def test_long_path_in_the_summary_is_not_cut(file: io.StringIO, num_lines: int) -> None:
    console = Console(file=file, width=40, force_interactive=file.isatty(), color_system=None)
    path = "/home/user/.onbeat/jobs/job-1/checkpoints/iteration-000006"
    print_rows(console, [("checkpoint", Text(path))])
    lines = file.getvalue().splitlines()
    assert "".join(line[12:].rstrip() for line in lines) == path
    assert len(lines) == num_lines


def test_report_file_is_json_and_checked_before_the_run(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    check_report_path(path)
    write_report(path, make_report(JOB, records(1)))
    assert json.loads(path.read_text())["job_id"] == "j"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(OnbeatError, match="cannot be written"):
        check_report_path(tmp_path / "missing" / "report.json")
    os.mkfifo(tmp_path / "pipe")  # as /dev/stdout is one: it would be replaced
    with pytest.raises(OnbeatError, match="cannot be written"):
        check_report_path(tmp_path / "pipe")
