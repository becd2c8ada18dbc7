"""What the Python SDK promises besides its calls: types, a form for notebooks, figures, an example that runs."""

import importlib
import inspect
import os
import subprocess
import sys
import tomllib
from datetime import datetime
from pathlib import Path

import pytest

from onbeat.client import AsyncClient, Client, Jobs
from onbeat.client.notebook import MAX_ROWS, Records
from onbeat.plots import plot_metrics, plot_timeline
from onbeat.types import (
    AuditReport,
    Diagnosis,
    EvaluationRecord,
    Event,
    Finding,
    GroupDetail,
    IterationRecord,
    JobRecord,
    Record,
    Sample,
    Timeline,
    WorkerRecord,
)
from tests.unit.fake_broker import FakeJobs, evaluation_json, iteration_json, serve
from tests.unit.test_report import JOB

ROOT = Path(__file__).parents[2]
EVIL = "<script>alert(1)</script> & $\\href{x}$"
SCRIPT = """
import asyncio

from onbeat import AsyncClient, Client, JobConfig
from onbeat.client import ApiError, BrokerUnreachable, Series, Update
from onbeat.types import GroupDetail, IterationUpdate, JobRecord, Sample


def look(client: Client) -> list[Sample]:
    job: JobRecord = client.jobs.create(JobConfig.from_file("job.toml"), idempotency_key="mine")
    for update in client.jobs.stream(job.id):
        if isinstance(update, IterationUpdate):
            reward: float | None = update.record.reward_mean
            print(reward)
    curves: Series = client.jobs.metrics(job.id, after=3)
    group: GroupDetail = client.jobs.group(job.id, "g")
    print(curves, group, client.doctor().findings[0].sentence)
    samples = client.jobs.samples(job.id, min_reward=0.5)
    return samples[:3] + [samples[0]]


async def listen(job_id: str) -> None:
    async with AsyncClient("http://127.0.0.1:8800", api_key="k") as client:
        try:
            async for update in client.jobs.stream(job_id):
                seen: Update = update
                print(seen)
        except (ApiError, BrokerUnreachable) as error:
            print(error)
        job = await client.jobs.wait(job_id, timeout_s=3)
        print(job.state.is_final)


asyncio.run(listen("job-1"))
"""


