"""The trainer's spans: what the real loop tells of itself, and how many of them go with a commit."""

import json

import pytest

from onbeat.contracts.records import MAX_TRAINER_SPANS
from services.trainer.spans import Span, merged, to_record
from tests.trainer_fixtures import job_config, recorded_iterations, train


def test_neighbours_of_a_kind_merge_across_smallest_gaps_first():
    spans = [Span("micro_batch", 0, 1), Span("micro_batch", 1.1, 2), Span("micro_batch", 5, 6)]
    assert merged(spans, 2) == [Span("micro_batch", 0, 2), Span("micro_batch", 5, 6)]
    assert merged(spans, 3) == spans
    assert merged(spans[::-1], 1) == [Span("micro_batch", 0, 6)]


def test_other_kinds_in_between_are_kept_apart():
    spans = [Span("micro_batch", 0, 1), Span("optimizer", 1, 2), Span("micro_batch", 2, 3), Span("micro_batch", 4, 5)]
    assert merged(spans, 3) == [*spans[:2], Span("micro_batch", 2, 5)]
    assert merged(spans, 2) == [spans[1], Span("micro_batch", 2, 5)]  # no more to merge: the newest stay


def test_commit_holds_few_spans_for_any_number_of_micro_batches():
    spans = [Span("micro_batch", i, i + 0.5) for i in range(20_000)]
    record = to_record(spans, clock_offset_s=1e9)
    assert len(record) == MAX_TRAINER_SPANS
    assert record[0][:2] == ("micro_batch", 1e9)
    assert record[-1][1] + record[-1][2] == pytest.approx(1e9 + 19_999.5)
    assert len(json.dumps(record)) < 25_000


def test_loop_records_spans_in_order_and_a_checkpoint_one_later(tmp_path):
    config = job_config(schedule={"num_iterations": 2}, checkpoint={"every_iterations": 1})
    _, job = train(config, recorded_iterations(2), tmp_path)
    first, second = job.spans
    work = ["micro_batch"] * 4 + ["optimizer", "publish", "publish"]  # the snapshot, then its announcement
    assert [span.kind for span in first] == work
    assert [span.kind for span in second] == ["checkpoint", *work]
    moments = [moment for span in first + second for moment in (span.start, span.end)]
    assert moments == sorted(moments)
    trained_s = sum(span.end - span.start for span in first[:-1])
    assert trained_s == pytest.approx(job.reports[0]["train_s"], abs=1e-3)  # announcing is not training
