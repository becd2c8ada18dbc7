"""The report of a job as one HTML file, which is sent to others and opened in a browser."""

import re
from pathlib import Path
from unittest.mock import AsyncMock

import pytest
from starlette.exceptions import HTTPException

from onbeat.contracts.errors import GroupsTrimmed
from onbeat.contracts.records import Sample
from onbeat.local.stack import StackOptions, service_specs
from onbeat.terminal.report_page import curve_of, page_of
from tests.unit.terminal.conftest import Command


def test_page_has_no_script_and_loads_nothing() -> None:
    hostile = "</table><script>alert('x')</script>"
    values = {"policy_version": 0, "num_tokens": 3, "finish_reason": "stop"}
    sample = Sample(iteration=0, group_id="0-0", prompt=hostile, response=hostile, reward=1.0, **values)
    page = page_of(hostile, [("reason", hostile)], {hostile: [(0, 1.0)]}, [sample], {"name": hostile})
    assert "<script" not in page
    assert page.count("&lt;script&gt;") == 8  # title, heading, reason, curve twice, prompt, response, configuration
    assert re.search(r"(src|href)=", page) is None


def test_curve_goes_from_its_lowest_to_its_highest_value() -> None:
    curve = curve_of("train/loss", [(3, 2.0), (4, float("nan")), (5, 1.0)])
    assert 'points="6.0,6.0 314.0,114.0"' in curve
    assert "2 to 1; from 1 to 2" in curve
    assert curve_of("x", [(0, float("inf"))]).count("polyline") == 1


def test_report_is_written(onbeat: Command, trained: str, tmp_path: Path) -> None:
    onbeat("report", trained, "-o", str(tmp_path / "r.html"))
    page = (tmp_path / "r.html").read_text()
    assert page.index("iteration/reward_mean") < page.index("train/loss")
    assert "smollm2" in page
    assert "prompt of 0-0" in page


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