def mypy(script: str, folder: Path) -> str:
    path = folder / "script.py"
    path.write_text(script)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--follow-imports=silent", str(path)]
    command += ["--cache-dir", str(ROOT / ".mypy_cache" / "user-script")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    return done.stdout + done.stderr


def test_user_script_passes_strict_types_and_a_wrong_one_fails(tmp_path: Path) -> None:
    assert "Success" in (said := mypy(SCRIPT, tmp_path)), said
    wrong = SCRIPT.replace("reward: float | None", "reward: str").replace("after=3", "behind=3")
    said = mypy(wrong, tmp_path)
    assert "[assignment]" in said
    assert '"behind"' in said


def test_types_are_shipped() -> None:
    package_data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert (ROOT / "onbeat" / "py.typed").is_file()
    assert "py.typed" in package_data["onbeat"]


# ---- notebooks ---------------------------------------------------------------------------------------------------

SAMPLE = Sample(
    iteration=1,
    group_id="g",
    policy_version=1,
    prompt=EVIL,
    response=EVIL,
    reward=1,
    num_tokens=2,
    finish_reason="stop",
)
AUDIT = {"num_entries": 1, "num_groups": 1, "num_commits": 1, "num_contents": 1, "num_contents_gone": 0, "head": "a"}
SHOWN: list[Record | Records[Record]] = [
    JOB.model_copy(update={"name": EVIL, "error": EVIL}),
    Records([JOB.model_copy(update={"name": EVIL})]),
    SAMPLE,
    Records([SAMPLE]),
    GroupDetail(
        **{"iteration": 1, "group_id": "g", "policy_version": 1, "worker_id": EVIL, "prompt": EVIL, "failure": EVIL},
        **{"num_prompt_tokens": 3, "generate_s": 1, "score_s": 1, "responses": [SAMPLE], "tokens": [[]]},
    ),
    Diagnosis(is_healthy=False, findings=[Finding(sentence=EVIL, is_problem=True)]),
    AuditReport(is_clean=False, violation=EVIL, **AUDIT),
    Records([Event(id="1-0", time=1.0, kind=EVIL, message=EVIL)]),
    Records([WorkerRecord(id=EVIL, state=EVIL, last_seen_at=1.0)]),
    Records([EvaluationRecord.model_validate(evaluation_json(1) | {"message": EVIL})]),
    Timeline.model_validate({"start": 0, "end": 1, "iterations": [0], "lanes": [{"id": EVIL}], "spans": []}),
]


@pytest.mark.parametrize("shown", SHOWN, ids=lambda shown: type(shown).__name__)
def test_notebooks_show_whatever_was_said_as_text(shown: Record | Records[Record]) -> None:
    html = shown._repr_html_()
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; $" in html
    assert "<script" not in html
    assert 'class="tex2jax_ignore mathjax_ignore"' in html  # dollar signs begin no formula


def test_notebooks_show_a_job_with_progress_without_config() -> None:
    html = JOB.model_copy(update={"next_iteration": 3})._repr_html_()  # type: ignore[operator]
    assert '<progress value="3" max="12">' in html
    assert "SUCCEEDED" in html
    assert datetime.fromtimestamp(90).strftime("%H:%M:%S") in html  # created_at
    assert "periodic" not in html


def test_notebooks_show_lists_slices_and_long_lists_as_tables() -> None:
    records = Records(IterationRecord.model_validate(iteration_json(i)) for i in range(MAX_ROWS + 5))
    html = records._repr_html_()
    assert html.count("<tr>") == 1 + MAX_ROWS
    assert "and 5 more" in html
    assert isinstance(records[3:6], Records)
    assert records[3:6]._repr_html_().count("<tr>") == 1 + 3
    assert records[3] is list(records)[3]
    assert "none" in Records[JobRecord]()._repr_html_()


def test_reprs_say_what_is_known_and_fill_no_pages() -> None:
    text = repr(JOB.model_copy(update={"config": {"a": "b" * 1000}}))
    assert text.startswith("JobRecord(id='j', name='n', pool='default', state='SUCCEEDED'")
    assert "None" not in text
    assert len(text) < 300
    assert repr(Client("http://127.0.0.1:1")) == "Client('http://127.0.0.1:1')"


def test_records_make_rows_of_a_data_frame() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame([record.model_dump() for record in [IterationRecord.model_validate(iteration_json(3))]])
    assert frame.reward_mean[0] == pytest.approx(0.3)


# ---- figures -----------------------------------------------------------------------------------------------------

RUN = {
    "iteration/reward_mean": [(0, 0.25), (1, 0.5)],
    "iteration/reward_std": [(0, 0.25), (1, 0.125)],
    "train/kl": [(1, 0.01)],
    "train/other": [(0, 1.0)],
}


def test_curves_have_a_chart_per_metric_a_line_per_run_a_band() -> None:
    figure = plot_metrics(RUN, {"train/kl": [(0, 0.1)]}, labels=["first $", "second"])
    reward, kl = figure.axes
    assert (reward.get_title(), kl.get_title()) == ("reward", "KL")
    assert [line.get_label() for line in reward.lines] == ["first \\$", "second"]
    assert list(reward.lines[0].get_ydata()) == [0.25, 0.5]
    band = reward.collections[0].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == (0.0, 0.625)
    assert [list(line.get_xdata()) for line in kl.lines] == [[1], [0]]
    assert [axes.get_title() for axes in plot_metrics(RUN, names=["train/other"]).axes] == ["train/other"]
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_timeline_is_drawn_with_a_lane_each() -> None:
    spans = [("trainer", "micro_batch", 11.0, 12.0), ("r1", "generate", 10.0, 11.5), ("r1", "score", 11.5, 12.0)]
    names = ("lane", "kind", "start", "end")
    lanes = [{"id": "trainer", "idle_frac": 0.5}, {"id": "r1", "idle_frac": 0.25}]
    found = [dict(zip(names, span, strict=True)) | {"iteration": 0} for span in spans]
    figure = plot_timeline(
        Timeline.model_validate({"start": 10, "end": 12, "iterations": [0], "lanes": lanes, "spans": found})
    )
    (axes,) = figure.axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["trainer (idle 50%)", "r1 (idle 25%)"]
    boxes = [bars.get_paths()[0].get_extents().bounds[::2] for bars in axes.collections]  # start, seconds
    assert boxes == [(1.0, 1.0), (0.0, 1.5), (1.5, 0.5)]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["generate", "score", "micro-batch"]


def test_nothing_to_draw_is_said() -> None:
    with pytest.raises(ValueError, match="has an iteration been committed"):
        plot_metrics({})
    with pytest.raises(ValueError, match="has an iteration been committed"):
        plot_timeline(Timeline(start=0, end=1, iterations=[], lanes=[], spans=[]))


def test_without_matplotlib_plots_name_it_and_all_else_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    monkeypatch.delitem(sys.modules, "onbeat.plots")
    with pytest.raises(ImportError, match="pip install matplotlib"):
        importlib.import_module("onbeat.plots")
    code = "import sys, onbeat.client; print([n for n in ('matplotlib', 'numpy') if n in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT) == "[]\n"


# ---- example and page --------------------------------------------------------------------------------------------


def test_example_runs(tmp_path: Path) -> None:
    with serve(FakeJobs()) as url:
        command = [sys.executable, str(ROOT / "examples" / "sdk.py"), "3"]
        env = os.environ | {"ONBEAT_URL": url, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "best at the end: job-" in done.stdout
    for name in ("curves.png", "timeline.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_page_of_the_sdk_names_every_public_method() -> None:
    page = (ROOT / "docs" / "sdk.md").read_text()
    for face, prefix in ((Jobs, "jobs."), (Client, ""), (AsyncClient, "")):
        for name, _ in inspect.getmembers(face, callable):
            if not name.startswith("_"):
                assert f"`{prefix}{name}" in page, f"docs/sdk.md does not name {prefix}{name}"
    for name in ("plot_metrics", "plot_timeline"):
        assert f"`{name}" in page
